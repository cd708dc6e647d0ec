"""Interface of engines: train the clients of a cohort, with the same numbers on every engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from unskew.data.federation import Federation
from unskew.models.spec import ModelSpec
from unskew.protocol.messages import Broadcast, Tensors, Update
from unskew.protocol.rules import ClientRule
from unskew.protocol.training_config import Buffers, Training
from unskew.tasks.base import Task


def ignore_retries(clients: int) -> None:
    """Nobody counts retries."""


@dataclass(frozen=True)
class EngineConfig:
    """All that an engine needs for a run.

    Attributes:
        spec: The model's layout.
        federation: The data.
        rules: The client rules, in order.
        task: Loss and probabilities.
        training: The clients' budget.
        seed: Of the run.
        device: Where the model is.
        buffers: Whether normalization statistics are averaged, stay at the client, or begin anew in every round.
        common: What each rule sent to every client alike before the first round.
        stall_warning_seconds: Warn through ``warn`` after this many seconds without a reply from any worker.
        tell: Tells the user something.
        retried: Counts clients that were trained again because a worker or a node died.
    """

    spec: ModelSpec
    federation: Federation
    rules: tuple[ClientRule, ...]
    task: Task
    training: Training
    seed: int
    device: torch.device
    buffers: Buffers = "average"
    common: dict[str, Tensors] = field(default_factory=dict)
    stall_warning_seconds: float = 600.0
    warn: Callable[[str], None] = warnings.warn
    retried: Callable[[int], None] = ignore_retries


class Engine(Protocol):
    """A way to run local training."""

    name: str

    def train(self, broadcasts: Sequence[Broadcast]) -> Iterator[Update]:
        """Train each client from its broadcast; updates come back in the order of ``broadcasts``."""

    def close(self) -> None:
        """Free processes and memory."""
