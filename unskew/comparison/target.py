"""What a target accuracy costs: rounds, traffic, and how much less of both than without shared data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unskew.errors import ConfigError
from unskew.methods.catalogue import rule_class, slots_of

History = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class TargetCost:
    """What one method needs for the target.

    Attributes:
        method: Its spelling.
        rounds: Mean over seeds; None if a seed does not reach the target.
        bytes: Up and down of all clients until then, mean over seeds; what was sent before training included.
        limit: Rounds that were made.
        against: The same method without shared data, if it was compared, too.
        speed_up: Rounds of ``against`` over its own; at least that if ``against`` does not reach the target.
        saving: ``1 - bytes / bytes of fedavg``; at least that if fedavg does not reach the target.
        speed_up_at_least, saving_at_least: Whether these are lower bounds.
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


def target_costs(histories: dict[str, list[list[dict[str, Any]]]], target: float) -> list[TargetCost]:
    """The costs of a target for the methods of a comparison.

    Args:
        histories: For each method, the history of each seed.
        target: An accuracy.
    """
    needs = {name: _needs(runs, target) for name, runs in histories.items()}
    costs = []
    for name, runs in histories.items():
        rounds, sent, limit = *needs[name], len(runs[0])
        partner = without_data(name)
        against = partner if partner != name and partner in histories else None
        faster, faster_bound = _compared(rounds, None if against is None else (needs[against][0], limit))
        base = None
        if "fedavg" in histories and name != "fedavg":
            base = (needs["fedavg"][1], _sent([history[-1] for history in histories["fedavg"]]))
        ratio, ratio_bound = _compared(sent, base)
        saving = None if ratio is None else 1 - 1 / ratio
        costs.append(TargetCost(name, rounds, sent, limit, against, faster, faster_bound, saving, ratio_bound))
    return costs


def _needs(runs: list[list[dict[str, Any]]], target: float) -> tuple[float | None, float | None]:
    """Mean rounds and bytes until every seed has reached the target."""
    rows = [next((r for r in h if r["accuracy"] is not None and r["accuracy"] >= target), None) for h in runs]
    reached = [row for row in rows if row is not None]
    if len(reached) < len(rows):
        return None, None
    return sum(row["round"] for row in reached) / len(reached), _sent(reached)


def _sent(rows: Sequence[dict[str, Any]]) -> float:
    return float(sum(row["bytes_up"] + row["bytes_down"] for row in rows) / len(rows))


def _compared(mine: float | None, base: tuple[float | None, float] | None) -> tuple[float | None, bool]:
    """``base / mine`` and whether it is a lower bound: ``base`` is what was needed, and what was spent in vain."""
    if mine is None or base is None:
        return None, False
    needed, spent = base
    return (spent if needed is None else needed) / mine, needed is None


def without_data(spelling: str) -> str:
    """A sum without the parts that only change the data; fedavg if nothing else is in it.

    >>> without_data("fedssyn:n_syn=50+scaffold"), without_data("fedssyn"), without_data("scaffold")
    ('scaffold', 'fedavg', 'scaffold')
    """
    rest = [piece for piece in spelling.split("+") if not _only_data(piece.split(":")[0].strip())]
    return "+".join(rest) or "fedavg"


def _only_data(name: str) -> bool:
    try:
        return slots_of(rule_class(name)) == ["data"]
    except ConfigError:  # a part that only Python knows, or the rest of a number such as 1e+3
        return False


def rounds_to(history: Sequence[dict[str, Any]], target: float) -> int | None:
    """The first round whose accuracy is at least ``target``."""
    return next((r["round"] for r in history if r["accuracy"] is not None and r["accuracy"] >= target), None)
