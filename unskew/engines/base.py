"""What every engine is given and must do: train the clients of a cohort, same numbers whichever engine does it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from unskew.data.federation import Federation
from unskew.models.vector import ModelSpec
from unskew.protocol.rules import Broadcast, ClientRule, Update
from unskew.protocol.training import Training
from unskew.tasks import Task


@dataclass(frozen=True)
class Setup:
    """All that an engine needs for a run."""

    spec: ModelSpec
    federation: Federation
    rules: tuple[ClientRule, ...]
    task: Task
    training: Training
    seed: int
    device: torch.device


class Engine(Protocol):
    """A way to run local training."""

    name: str

    def train(self, casts: Sequence[Broadcast]) -> Iterator[Update]:
        """Train each client from its broadcast; updates come back in the order of ``casts``."""

    def close(self) -> None:
        """Free processes and memory."""
