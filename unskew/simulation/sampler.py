"""Client sampling, which in a simulation depends only on seed and round, so every method trains the same clients."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from unskew.protocol.round_plan import Sampling
from unskew.seeding import numpy_generator


class Sampler:
    """Draws the cohort of each round: a fixed number of clients uniformly without replacement, or each independently.

    Args:
        clients: Number of registered clients ``K``.
        participation: Share of clients per round, ``q``; a fixed cohort has at least one client.
        seed: Seed of the run. None draws from the system's entropy, because amplification by sampling requires that
            clients cannot predict the cohort.
        sampling: ``fixed``, or ``poisson``: each client is drawn with probability ``q``; a cohort may be empty.

    >>> Sampler(clients=10, participation=0.3, seed=0).draw(0) == Sampler(10, 0.3, 0).draw(0)
    True
    """

    def __init__(self, clients: int, participation: float, seed: int | None, sampling: Sampling = "fixed"):
        self.clients, self.participation = clients, participation
        self.seed, self.sampling = seed, sampling
        self.size = max(1, round(participation * clients))

    def draw(self, round: int, in_flight: Collection[int] = ()) -> list[int]:
        """Draw the client ids of a round, in ascending order: fewer than usual if too few clients are idle.

        Args:
            round: Number of the round, from 0.
            in_flight: Clients that are still training.
        """
        draws = np.random.default_rng() if self.seed is None else numpy_generator(self.seed, "cohort", round)
        if self.sampling == "poisson":
            chosen = np.flatnonzero(draws.random(self.clients) < self.participation)
            chosen = np.setdiff1d(chosen, np.fromiter(in_flight, int))
        elif in_flight:
            idle = np.setdiff1d(np.arange(self.clients), np.fromiter(in_flight, int))
            chosen = draws.choice(idle, size=min(self.size, len(idle)), replace=False)
        elif self.size == self.clients:
            chosen = np.arange(self.clients)
        else:
            chosen = draws.choice(self.clients, size=self.size, replace=False, shuffle=False)
        return [int(k) for k in np.sort(chosen)]
