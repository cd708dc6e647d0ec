"""Inline engine: one client after another in this process. The simplest engine, and the fastest on one core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from unskew.engines.base import EngineConfig
from unskew.engines.local_trainer import LocalTrainer
from unskew.engines.vmap_trainer import GroupTrainer, schedule_groups, steps_per_client
from unskew.protocol.messages import Broadcast, Update


class InlineEngine:
    """Trains the clients of a cohort in turn on one reused model.

    Args:
        setup: Configuration of the engine.
        clients_per_group: Number of clients that are trained at once.
        threads: Number of threads until the engine is closed; None for PyTorch's.

    Attributes:
        name: Name of the engine.
    """

    name = "inline"

    def __init__(self, setup: EngineConfig, clients_per_group: int = 1, threads: int | None = None):
        self.threads_before = torch.get_num_threads()
        if threads is not None:
            torch.set_num_threads(threads)
        self.setup, self.clients_per_group = setup, clients_per_group
        self.trainer = LocalTrainer(setup)
        self.group = GroupTrainer(setup, self.trainer, setup.group_form()) if clients_per_group > 1 else None

    def train(self, broadcasts: Sequence[Broadcast]) -> Iterator[Update]:
        """Train a cohort and yield its updates in order."""
        if self.group is None:
            for broadcast in broadcasts:
                yield self.trainer.train(broadcast)
            return
        done: dict[int, Update] = {}
        for part in schedule_groups(broadcasts, steps_per_client(self.setup, broadcasts), self.clients_per_group):
            done.update(zip(part, self.group.train([broadcasts[index] for index in part]), strict=True))
        yield from (done[index] for index in range(len(broadcasts)))

    def close(self) -> None:
        """Restore the number of threads."""
        torch.set_num_threads(self.threads_before)
