"""Client sampling, which depends only on seed and round, so every method trains the same clients."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from unskew.seeding import numpy_generator


class Sampler:
    """Draws a cohort uniformly without replacement.

    Args:
        clients: Number of registered clients ``K``.
        participation: Share of clients per round; at least one client is drawn.
        seed: Seed of the run.

    >>> Sampler(clients=10, participation=0.3, seed=0).draw(0) == Sampler(10, 0.3, 0).draw(0)
    True
    """

    def __init__(self, clients: int, participation: float, seed: int):
        self.clients, self.seed = clients, seed
        self.size = max(1, round(participation * clients))

    def draw(self, round: int, in_flight: Collection[int] = ()) -> list[int]:
        """Draw the client ids of a round, in ascending order: fewer than usual if too few clients are idle.

        Args:
            round: Number of the round, from 0.
            in_flight: Clients that are still training.
        """
        draws = numpy_generator(self.seed, "cohort", round)
        if in_flight:
            idle = np.setdiff1d(np.arange(self.clients), np.fromiter(in_flight, int))
            chosen = draws.choice(idle, size=min(self.size, len(idle)), replace=False)
        elif self.size == self.clients:
            chosen = np.arange(self.clients)
        else:
            chosen = draws.choice(self.clients, size=self.size, replace=False, shuffle=False)
        return [int(k) for k in np.sort(chosen)]
