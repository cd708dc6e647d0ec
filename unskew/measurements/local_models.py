"""Drift of local models, and their accuracy on their own and on all data (Ye et al. 2023, Figure 2)."""

from __future__ import annotations

import math

import torch

from unskew.data.federation import Federation
from unskew.measurements.base import Diagnostic
from unskew.simulation.evaluate import Evaluator
from unskew.simulation.server import Server


class LocalModels(Diagnostic):
    """Collects the local models ``theta_k`` of a round and measures them against the next global model.

    Three means over the clients of a round: ``local_distance``, ``||theta_k - theta_{t+1}||_2``; ``local_accuracy``, of
    ``theta_k`` on the global test set; ``local_personal_accuracy``, the same with the test set's classes weighted by the
    client's own class frequencies, or on what the client holds out, if it does.

    Args:
        evaluator: Of the run.
        server: Its server, whose updates are watched from now on.
        federation: What its clients train on.
    """

    def __init__(self, evaluator: Evaluator, server: Server, federation: Federation):
        super().__init__(server)
        self.evaluator, self.federation = evaluator, federation

    def metrics(self) -> dict[str, float]:
        """The three means."""
        distance = accuracy = personal = 0.0
        for update, local in zip(self.updates, self.models(), strict=True):
            distance += float(torch.linalg.vector_norm(local - self.server.v))
            accuracy += self.evaluator.evaluate_test(local, update.buffers).accuracy
            client = self.federation.clients[update.client]
            # Several labels cannot be weighted by classes: nothing can be said of a client that holds nothing out.
            has_score = self.federation.task == "classification" or len(client.y_test) > 0
            personal += self.evaluator.one(local, update.buffers, client).accuracy if has_score else math.nan
        count, scored = len(self.updates), self.federation.objective.scored
        return {
            "local_distance": distance / count,
            f"local_{scored}": accuracy / count,
            f"local_personal_{scored}": personal / count,
        }
