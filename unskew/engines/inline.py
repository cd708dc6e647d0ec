"""One client after another in this process: the simplest engine, and on one core the fastest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unskew.engines.base import Setup
from unskew.engines.local import LocalTrainer
from unskew.protocol.messages import Broadcast, Update


class InlineEngine:
    """Trains the clients of a cohort in turn on one reused model."""

    name = "inline"

    def __init__(self, setup: Setup):
        self.trainer = LocalTrainer(setup)

    def train(self, casts: Sequence[Broadcast]) -> Iterator[Update]:
        """See ``unskew.engines.base.Engine``."""
        return map(self.trainer.train, casts)

    def close(self) -> None:
        """Nothing to free."""
