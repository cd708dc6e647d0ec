"""Small data and a small model that show mistakes: unequal clients, skewed classes, BatchNorm, dropout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from unskew.data.federation import Federation


def small_federation(
    sizes: Sequence[int] = (5, 19, 8, 13),
    classes: int = 3,
    shape: tuple[int, int, int] = (2, 6, 6),
    seed: int = 0,
    skew: bool = True,
    server: bool = True,
) -> Federation:
    """Return a federation of small images whose class is visible in their mean, without held-out samples.

    Args:
        sizes: Number of samples of each client.
        classes: Number of classes.
        shape: Shape of an image: channels, height and width.
        seed: Seed of the data.
        skew: Whether client ``k`` has only the classes ``k`` and ``k + 1`` modulo ``classes``.
        server: Whether the server has 13 samples of its own.
    """
    draws = np.random.default_rng(seed)

    def sample(n: int, allowed: list[int]) -> tuple[np.ndarray, np.ndarray]:
        y = draws.choice(allowed, size=n)
        x = draws.normal(size=(n, *shape)) + y[:, None, None, None] * 0.5
        return x.astype(np.float32), y

    everything = list(range(classes))
    clients = [sample(n, [k % classes, (k + 1) % classes] if skew else everything) for k, n in enumerate(sizes)]
    test = sample(60, everything)
    return Federation.from_arrays(
        clients, test=test, server=sample(13, everything) if server else None, classes=classes, holdout=0.0
    )


class SmallBatchNorm(nn.Module):
    """Convolution with BatchNorm and dropout, whose statistics and random masks must agree on every engine.

    Args:
        classes: Number of classes.
        channels: Number of channels of an image.
        dropout: Probability of dropout.
    """

    def __init__(self, classes: int = 3, channels: int = 2, dropout: float = 0.2):
        super().__init__()
        # No bias: before BatchNorm its true gradient is zero, and Adam would divide rounding errors by each other.
        self.conv = nn.Conv2d(channels, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(dropout)
        self.fc = nn.Linear(4 * 4, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images ``[B, C, 6, 6]``."""
        x = torch.relu(self.norm(self.conv(x)))
        x = nn.functional.max_pool2d(x, 2).flatten(1)
        logits: Tensor = self.fc(self.drop(x))
        return logits
