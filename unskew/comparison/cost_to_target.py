"""Cost of reaching a target in rounds, traffic and simulated time, relative to FedAvg and without data rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
        limit: Number of rounds of the run.
        against: The same method without its data rules (such as ``fedssyn``), if it is in the comparison.
        speed_up: Rounds of ``against`` divided by ``rounds``.
        speed_up_at_least: Whether ``speed_up`` is a lower bound, because ``against`` does not reach the target.
        saving: ``1 - bytes / bytes of fedavg``.
        saving_at_least: Whether ``saving`` is a lower bound, because fedavg does not reach the target.
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
        histories: For each method, the history of each seed: one dictionary per round.
        target: Value of the objective.
        objective: Metric by which runs are compared; that of ``objective: auto`` if None.
    """
    needs = {name: _needs(runs, target, objective) for name, runs in histories.items()}
    costs = []
    for name, runs in histories.items():
        (rounds, sent, seconds), limit = needs[name], len(runs[0])
        cost = TargetCost(name, rounds, sent, limit, seconds=seconds)
        partner = without_data_rules(name)
        if partner != name and partner in histories:
            needed = needs[partner][0]
            cost = replace(cost, against=partner)
            if rounds is not None:
                cost = replace(cost, speed_up=(needed or limit) / rounds, speed_up_at_least=needed is None)
        if "fedavg" in histories and name != "fedavg" and sent is not None:
            needed, spent = needs["fedavg"][1], _sent([history[-1] for history in histories["fedavg"]])
            cost = replace(cost, saving=traffic_saving(sent, needed, spent), saving_at_least=needed is None)
        costs.append(cost)
    return costs


def traffic_saving(sent: float, needed: float | None, spent: float) -> float:
    """Return ``1 - mine / needed``; if the other method did not reach the target, ``spent`` gives a lower bound.

    Args:
        sent: Bytes that the method needed.
        needed: Bytes that the other method needed; None if it did not reach the target.
        spent: Bytes that the other method sent in the whole run.

    >>> traffic_saving(3, 6, 12), traffic_saving(3, None, 12)
    (0.5, 0.75)
    """
    return 1 - sent / (spent if needed is None else needed)


def _needs(
    runs: list[list[dict[str, Any]]], target: float, objective: MetricInfo | None
) -> tuple[float | None, float | None, float | None]:
    """Return the mean rounds, bytes and simulated seconds until the target, over seeds; None if a seed misses it."""
    rows = [row for history in runs if (row := first_reaching(history, target, objective)) is not None]
    if len(rows) < len(runs):
        return None, None, None
    times = [row["seconds_simulated"] for row in rows if "seconds_simulated" in row]
    seconds = sum(times) / len(times) if times else None
    return sum(row["round"] for row in rows) / len(rows), _sent(rows), seconds


def _sent(rows: Sequence[dict[str, Any]]) -> float:
    """Return the mean bytes up and down of rows of ``metrics.jsonl``, which count from the start of the run."""
    return float(sum(row["bytes_up"] + row["bytes_down"] for row in rows) / len(rows))


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
