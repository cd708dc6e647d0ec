"""What a model is trained for: the loss, the probabilities and the figures that a task reports."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Task(Protocol):
    """Loss and metrics of one kind of target."""

    name: str

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Mean loss of a batch, a scalar."""

    def probabilities(self, logits: Tensor) -> Tensor:
        """What the model believes, ``[B, C]``."""

    def correct(self, logits: Tensor, y: Tensor) -> Tensor:
        """1 where a prediction is right, else 0: ``[B]``."""


class Classification:
    """One class per sample: mean cross-entropy, softmax, accuracy."""

    name = "classification"

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy of ``logits [B, C]`` and labels ``y [B]``."""
        return F.cross_entropy(logits, y)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Softmax over classes."""
        return torch.softmax(logits, dim=-1)

    def correct(self, logits: Tensor, y: Tensor) -> Tensor:
        """1.0 where the largest logit is the label's."""
        return (logits.argmax(dim=-1) == y).to(torch.float64)


TASKS: dict[str, Task] = {"classification": Classification()}
