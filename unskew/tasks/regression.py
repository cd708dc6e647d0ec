"""Regression task: losses, and metrics from sums over batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.errors import ConfigError, DataError
from unskew.tasks.base import Task
from unskew.tasks.intervals import mean_statistic, sums_statistic
from unskew.tasks.metrics import MetricSet, Statistic

LEAST = -1e6
"""Lowest reported R², also for predictions that are not finite."""
ROUNDING = 1e-14
"""Largest share of the sum of squares that the sum of squared distances from the mean has if only rounding makes it positive:
standardized targets have 24 bits."""


@dataclass(frozen=True)
class Regression(Task):
    """Regression with ``T`` standardized targets, ``y [B, T]``: the model predicts ``(target - mean) / std``.

    MAE and RMSE are in the targets' original units. R² is that of scikit-learn, averaged over targets, and undefined for one
    sample. For a client, which may have a single sample, it is the mean of ``1 - squared error / variance`` with the
    variance of all clients' targets.

    Attributes:
        kind: Loss: ``mse``, ``mae`` or ``huber``.
        delta: Error at which the Huber loss becomes linear, in standard deviations.
        mean: Mean of each target over all clients' training samples, ``[T]``, in original units.
        std: Standard deviation of each target over all clients' training samples, ``[T]``, in original units.
    """

    name: ClassVar[str] = "regression"
    provides: ClassVar[frozenset[str]] = frozenset(("vector",))
    numeric_labels: ClassVar[bool] = True
    standardized: ClassVar[bool] = True
    output_kind: ClassVar[str] = "numbers"
    loss_options: ClassVar[tuple[str, ...]] = ("mse", "mae", "huber", "huber:DELTA")
    scored: ClassVar[str] = "r2"
    constant_name: ClassVar[str] = "own mean"
    extra_metrics: ClassVar[tuple[str, ...]] = ("mae", "rmse")
    shown: ClassVar[tuple[str, ...]] = extra_metrics
    lower_is_better: ClassVar[tuple[str, ...]] = ("loss", "mae", "rmse")
    least: ClassVar[float] = LEAST

    kind: str = "mse"
    delta: float = 1.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @property
    def constants(self) -> dict[str, tuple[float, ...]]:
        """Mean and standard deviation of each target."""
        return {"mean": self.mean, "std": self.std}

    def with_constants(self, constants: Mapping[str, Sequence[float]], classes: int) -> Regression:
        """Return the regression of standardized targets."""
        mean, std = (tuple(constants.get(name, ())) for name in ("mean", "std"))
        if {*constants} - {"mean", "std"} or not len(mean) == len(std) == classes or min(std) <= 0:
            raise ValueError("the constants are not a mean and a positive standard deviation per target")
        return replace(self, mean=mean, std=std)

    def accepts(self, constants: Mapping[str, Sequence[float]]) -> str:
        """Return no reason: means and standard deviations of targets may have any value."""
        return ""

    def with_loss(self, loss: str) -> Task:
        """Return the regression with the loss ``mse``, ``mae``, ``huber`` or ``huber:DELTA``."""
        kind, _, text = loss.partition(":")
        try:
            delta = float(text or 1)
        except ValueError:
            delta = 0.0
        if not 0 < delta < math.inf:
            raise ConfigError(
                f"{loss!r}: write huber:DELTA with a number above 0, in standard deviations of the targets."
            )
        return replace(self, kind=kind, delta=delta)

    def read(self, y: Tensor, who: str) -> Tensor:
        """Return the numbers ``[n, T]`` as float64."""
        y = y[:, None] if y.dim() == 1 else y
        if y.dim() != 2 or not y.shape[1]:
            raise DataError(
                f"The targets of {who} have shape {tuple(y.shape)}. Regression requires [n] or [n, targets]."
            )
        y = y.to(torch.float64)
        if not bool(torch.isfinite(y).all()):
            raise DataError(f"The targets of {who} contain NaN or infinite values. Remove those samples.")
        return y

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

    def outputs(self, logits: Tensor) -> Tensor:
        """Convert standardized predictions ``[B, T]`` to original units, in float64."""
        numbers = logits.to(torch.float64)  # float32 has too few digits for a mean far above the standard deviation
        std, mean = (numbers.new_tensor(values) for values in (self.std, self.mean))
        return numbers * std + mean

    def scores(self, logits: Tensor) -> Tensor:
        """Return predictions in the targets' original units, ``[B]``, or ``[B, T]`` for several targets."""
        numbers = self.outputs(logits)
        return numbers.squeeze(-1) if numbers.shape[-1] == 1 else numbers

    def truth(self, y: Tensor) -> Tensor:
        """Return targets in original units, with the shape of ``scores``."""
        return self.scores(y)

    def standardize(self, y: Tensor) -> Tensor:
        """Standardize targets ``[B, T]`` given in original units."""
        std, mean = (y.new_tensor(values) for values in (self.std, self.mean))
        return ((y - mean) / std).to(torch.float32)

    def metrics_of_outputs(self, y: np.ndarray, outputs: np.ndarray, metrics: MetricSet) -> dict[str, float]:
        """Compute R², MAE and RMSE."""
        return regression_metrics(regression_sums(*centered(torch.from_numpy(outputs), torch.from_numpy(y))))

    def statistic(self, name: str, y: np.ndarray, scores: np.ndarray, metrics: MetricSet) -> Statistic | None:
        """Return the statistic of the loss, R², MAE or RMSE."""
        predicted, target = (torch.from_numpy(part.reshape(len(y), -1)) for part in (scores.astype(np.float64), y))
        if name == "loss":
            losses = self.losses(self.standardize(predicted), self.standardize(target))
            return mean_statistic(losses.to(torch.float64).numpy())
        return sums_statistic(name, Regression(), *centered(predicted, target))  # in the targets' units


