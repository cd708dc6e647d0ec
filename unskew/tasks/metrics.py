"""Metrics that need all predictions for a set of samples at once: scikit-learn metrics and custom metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unskew.errors import ConfigError, short_repr
from unskew.tasks.primary_metric import RECALL

BINS = 15
"""Number of bins of the calibration error, as in Guo et al. 2017, arXiv:1706.04599."""
OwnMetric = Callable[[np.ndarray, np.ndarray], float]
"""Custom metric ``f(y_true, scores)``.

Arguments are classes ``[n]`` and probabilities ``[n, C]``; multi-label, labels of 0 and 1 and probabilities, ``[n, L]``
each; regression, targets and predictions in original units, ``[n]`` or ``[n, T]``.
"""


def metric_names(metrics: Sequence[str], class_names: Sequence[str]) -> list[str]:
    """Return the names of the values of the requested metrics; ``recall`` has one per class.

    Args:
        metrics: Requested metrics.
        class_names: Names of the classes.

    >>> metric_names(["auroc", "recall"], ["no", "yes"])
    ['auroc', 'recall/no', 'recall/yes']
    """
    recalls = [f"{RECALL}{name}" for name in class_names]
    return [name for metric in metrics for name in (recalls if metric == "recall" else [metric])]


def compute_metric_values(
    metrics: Sequence[str], probabilities: np.ndarray, y: np.ndarray, class_names: Sequence[str]
) -> dict[str, float]:
    """Compute the requested metrics; NaN if a required class has no samples.

    With two classes the second one is positive. With more, metrics are one-vs-rest means over classes.

    Args:
        metrics: Names of ``METRICS``.
        probabilities: Probabilities, ``[n, C]``.
        y: Classes, ``[n]``.
        class_names: Names of the ``C`` classes.
    """
    if not np.isfinite(probabilities).all():
        return dict.fromkeys(metric_names(metrics, class_names), float("nan"))
    values = [figure for metric in metrics for figure in METRICS[metric](probabilities.astype(np.float64), y)]
    return dict(zip(metric_names(metrics, class_names), values, strict=True))


def one_vs_rest(score: Callable[[np.ndarray, np.ndarray], float], p: np.ndarray, y: np.ndarray) -> list[float]:
    """Compute a score for the positive class, or its one-vs-rest mean; NaN if a class has no or all samples.

    Args:
        score: Function of true labels (0 or 1) and probabilities of the positive class.
        p: Probabilities, ``[n, C]``.
        y: Labels, ``[n]``.
    """
    classes = [1] if p.shape[1] == 2 else range(p.shape[1])
    if any((y == c).all() or not (y == c).any() for c in classes):
        return [float("nan")]
    return [float(np.mean([score(y == c, p[:, c]) for c in classes]))]


def auroc(p: np.ndarray, y: np.ndarray) -> list[float]:
    """Compute the area under the ROC curve.

    Args:
        p: Probabilities, ``[n, C]``.
        y: Labels, ``[n]``.
    """
    from sklearn.metrics import roc_auc_score

    return one_vs_rest(roc_auc_score, p, y)


def auprc(p: np.ndarray, y: np.ndarray) -> list[float]:
    """Compute the average precision.

    Args:
        p: Probabilities, ``[n, C]``.
        y: Labels, ``[n]``.
    """
    from sklearn.metrics import average_precision_score

    return one_vs_rest(average_precision_score, p, y)


def f1(p: np.ndarray, y: np.ndarray) -> list[float]:
    """Compute F1 of the positive class, or the mean over classes; 0 instead of a division by zero.

    Args:
        p: Probabilities, ``[n, C]``.
        y: Labels, ``[n]``.
    """
    from sklearn.metrics import f1_score

    labels = [1] if p.shape[1] == 2 else list(range(p.shape[1]))
    return [float(f1_score(y, p.argmax(1), labels=labels, average="macro", zero_division=0))]


def recall(p: np.ndarray, y: np.ndarray) -> list[float]:
    """Compute the recall of each class; NaN for classes without samples.

    Args:
        p: Probabilities, ``[n, C]``.
        y: Labels, ``[n]``.
    """
    right = p.argmax(1) == y
    return [float(right[y == c].mean()) if (y == c).any() else float("nan") for c in range(p.shape[1])]


def balanced_accuracy(p: np.ndarray, y: np.ndarray) -> list[float]:
    """Compute the mean recall of the classes that have samples.

    Args:
        p: Probabilities, ``[n, C]``.
        y: Labels, ``[n]``.
    """
    return [float(np.nanmean(recall(p, y)))]


def ece(p: np.ndarray, y: np.ndarray) -> list[float]:
    """Compute the expected calibration error.

    This is the distance between mean confidence and accuracy in ``BINS`` equal bins of confidence, weighted by samples.

    Args:
        p: Probabilities, ``[n, C]``.
        y: Labels, ``[n]``.
    """
    sure, right = p.max(1), p.argmax(1) == y
    bins = np.clip(np.ceil(sure * BINS).astype(int) - 1, 0, BINS - 1)
    gap = np.bincount(bins, weights=right - sure, minlength=BINS)
    return [float(np.abs(gap).sum() / len(y))]


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], list[float]]] = {
    "auroc": auroc,
    "auprc": auprc,
    "f1": f1,
    "balanced_accuracy": balanced_accuracy,
    "ece": ece,
    "recall": recall,
}
"""Available metrics, computed from probabilities ``[n, C]`` and classes ``[n]``."""


@dataclass(frozen=True)
class MetricSet:
    """Metrics that are computed from all predictions for a set of samples.

    Attributes:
        known: Names of ``METRICS``.
        own: Custom metrics by name.
        class_names: Names of the classes.
        positive: Number of the positive one of two classes.
    """

    known: tuple[str, ...] = ()
    own: Mapping[str, OwnMetric] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()
    positive: int = 1

    def __bool__(self) -> bool:
        return bool(self.known or self.own)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the values; ``recall`` has one per class."""
        return (*metric_names(self.known, self.class_names), *self.own)

    def decided(self, scores: np.ndarray) -> np.ndarray:
        """Return the predicted class of each sample, ``[n]``, given its probabilities ``[n, C]``."""
        return np.asarray(scores.argmax(1))

    def of(self, y: np.ndarray, scores: np.ndarray, where: str, defined: bool = True) -> dict[str, float]:
        """Compute every metric; undefined values are NaN.

        Args:
            y: True values, as for ``OwnMetric``.
            scores: Probabilities or predictions, as for ``OwnMetric``.
            where: Name of these samples for errors, such as ``"the test set"``.
            defined: Whether custom metrics must return a finite number. For single clients they may return NaN.

        Raises:
            ConfigError: If a custom metric fails, or does not return a number.
        """
        if not np.isfinite(scores).all():
            return dict.fromkeys(self.names, math.nan)
        values = compute_metric_values(self.known, scores, y, self.class_names) if self.known else {}
        return values | {name: custom_metric_value(name, f, y, scores, where, defined) for name, f in self.own.items()}


