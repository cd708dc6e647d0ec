"""Vectorized engine: a whole cohort at once under ``torch.func.vmap``, for GPUs that one client cannot fill."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

from unskew.engines.base import EngineConfig
from unskew.engines.local_trainer import LocalTrainer
from unskew.engines.vmap_trainer import GroupTrainer, client_kind
from unskew.protocol.messages import Broadcast, Update

WIDTH = 64
"""Largest number of clients mapped at once; a larger cohort is split."""


class VectorizedEngine:
    """Maps local training over the clients of a cohort."""

    name = "vectorized"

    def __init__(self, setup: EngineConfig):
        self.setup = setup
        self.trainer = GroupTrainer(setup, LocalTrainer(setup))

    def train(self, broadcasts: Sequence[Broadcast]) -> Iterator[Update]:
        """Train a cohort and yield its updates in order."""
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for index, broadcast in enumerate(broadcasts):
            groups[client_kind(broadcast)].append(index)
        done: dict[int, Update] = {}
        for group in groups.values():
            for first in range(0, len(group), WIDTH):
                part = group[first : first + WIDTH]
                done.update(zip(part, self.trainer.mapped([broadcasts[p] for p in part]), strict=True))
        return (done[index] for index in range(len(broadcasts)))

    def close(self) -> None:
        """Do nothing, because there is nothing to release."""