def centered(predicted: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract the median of the targets from predictions and targets, so that ``regression_sums`` loses no digits.

    The median is one of the targets, so constant ones become exactly 0.

    Args:
        predicted: Predictions, ``[B, T]``.
        y: Targets, ``[B, T]``.
    """
    center = y.median(0).values
    return predicted - center, y - center


def regression_sums(predicted: Tensor, y: Tensor) -> Tensor:
    """Compute count and sums of ``y``, ``y²``, squared errors and absolute errors over a batch, ``[5, T]``.

    Targets must be standardized or ``centered``: the difference of sums that gives R² otherwise loses its digits.

    Args:
        predicted: Predictions, ``[B, T]``.
        y: Targets, ``[B, T]``.
    """
    y, error = y.to(torch.float64), (predicted - y).to(torch.float64)
    return torch.stack([torch.ones_like(y), y, y.square(), error.square(), error.abs()]).sum(1)


def regression_metrics(sums: Tensor, std: Sequence[float] = ()) -> dict[str, float]:
    """Compute R², mean absolute error and root mean squared error, averaged over targets as in scikit-learn.

    R² is NaN for fewer than two samples.

    Args:
        sums: Sums from ``regression_sums``.
        std: Standard deviation of each target, to convert errors to original units; 1 if empty.

    >>> y = torch.tensor([[1.0], [2.0], [3.0]])
    >>> regression_metrics(regression_sums(y + 1, y))
    {'r2': -0.5, 'mae': 1.0, 'rmse': 1.0}
    """
    count, total, squares, squared, absolute = sums.cpu()
    unit = torch.tensor(std or [1.0] * len(count), dtype=torch.float64)
    spread = squares - total.square() / count
    constant = (squared == 0).to(torch.float64)  # R² of constant targets: 1 if predicted exactly, otherwise 0
    r2 = torch.where(spread > ROUNDING * squares, 1 - squared / spread, constant)
    return {
        "r2": clipped_r2(float(r2.mean())) if count[0] > 1 else math.nan,
        "mae": float((unit * absolute / count).mean()),
        "rmse": float((unit * (squared / count).sqrt()).mean()),
    }


def clipped_r2(r2: float) -> float:
    """Return R² with a lower bound of ``LEAST``, also for NaN, which predictions that are not finite give."""
    return LEAST if math.isnan(r2) else max(r2, LEAST)
