"""Drift of local models, and their scores on the client's own and on all data (Ye et al. 2023, Figure 2)."""

from __future__ import annotations

import math

import torch

from unskew.data.federation import Federation
from unskew.measurements.base import Diagnostic
from unskew.simulation.evaluate import Evaluator
from unskew.simulation.server import Server


class LocalModels(Diagnostic):
    """Drift and scores of a round's local models ``theta_k``.

    Means over the clients of a round: ``local_distance``, ``||theta_k - theta_{t+1}||_2`` to the next global model;
    ``local_accuracy`` on the global test set; ``local_personal_accuracy`` on the client's held-out samples, or, if it
    has none, on the test set weighted to the client's class frequencies (null for multilabel tasks).

    Args:
        evaluator: Evaluator of the run.
        server: Server of the run, whose updates are collected from now on.
        federation: Data that the clients train on.
    """

    def __init__(self, evaluator: Evaluator, server: Server, federation: Federation):
        super().__init__(server)
        self.evaluator, self.federation = evaluator, federation

    def metrics(self) -> dict[str, float]:
        """Return the three means."""
        distance = accuracy = personal = 0.0
        for update, local in zip(self.updates, self.models(), strict=True):
            distance += float(torch.linalg.vector_norm(local - self.server.state.v))
            accuracy += self.evaluator.evaluate_test(local, update.buffers).accuracy
            client = self.federation.clients[update.client]
            # Only single-label test sets can be weighted by classes; other tasks need held-out samples.
            has_score = "one_class" in self.federation.objective.provides or len(client.y_test) > 0
            personal += (
                self.evaluator.evaluate_client(local, update.buffers, client).accuracy if has_score else math.nan
            )
        count, scored = len(self.updates), self.federation.objective.scored
        return {
            "local_distance": distance / count,
            f"local_{scored}": accuracy / count,
            f"local_personal_{scored}": personal / count,
        }
