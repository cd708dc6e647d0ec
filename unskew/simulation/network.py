"""What lies between clients and server: which updates arrive, and when."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from unskew.methods.rules import Update
from unskew.seeding import numpy_generator


class Network:
    """Delivers at once; a client's update is lost with probability ``drop``.

    A client that drops out received the model (those bytes are counted) but sends nothing and keeps no new state.
    """

    def __init__(self, drop: float, seed: int):
        self.drop, self.seed = drop, seed
        self.in_flight: frozenset[int] = frozenset()

    def drops(self, round: int, client: int) -> bool:
        """Whether this client fails in this round; known before it trains, so no time is spent on it."""
        return self.drop > 0 and numpy_generator(self.seed, "drop", round, client).random() < self.drop

    def deliver(self, round: int, results: Iterable[Update]) -> Iterator[Update]:
        """The updates that reach the server in ``round``."""
        return (dataclasses.replace(update, arrived=round) for update in results)
