"""Training budget and optimizer of a client."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from unskew.protocol.lr_schedule import LRSchedule, parse_schedule

Buffers = Literal["average", "local", "reset"]
"""Normalization buffers: averaged like parameters, kept at each client, or reset in every round."""


@dataclass(frozen=True)
class Training:
    """Budget and optimizer of a client, with the same meaning for every method.

    Attributes:
        local_steps: Mini-batch steps per round; None to use ``local_epochs``.
        local_epochs: Passes over the client's data per round.
        counted: Samples per client that determine the number of steps per epoch, if a client also trains on others;
            None if all training samples count.
        batch_size: Samples per step. The last batch of an epoch may be smaller, unless ``drop_last``.
        drop_last: Whether to skip a smaller last batch, unless it is the only one.
        optimizer: ``sgd``, ``adam`` or ``adamw``; created again in every round.
        lr: Learning rate, which is multiplied by ``lr_schedule``.
        momentum: Momentum of SGD; 0 for none.
        weight_decay: Weight decay; 0 for none.
        nesterov: Whether SGD uses Nesterov momentum.
        clip_grad_norm: Largest norm of a gradient, or None.
        augment: Whether to apply random crops (padding 4) and horizontal flips.
        precision: ``fp32``, ``tf32`` (TensorFloat-32 on CUDA), ``fp64`` or ``bf16`` (autocast of the forward pass; weights
            stay fp32).
        lr_schedule: Schedule expression, see ``unskew.protocol.lr_schedule``.
        lr_schedule_per: Whether the schedule counts rounds or local steps; ``step`` needs ``local_steps``.
        rounds: Number of rounds in the run, which some schedules depend on.
    """

    local_steps: int | None = None
    local_epochs: int | None = 5
    counted: tuple[int, ...] | None = None
    batch_size: int = 64
    drop_last: bool = False
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    clip_grad_norm: float | None = None
    augment: bool = False
    precision: Literal["fp32", "tf32", "fp64", "bf16"] = "fp32"
    lr_schedule: str = "constant"
    lr_schedule_per: Literal["round", "step"] = "round"
    rounds: int = 1

    @property
    def plain_sgd(self) -> bool:
        """Return whether a step is exactly ``v - lr * g``."""
        return self.optimizer == "sgd" and not self.momentum and not self.weight_decay and self.clip_grad_norm is None

    @property
    def step_length(self) -> float:
        """Learning rate times the configured number of steps: times a gradient, the size of an update."""
        return self.lr * (self.local_steps or 1)

    @property
    def schedule(self) -> LRSchedule:
        """Parsed learning-rate schedule."""
        return _parsed(self.lr_schedule)

    @property
    def scheduled(self) -> bool:
        """Return whether the learning rate changes during the run."""
        return self.schedule != LRSchedule()

    def rate(self, round: int, step: int | None = None) -> float:
        """Return the learning rate of a round or step.

        Training after the last round, such as ``ft``, uses the rate of the last round, see ``final_round``.

        Args:
            round: Number of the round, from 0.
            step: Number of the local step in the round; None for the mean over the round's steps.
        """
        if not self.scheduled:
            return self.lr
        if round >= self.rounds:
            round = max(0, 2 * self.rounds - 1 - round)
        if self.lr_schedule_per == "round":
            return self.lr * self.schedule.factor(round, self.rounds)
        steps = self.local_steps or 1
        if step is None:
            return sum(self.rate(round, s) for s in range(steps)) / steps
        return self.lr * self.schedule.factor(round * steps + step, self.rounds * steps)

    def final_round(self, executed: int) -> int:
        """Return the number of the training after the last round, from which its learning rate follows.

        If a run ends early, the number is larger by the rounds that were not executed.

        Args:
            executed: Number of rounds of the run that were executed.
        """
        return self.rounds + (self.rounds - executed if self.scheduled else 0)

    def at(self, round: int, step: int | None = None) -> Training:
        """Return a copy with a constant learning rate: the rate of the given round or step, see ``rate``.

        Args:
            round: Number of the round, from 0.
            step: Number of the local step; None for the mean over the round's steps.
        """
        return self.with_rate(self.rate(round, step)) if self.scheduled else self

    def with_rate(self, rate: float) -> Training:
        """Return a copy with a constant learning rate.

        Args:
            rate: Learning rate; a tensor in a recorded step.
        """
        return replace(self, lr=rate, lr_schedule="constant")

    def steps(self, num_samples: int, client: int) -> int:
        """Return the number of local steps per round.

        Args:
            num_samples: Number of samples of the client.
            client: Client number.
        """
        if self.local_steps is not None:
            return self.local_steps
        num_samples = num_samples if self.counted is None else self.counted[client]
        return (self.local_epochs or 1) * len(self.cuts(num_samples))

    def cuts(self, num_samples: int) -> list[slice]:
        """Return the batches of one epoch as slices of a permutation."""
        size = self.batch_size
        full_samples = num_samples // size * size
        keep_rest = full_samples < num_samples and not (self.drop_last and full_samples)
        return [
            slice(s, min(s + size, num_samples)) for s in range(0, num_samples if keep_rest else full_samples, size)
        ]


_parsed = lru_cache(maxsize=16)(parse_schedule)
