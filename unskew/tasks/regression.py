"""Regression: the losses of numbers, and their figures from sums that batches add up to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.tasks.base import Task

LEAST = -1e6
"""R² of a model whose predictions are not numbers; none is told that is lower."""


@dataclass(frozen=True)
class Regression(Task):
    """Numbers, ``y [B, T]``, standardized: the model predicts ``(target - mean) / std`` of each of ``T`` targets.

    The figures MAE and RMSE are in the targets' own units. R² is scikit-learn's, the mean over targets; of a single sample,
    and so of a client, it is ``1 - squared error / variance`` with the variance of all clients' targets.

    Attributes:
        kind: ``mse``, ``mae`` or ``huber``.
        delta: Where ``huber`` turns from squares to absolute values, in standard deviations.
        mean, std: Of each target, over all clients' samples to train on.
    """

    name: ClassVar[str] = "regression"
    scored: ClassVar[str] = "r2"
    labeled: ClassVar[bool] = False
    figures: ClassVar[tuple[str, ...]] = ("mae", "rmse")
    lower_is_better: ClassVar[tuple[str, ...]] = ("loss", "mae", "rmse")

    kind: str = "mse"
    delta: float = 1.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Mean over samples and targets."""
        return self._each(logits, y).mean()

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """Mean over the targets of each sample."""
        return self._each(logits, y).mean(-1)

    def _each(self, predicted: Tensor, y: Tensor) -> Tensor:
        if self.kind == "huber":
            return F.huber_loss(predicted, y.to(predicted.dtype), reduction="none", delta=self.delta)
        return (F.mse_loss if self.kind == "mse" else F.l1_loss)(predicted, y.to(predicted.dtype), reduction="none")

    def correct(self, logits: Tensor, y: Tensor) -> Tensor:
        """``1 - squared error``, mean over targets; in standard deviations the variance is 1."""
        right = 1 - (logits - y).to(torch.float64).square().mean(-1)
        return right.nan_to_num(nan=LEAST).clamp_min(LEAST)

    def tally(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the batch statistics; see ``regression_sums``."""
        return regression_sums(logits, y)

    def measure(self, tally: Tensor, loss: float) -> dict[str, float]:
        """R², MAE and RMSE."""
        return regression_metrics(tally, self.std)

    def scores(self, logits: Tensor) -> Tensor:
        """Return predictions in the targets' units, ``[B]``, or ``[B, T]`` of several targets."""
        numbers = self.restored(logits.to(torch.float64))
        return numbers.squeeze(-1) if numbers.shape[-1] == 1 else numbers

    def truth(self, y: Tensor) -> Tensor:
        """Return targets in their own units, shaped as ``scores``."""
        return self.scores(y)

    def standardize(self, y: Tensor) -> Tensor:
        """Targets ``[B, T]`` in their own units as the model predicts them."""
        std, mean = (y.new_tensor(values) for values in (self.std, self.mean))
        return ((y - mean) / std).to(torch.float32)

    def restored(self, predicted: Tensor) -> Tensor:
        """Predictions ``[B, T]`` in the targets' own units."""
        std, mean = (predicted.new_tensor(values) for values in (self.std, self.mean))
        return predicted * std + mean


def regression_sums(predicted: Tensor, y: Tensor) -> Tensor:
    """Compute sums over predictions and targets ``[B, T]``.

    Count, sums of ``y``, ``y²``, squared and absolute errors, ``[5, T]``.

    Args:
        predicted: Predictions, ``[B, T]``.
        y: Targets, ``[B, T]``.
    """
    y, error = y.to(torch.float64), (predicted - y).to(torch.float64)
    return torch.stack([torch.ones_like(y), y, y.square(), error.square(), error.abs()]).sum(1)


def regression_metrics(sums: Tensor, std: Sequence[float] = ()) -> dict[str, float]:
    """R², mean absolute and root mean squared error, each the mean over targets, as in scikit-learn.

    Args:
        sums: As ``regression_sums`` gives them.
        std: The unit of each target; 1 without.

    >>> y = torch.tensor([[1.0], [2.0], [3.0]])
    >>> regression_metrics(regression_sums(y + 1, y))
    {'r2': -0.5, 'mae': 1.0, 'rmse': 1.0}
    """
    count, total, squares, squared, absolute = sums.cpu()
    unit = torch.tensor(std or [1.0] * len(count), dtype=torch.float64)
    spread = (squares - total.square() / count).clamp_min(0)
    constant = (squared == 0).to(torch.float64)  # of targets that do not vary
    r2 = torch.where(spread > 0, 1 - squared / spread, constant)
    return {
        "r2": clipped_r2(float(r2.mean())),
        "mae": float((unit * absolute / count).mean()),
        "rmse": float((unit * (squared / count).sqrt()).mean()),
    }


def clipped_r2(r2: float) -> float:
    """R² as a number that files can hold."""
    return LEAST if math.isnan(r2) else max(r2, LEAST)