def custom_metric_value(name: str, f: OwnMetric, y: np.ndarray, scores: np.ndarray, where: str, defined: bool) -> float:
    """Compute a custom metric and validate the result.

    Args:
        name: Name of the metric.
        f: Function that computes the metric.
        y: True values, as for ``OwnMetric``.
        scores: Probabilities or predictions, as for ``OwnMetric``.
        where: Name of the samples, for the error.
        defined: Whether the value must be finite.

    Raises:
        ConfigError: If the function fails, or its result is not valid.
    """
    try:
        value: Any = f(y.copy(), scores.astype(np.float64))
    except (Exception, SystemExit) as error:  # a custom function may raise anything
        raise ConfigError(
            f"The metric {name} failed on {where} ({type(error).__name__}: {error}). It is called as f(y_true, scores) "
            f"with arrays of shapes {y.shape} and {scores.shape}. Return float('nan') for clients where it is "
            "undefined."
        ) from error
    try:
        if isinstance(value, str):
            raise TypeError
        number = float(value)
    except Exception:  # converting an arbitrary object may raise anything
        raise ConfigError(
            f"The metric {name} must return a number, but returned {short_repr(value)} on {where}."
        ) from None
    if math.isinf(number) or (defined and math.isnan(number)):
        raise ConfigError(f"The metric {name} must return a finite number, but returned {number} on {where}.")
    return number
