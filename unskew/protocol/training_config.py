"""A client's budget and optimizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from unskew.protocol.lr_schedule import LRSchedule, parse_schedule

Buffers = Literal["average", "local", "reset"]
"""Normalization statistics: averaged like parameters, kept at each client, or begun anew in every round."""


@dataclass(frozen=True)
class Training:
    """A client's budget and optimizer; it means the same for every method.

    Attributes:
        local_steps: Mini-batch steps per round; or None, and then
        local_epochs: passes over the client's data per round.
        counted: Samples per client that the steps of an epoch are counted from, where a client trains on others beside them;
            None: on all that it trains on.
        batch_size: Samples per step. The last batch of an epoch may be smaller, unless ``drop_last``.
        optimizer: ``sgd``, ``adam`` or ``adamw``; made afresh every round.
        clip_grad_norm: Largest norm of a gradient, or None.
        augment: Random crops (padding 4) and horizontal flips.
        precision: ``fp32``, ``fp64`` or ``bf16`` (autocast of the forward pass; weights stay fp32).
        lr: Learning rate, which ``lr_schedule`` multiplies.
        lr_schedule: See ``unskew.protocol.lr_schedule``.
        lr_schedule_per: Whether its numbers count rounds or local steps; the latter need ``local_steps``.
        rounds: Of the run; a schedule may end with them.
    """

    local_steps: int | None = None
    local_epochs: int | None = 1
    counted: tuple[int, ...] | None = None
    batch_size: int = 64
    drop_last: bool = False
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    clip_grad_norm: float | None = None
    augment: bool = False
    precision: Literal["fp32", "fp64", "bf16"] = "fp32"
    lr_schedule: str = "constant"
    lr_schedule_per: Literal["round", "step"] = "round"
    rounds: int = 1

    @property
    def plain_sgd(self) -> bool:
        """Return whether a step is exactly ``v - lr * g``."""
        return self.optimizer == "sgd" and not self.momentum and not self.weight_decay and self.clip_grad_norm is None

    @property
    def schedule(self) -> LRSchedule:
        """Return the learning rate schedule."""
        return _parsed(self.lr_schedule)

    @property
    def scheduled(self) -> bool:
        """Return whether the learning rate changes."""
        return self.schedule != LRSchedule()

    def rate(self, round: int, step: int | None = None) -> float:
        """The learning rate in force.

        What is trained after the last round, as by ``ft``, is trained as in the last.

        Args:
            round: Number of the round, from 0.
            step: Number of the local step in it; None for the mean over the round's steps.
        """
        if not self.scheduled:
            return self.lr
        round = min(round, self.rounds - 1)
        if self.lr_schedule_per == "round":
            return self.lr * self.schedule.factor(round, self.rounds)
        steps = self.local_steps or 1
        if step is None:
            return sum(self.rate(round, s) for s in range(steps)) / steps
        return self.lr * self.schedule.factor(round * steps + step, self.rounds * steps)

    def at(self, round: int, step: int | None = None) -> Training:
        """The same with the learning rate that is then in force, for good; see ``rate``.

        Args:
            round: Number of the round, from 0.
            step: Number of the local step; None: the rate of the round.
        """
        return replace(self, lr=self.rate(round, step), lr_schedule="constant") if self.scheduled else self

    def steps(self, examples: int, client: int) -> int:
        """Number of local steps of ``client`` with ``examples`` samples.

        Args:
            examples: Number of samples of the client.
            client: Number of the client.
        """
        if self.local_steps is not None:
            return self.local_steps
        examples = examples if self.counted is None else self.counted[client]
        return (self.local_epochs or 1) * len(self.cuts(examples))

    def cuts(self, examples: int) -> list[slice]:
        """The batches of one epoch, as slices of a permutation."""
        size = self.batch_size
        full_samples = examples // size * size
        keep_rest = full_samples < examples and not (self.drop_last and full_samples)
        return [slice(s, min(s + size, examples)) for s in range(0, examples if keep_rest else full_samples, size)]


_parsed = lru_cache(maxsize=16)(parse_schedule)
