"""Cost of reaching a target in rounds, traffic and simulated time, relative to FedAvg and without data rules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from unskew.errors import ConfigError
from unskew.methods.registry import rule_class
from unskew.records.recorder import first_reaching
from unskew.tasks.primary_metric import MetricInfo


@dataclass(frozen=True)
class TargetCost:
    """Cost of the target for one method.

    Attributes:
        method: Method expression.
        rounds: Mean over seeds; None if a seed does not reach the target.
        bytes: Bytes up and down of all clients until the target, including those before training; mean over seeds. None
            if a seed does not reach the target.
        limit: Number of rounds of the longest run.
        against: The same method without its data rules (such as ``fedssyn``), if it is in the comparison.
        speed_up: Rounds of ``against`` divided by ``rounds``.
        speed_up_at_least: Whether ``speed_up`` is a lower bound, because ``against`` misses the target in a seed: there, it
            needs at least one round more than the run has.
        saving: ``1 - bytes / bytes of fedavg``.
        saving_at_least: Whether ``saving`` is a lower bound, because fedavg misses the target in a seed: there, it needs at
            least the bytes of the whole run.
        seconds: Simulated seconds until the target, mean over seeds; None if a seed does not reach it, or without a
            virtual clock.
    """

    method: str
    rounds: float | None
    bytes: float | None
    limit: int
    against: str | None = None
    speed_up: float | None = None
    speed_up_at_least: bool = False
    saving: float | None = None
    saving_at_least: bool = False
    seconds: float | None = None


def target_costs(
    histories: dict[str, list[list[dict[str, Any]]]], target: float, objective: MetricInfo | None = None
) -> list[TargetCost]:
    """Compute the cost of a target for the methods of a comparison.

    Args:
        histories: For each method, the history of each seed: one dictionary per round, with the closing step of the method
            (``Comparison.closed_histories``).
        target: Value of the objective.
        objective: Metric by which runs are compared; that of ``objective: auto`` if None.
    """
    needs = {name: _needs(runs, target, objective) for name, runs in histories.items()}
    costs = []
    for name, runs in histories.items():
        own = needs[name]
        rounds, sent = (own.rounds, own.bytes) if own.reached else (None, None)
        limit = max(history[-1]["round"] for history in runs)
        cost = TargetCost(name, rounds, sent, limit, seconds=own.seconds if own.reached else None)
        partner = without_data_rules(name)
        if partner != name and partner in histories:
            base = needs[partner]
            cost = replace(cost, against=partner)
            if rounds is not None:
                cost = replace(cost, speed_up=base.rounds / rounds, speed_up_at_least=not base.reached)
        if "fedavg" in histories and name != "fedavg" and sent is not None:
            base = needs["fedavg"]
            cost = replace(cost, saving=1 - sent / base.bytes, saving_at_least=not base.reached)
        costs.append(cost)
    return costs


@dataclass(frozen=True)
class _Needs:
    """Means over seeds of what a target needs; lower bounds if a seed does not reach it."""

    reached: bool
    rounds: float
    bytes: float
    seconds: float | None


def _needs(runs: list[list[dict[str, Any]]], target: float, objective: MetricInfo | None) -> _Needs:
    """Return the mean rounds, bytes and simulated seconds until the target, over seeds."""
    firsts = [first_reaching(history, target, objective) for history in runs]
    rows = [history[-1] if first is None else first for history, first in zip(runs, firsts, strict=True)]
    rounds = [row["round"] + (first is None) for row, first in zip(rows, firsts, strict=True)]
    times = [row["seconds_simulated"] for row in rows if "seconds_simulated" in row]
    return _Needs(
        None not in firsts,
        fmean(rounds),
        fmean(row["bytes_up"] + row["bytes_down"] for row in rows),
        fmean(times) if times else None,
    )


def without_data_rules(spelling: str) -> str:
    """Return a method expression without the methods that only fill the slot ``data``; fedavg if nothing else is left.

    >>> without_data_rules("fedssyn:n_syn=50+scaffold"), without_data_rules("fedssyn"), without_data_rules("scaffold")
    ('scaffold', 'fedavg', 'scaffold')
    """
    rest = [part for part in spelling.split("+") if not _only_data(part.split(":")[0].strip())]
    return "+".join(rest) or "fedavg"


def _only_data(name: str) -> bool:
    from unskew.protocol.method import class_slots

    try:
        return class_slots(rule_class(name)) == ["data"]
    except ConfigError:  # a method defined in Python, or a part of a number such as 1e+3
        return False
