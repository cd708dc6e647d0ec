"""Warnings about runs with problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unskew.attacks.registry import divergence_remedy
from unskew.errors import abbreviate
from unskew.simulation.aggregator import SkippedUpdates
from unskew.simulation.network import Network


def nonfinite_update_warning(
    skipped: SkippedUpdates, done: int, client_names: Sequence[str] = (), attack: str | None = None
) -> str | None:
    """Return a warning if round ``done`` is the first one with non-finite updates.

    Args:
        skipped: Updates skipped so far.
        done: Number of finished rounds.
        client_names: Names of the clients.
        attack: Kind of the attack on the run, or None.
    """
    if skipped.overflowed and skipped.overflows == 1:
        return (
            f"Round {done}: the server step gave values that are not finite, so the model is unchanged and the round's "
            "updates are skipped. Later cases are only counted (updates_skipped). A smaller server or client learning rate, "
            "or fewer steps, may help."
        )
    if skipped.clients and skipped.total == len(skipped.clients):
        names = [client_names[client] if client_names else str(client) for client in skipped.clients]
        return (
            f"Round {done}: the updates of clients {abbreviate(names, 10)} are not finite and are skipped. "
            f"Later cases are only counted (updates_skipped). {divergence_remedy(attack)}"
        )
    return None


DIVERGED = 1000.0
"""Test loss above which a model of any task counts as diverged; initial losses are below 20."""


def divergence_warning(row: Mapping[str, Any], attack: str | None = None) -> str | None:
    """Return a warning if a run diverged, judged by the metrics of its last round.

    Args:
        row: Metrics of the round, as in ``metrics.jsonl``.
        attack: Kind of the attack on the run, or None.
    """
    skipped = row.get("skipped", 0)
    taken = row.get("updates", 0)
    loss = row["loss"]
    if skipped > taken:
        why = f"{skipped} of {skipped + taken} updates of round {row['round']} are not finite"
    elif loss is None or loss > DIVERGED:
        why = f"the test loss after round {row['round']} is {'not finite' if loss is None else f'{loss:.3g}'}"
    else:
        return None
    problem = f"The run diverged: {why}. The model is not usable."
    if attack is not None:
        return f"{problem} {divergence_remedy(attack)}"
    return f"{problem} Repeat the run with a smaller learning rate (lr), fewer local steps, or set clip_grad_norm."


def late_updates_warning(history: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a warning if more than half of the updates of a run were lost because they were late.

    Args:
        history: Metrics of each round.
    """
    late, discarded = (sum(row.get(name, 0) for row in history) for name in ("late", "discarded"))
    total = late + discarded + sum(row.get("updates", 0) + row.get("skipped", 0) for row in history)
    if 2 * (late + discarded) <= total:
        return None
    reasons = {"missed network.deadline": late, "arrived in a later round": discarded}
    why = " or ".join(reason for reason, count in reasons.items() if count)
    remedy = "a longer deadline" if late else "shorter delays"
    return (
        f"{late + discarded} of {total} updates {why} and were lost. Use {remedy}, or a method that uses late updates, such "
        "as fedbuff."
    )


def model_unchanged_warning(network: Network, rounds: int) -> str:
    """Return a warning for a model that never changed.

    Args:
        network: Network of the run.
        rounds: Number of rounds.
    """
    waiting = len(network.pending)
    what = f"{waiting} updates were still in flight" if waiting else "no update was used, or all used updates are zero"
    return (
        f"The model did not change in {rounds} rounds: {what}, or the server buffer never filled (metrics.jsonl shows "
        "which). Use more rounds, shorter delays or a smaller buffer."
    )
