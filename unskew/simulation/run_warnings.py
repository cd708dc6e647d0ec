"""Warnings on runs that do not go well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unskew.simulation.network import Network
from unskew.simulation.server import Server


def nonfinite_update_warning(server: Server, done: int, client_names: Sequence[str] = ()) -> str | None:
    """Return a warning after round ``done`` if it is the first one with non-finite updates.

    Args:
        server: Server after the round.
        done: Number of finished rounds.
        client_names: Names of the clients.
    """
    if server.overflowed and server.overflows == 1:
        return (
            f"Round {done}: the server step gave values that are not finite, so the model is unchanged and the "
            "round's updates are left out. Later ones are only counted (updates_skipped); smaller rates and steps of the "
            "server, or of the clients, may help."
        )
    if server.skipped_clients and server.num_skipped == len(server.skipped_clients):
        names = [client_names[client] if client_names else str(client) for client in server.skipped_clients]
        shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
        return (
            f"Round {done}: the updates of clients {shown} are not finite and are left out. "
            "Later ones are only counted (updates_skipped); a smaller learning rate may help."
        )
    return None


DIVERGED = 1000.0
"""A test loss above this is that of a model that diverged, of any task: a loss at the start is below 20."""


def divergence_warning(row: Mapping[str, Any]) -> str | None:
    """Return a warning if a run diverged, as the line of its last round shows.

    Args:
        row: The line, as in ``metrics.jsonl``.
    """
    skipped, taken, loss = row.get("skipped", 0), row.get("updates", 0), row["loss"]
    if skipped > taken:
        why = f"{skipped} of {skipped + taken} updates of round {row['round']} are not finite"
    elif loss is None or loss > DIVERGED:
        why = f"the test loss after round {row['round']} is {'not finite' if loss is None else f'{loss:.3g}'}"
    else:
        return None
    return (
        f"The run diverged: {why}. Its model is of no use; repeat the run with a smaller learning rate (lr), fewer local "
        "steps, or set clip_grad_norm."
    )


def model_unchanged_warning(network: Network, rounds: int) -> str:
    """Return a warning for a model that did not change in a number of rounds.

    Args:
        network: Network of the run.
        rounds: Number of rounds.
    """
    waiting = len(network.pending)
    what = (
        f"{waiting} updates were still on their way" if waiting else "no update was used, or those that were are zero"
    )
    return (
        f"The model did not change in {rounds} rounds: {what}, or the server waited for more of them (figures of the "
        "rounds show which). Use more rounds, shorter delays or a smaller buffer."
    )
