"""Poisson cohorts: each client takes part with probability ``q``, so a cohort may be empty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from unskew.protocol.client_sampler import ClientSampler, CohortDraws
from unskew.protocol.messages import Tensors
from unskew.protocol.round_plan import RoundPlan


@dataclass(frozen=True)
class PoissonSampler(ClientSampler):
    """Draws each client with probability ``q``, independently.

    Amplification of privacy requires that nobody can compute the cohort, so private runs draw it from a secret key.
    """

    name: ClassVar[str] = "poisson"

    def draw(self, state: Tensors, round: int, idle: np.ndarray, plan: RoundPlan, draws: CohortDraws) -> np.ndarray:
        """Draw from all clients, so that the draw of one does not depend on the others; those still training are left out."""
        return np.intersect1d(
            np.flatnonzero(draws.uniform(plan.clients) < plan.participation), idle, assume_unique=True
        )
