"""Regression task: losses, and metrics from sums over batches."""

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
"""Lowest reported R², also for predictions that are not finite."""


@dataclass(frozen=True)
class Regression(Task):
    """Regression with ``T`` standardized targets, ``y [B, T]``: the model predicts ``(target - mean) / std``.

    MAE and RMSE are in the targets' original units. R² is that of scikit-learn, averaged over targets. For a single
    sample, and therefore for a client, it is ``1 - squared error / variance`` with the variance of all clients'
    targets.

    Attributes:
        name: Name of the task.
        scored: Primary metric, R².
        labeled: False, because samples have no classes to count.
        extra_metrics: Names of the metrics in addition to loss and R².
        lower_is_better: Metrics whose lowest value over the rounds is reported as the best.
        kind: Loss: ``mse``, ``mae`` or ``huber``.
        delta: Error at which the Huber loss becomes linear, in standard deviations.
        mean: Mean of each target over all clients' training samples, ``[T]``, in original units.
        std: Standard deviation of each target over all clients' training samples, ``[T]``, in original units.
    """

    name: ClassVar[str] = "regression"
    scored: ClassVar[str] = "r2"
    labeled: ClassVar[bool] = False
    extra_metrics: ClassVar[tuple[str, ...]] = ("mae", "rmse")
    lower_is_better: ClassVar[tuple[str, ...]] = ("loss", "mae", "rmse")

    kind: str = "mse"
    delta: float = 1.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss over samples and targets."""
        return self._each(logits, y).mean()

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss over the targets of each sample."""
        return self._each(logits, y).mean(-1)

    def _each(self, predicted: Tensor, y: Tensor) -> Tensor:
        if self.kind == "huber":
            return F.huber_loss(predicted, y.to(predicted.dtype), reduction="none", delta=self.delta)
        return (F.mse_loss if self.kind == "mse" else F.l1_loss)(predicted, y.to(predicted.dtype), reduction="none")

    def correct(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return ``1 - squared error``, averaged over targets; the variance of standardized targets is 1."""
        right = 1 - (logits - y).to(torch.float64).square().mean(-1)
        return right.nan_to_num(nan=LEAST).clamp_min(LEAST)

    def constant(self, y: Tensor, classes: int) -> Tensor:
        """Return the mean of each target; 0, the mean over all clients, without samples."""
        return y.mean(0) if len(y) else y.new_zeros(classes)

    def tally(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the ``regression_sums`` of a batch."""
        return regression_sums(logits, y)

    def measure(self, tally: Tensor, loss: float) -> dict[str, float]:
        """Compute R², MAE and RMSE."""
        return regression_metrics(tally, self.std)

    def scores(self, logits: Tensor) -> Tensor:
        """Return predictions in the targets' original units, ``[B]``, or ``[B, T]`` for several targets."""
        numbers = self.restored(logits.to(torch.float64))
        return numbers.squeeze(-1) if numbers.shape[-1] == 1 else numbers

    def truth(self, y: Tensor) -> Tensor:
        """Return targets in original units, with the shape of ``scores``."""
        return self.scores(y)

    def standardize(self, y: Tensor) -> Tensor:
        """Standardize targets ``[B, T]`` given in original units."""
        std, mean = (y.new_tensor(values) for values in (self.std, self.mean))
        return ((y - mean) / std).to(torch.float32)

    def restored(self, predicted: Tensor) -> Tensor:
        """Convert standardized predictions ``[B, T]`` to original units."""
        std, mean = (predicted.new_tensor(values) for values in (self.std, self.mean))
        return predicted * std + mean


def regression_sums(predicted: Tensor, y: Tensor) -> Tensor:
    """Compute count and sums of ``y``, ``y²``, squared errors and absolute errors over a batch, ``[5, T]``.

    Args:
        predicted: Predictions, ``[B, T]``.
        y: Targets, ``[B, T]``.
    """
    y, error = y.to(torch.float64), (predicted - y).to(torch.float64)
    return torch.stack([torch.ones_like(y), y, y.square(), error.square(), error.abs()]).sum(1)


def regression_metrics(sums: Tensor, std: Sequence[float] = ()) -> dict[str, float]:
    """Compute R², mean absolute error and root mean squared error, averaged over targets as in scikit-learn.

    Args:
        sums: Sums from ``regression_sums``.
        std: Standard deviation of each target, to convert errors to original units; 1 if empty.

    >>> y = torch.tensor([[1.0], [2.0], [3.0]])
    >>> regression_metrics(regression_sums(y + 1, y))
    {'r2': -0.5, 'mae': 1.0, 'rmse': 1.0}
    """
    count, total, squares, squared, absolute = sums.cpu()
    unit = torch.tensor(std or [1.0] * len(count), dtype=torch.float64)
    spread = (squares - total.square() / count).clamp_min(0)
    constant = (squared == 0).to(torch.float64)  # R² of constant targets: 1 if predicted exactly, otherwise 0
    r2 = torch.where(spread > 0, 1 - squared / spread, constant)
    return {
        "r2": clipped_r2(float(r2.mean())),
        "mae": float((unit * absolute / count).mean()),
        "rmse": float((unit * (squared / count).sqrt()).mean()),
    }


def clipped_r2(r2: float) -> float:
    """Return R² with a lower bound of ``LEAST``, also for NaN, so that it can be written to files."""
    return LEAST if math.isnan(r2) else max(r2, LEAST)
