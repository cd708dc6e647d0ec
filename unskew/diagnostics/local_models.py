"""How far local models drift, and what they know of their own data and of everybody's (Ye et al. 2023, Figure 2)."""

from __future__ import annotations

import math

import torch

from unskew.data.federation import Federation
from unskew.methods.rules import Update
from unskew.simulation.evaluate import Evaluator
from unskew.simulation.server import Server


class LocalModels:
    """Collects the local models ``theta_k`` of a round and measures them against the next global model.

    Three means over the clients of a round: ``local_distance``, ``||theta_k - theta_{t+1}||_2``; ``local_accuracy``, of
    ``theta_k`` on the global test set; ``local_personal_accuracy``, the same with the test set's classes weighted by the
    client's own class frequencies, or on what the client holds out, if it does.

    Args:
        evaluator: Of the run.
        federation: Its data.
        server: Its server, whose updates are watched from now on.
    """

    def __init__(self, evaluator: Evaluator, federation: Federation, server: Server):
        self.evaluator, self.federation, self.server = evaluator, federation, server
        self.updates: list[Update] = []
        self.start = server.v
        server.watchers.append(self.updates.append)

    def begin(self) -> None:
        """The next round starts from the server's model."""
        self.start = self.server.v
        self.updates.clear()

    def figures(self) -> dict[str, float]:
        """The three means of the round that has just ended; nothing if no update came."""
        if not self.updates:
            return {}
        distance = accuracy = personal = 0.0
        for update in self.updates:
            local = local_model(update, self.start)
            distance += float(torch.linalg.vector_norm(local - self.server.v))
            accuracy += self.evaluator.score(local, update.buffers).accuracy
            client = self.federation.clients[update.client]
            # Several labels cannot be weighted by classes: nothing can be said of a client that holds nothing out.
            known = self.federation.task == "classification" or len(client.y_test) > 0
            personal += self.evaluator.one(local, update.buffers, client) if known else math.nan
        count = len(self.updates)
        return {
            "local_distance": distance / count,
            "local_accuracy": accuracy / count,
            "local_personal_accuracy": personal / count,
        }


def local_model(update: Update, start: torch.Tensor) -> torch.Tensor:
    """The whole model ``[d]`` of a client after its training, slices that were not sent included."""
    kept = update.state.get("model")
    return start + update.delta if kept is None else kept["v"]
