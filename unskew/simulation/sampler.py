"""Client sampling. Cohorts depend only on seed and round, so every method trains the same clients, except power-of-choice.

Power-of-choice: Cho, Wang, Joshi, "Client Selection in Federated Learning: Convergence Analysis and Power-of-Choice
Selection Strategies", 2020, arXiv:2010.01243, Section 4: ``D`` candidates are drawn without replacement, client ``k`` with
probability ``n_k / sum_j n_j``; they report their losses of the global model, and the ``m`` with the largest ones train.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from unskew.protocol.round_plan import Sampling, cohort_size
from unskew.secret_draws import SecretKey
from unskew.seeding import numpy_generator


class Sampler:
    """Draws the cohort of each round.

    Args:
        clients: Number of registered clients ``K``.
        participation: Share of clients per round, ``q``; a fixed cohort has at least one client.
        seed: Seed of the run.
        sampling: ``fixed``: uniformly without replacement; ``poisson``: each client is drawn with probability ``q``, and a
            cohort may be empty; or ``power-of-choice``.
        candidates: Number of candidates ``D`` of power-of-choice; None for other kinds.
        sizes: Number of samples of each client, ``[K]``, for power-of-choice.
        secret: Secret key from which Poisson cohorts are drawn instead, because amplification by sampling requires that
            nobody can compute the cohort.

    Attributes:
        size: Number of clients of a fixed cohort, ``m``.

    >>> Sampler(clients=10, participation=0.3, seed=0).draw(0) == Sampler(10, 0.3, 0).draw(0)
    True
    """

    def __init__(
        self,
        clients: int,
        participation: float,
        seed: int,
        sampling: Sampling = "fixed",
        candidates: int | None = None,
        sizes: np.ndarray | None = None,
        secret: SecretKey | None = None,
    ):
        self.clients, self.participation = clients, participation
        self.seed, self.sizes, self.secret = seed, sizes, secret
        self.sampling, self.candidates = sampling, candidates
        self.size = cohort_size(clients, participation)

    def draw(self, round: int, in_flight: Collection[int] = ()) -> list[int]:
        """Draw the client ids of a round, in ascending order: fewer than usual if too few clients are idle.

        With power-of-choice, these are the candidates.

        Args:
            round: Number of the round, from 0.
            in_flight: Clients that are still training.
        """
        draws = numpy_generator(self.seed, "cohort", round)
        if self.sampling == "poisson":
            uniform = draws.random if self.secret is None else self.secret.stream("cohort", round)
            chosen = np.flatnonzero(uniform(self.clients) < self.participation)
            chosen = np.setdiff1d(chosen, np.fromiter(in_flight, int))
        elif self.candidates is not None and self.sizes is not None:
            idle = np.setdiff1d(np.arange(self.clients), np.fromiter(in_flight, int))
            shares = self.sizes[idle] / self.sizes[idle].sum()
            chosen = draws.choice(idle, size=min(self.candidates, len(idle)), replace=False, p=shares)
        elif in_flight:
            idle = np.setdiff1d(np.arange(self.clients), np.fromiter(in_flight, int))
            chosen = draws.choice(idle, size=min(self.size, len(idle)), replace=False)
        elif self.size == self.clients:
            chosen = np.arange(self.clients)
        else:
            chosen = draws.choice(self.clients, size=self.size, replace=False, shuffle=False)
        return [int(k) for k in np.sort(chosen)]

    def select(self, candidates: Sequence[int], losses: Sequence[float]) -> list[int]:
        """Return the candidates with the largest losses, in ascending order; a loss that is not a number counts as smallest.

        Args:
            candidates: Client ids.
            losses: Loss of each candidate.

        >>> Sampler(clients=4, participation=0.5, seed=0).select([0, 2, 3], [0.1, 0.5, 0.3])
        [2, 3]
        """
        values = np.nan_to_num(np.array(losses, float), nan=-np.inf, posinf=np.inf)
        largest = np.argsort(-values, kind="stable")[: self.size]
        return sorted(candidates[index] for index in largest)
