"""Metrics that need all predictions for a set of samples at once: scikit-learn's, and functions of the user's."""

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
"""A metric of the user's, ``f(y_true, scores)``: classes ``[n]`` and probabilities ``[n, C]``; labels of 0 and 1 and
probabilities ``[n, L]`` of each; or targets and predictions in their own units, ``[n]``, of several targets ``[n, T]``."""


def metric_names(metrics: Sequence[str], class_names: Sequence[str]) -> list[str]:
    """Names of the figures that are asked for: those of ``recall`` are one for each class.

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
    """The figures that are asked for; NaN where a class is missing that they need.

    With two classes the second is the positive one. With more, each class against all others, mean over classes.

    Args:
        metrics: Some of ``METRICS``.
        probabilities: ``[n, C]``.
        y: Classes, ``[n]``.
        class_names: ``C`` names.
    """
    if not np.isfinite(probabilities).all():
        return dict.fromkeys(metric_names(metrics, class_names), float("nan"))
    values = [figure for metric in metrics for figure in METRICS[metric](probabilities.astype(np.float64), y)]
    return dict(zip(metric_names(metrics, class_names), values, strict=True))


def one_vs_rest(score: Callable[[np.ndarray, np.ndarray], float], p: np.ndarray, y: np.ndarray) -> list[float]:
    """A score of probabilities for the positive class, or the mean over classes; NaN if one is not there, or all are.

    Args:
        score: Score of true labels (0 or 1) and probabilities of the positive class.
        p: Probabilities, ``[n, C]``.
        y: Labels, ``[n]``.
    """
    classes = [1] if p.shape[1] == 2 else range(p.shape[1])
    if any((y == c).all() or not (y == c).any() for c in classes):
        return [float("nan")]
    return [float(np.mean([score(y == c, p[:, c]) for c in classes]))]


def auroc(p: np.ndarray, y: np.ndarray) -> list[float]:
    """Area under the curve of true against false positives.

    Args:
        p: Probabilities, ``[n, C]``.
        y: Labels, ``[n]``.
    """
    from sklearn.metrics import roc_auc_score

    return one_vs_rest(roc_auc_score, p, y)


def auprc(p: np.ndarray, y: np.ndarray) -> list[float]:
    """Average precision.

    Args:
        p: Probabilities, ``[n, C]``.
        y: Labels, ``[n]``.
    """
    from sklearn.metrics import average_precision_score

    return one_vs_rest(average_precision_score, p, y)


def f1(p: np.ndarray, y: np.ndarray) -> list[float]:
    """F1 of the positive class, or the mean over classes; 0 where there is nothing to divide by.

    Args:
        p: Probabilities, ``[n, C]``.
        y: Labels, ``[n]``.
    """
    from sklearn.metrics import f1_score

    labels = [1] if p.shape[1] == 2 else list(range(p.shape[1]))
    return [float(f1_score(y, p.argmax(1), labels=labels, average="macro", zero_division=0))]


def recall(p: np.ndarray, y: np.ndarray) -> list[float]:
    """Share of each class that is found; NaN of a class that is not there.

    Args:
        p: Probabilities, ``[n, C]``.
        y: Labels, ``[n]``.
    """
    right = p.argmax(1) == y
    return [float(right[y == c].mean()) if (y == c).any() else float("nan") for c in range(p.shape[1])]


def balanced_accuracy(p: np.ndarray, y: np.ndarray) -> list[float]:
    """Mean recall of the classes that are there.

    Args:
        p: Probabilities, ``[n, C]``.
        y: Labels, ``[n]``.
    """
    return [float(np.nanmean(recall(p, y)))]


def ece(p: np.ndarray, y: np.ndarray) -> list[float]:
    """Expected calibration error: how far the probability of the predicted class is from how often it is right.

    In each of ``BINS`` equal bins of that probability the distance of the means, weighted by samples.

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
        known: Some of ``METRICS``.
        own: The user's functions by name.
        class_names: Names of the classes.
    """

    known: tuple[str, ...] = ()
    own: Mapping[str, OwnMetric] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.known or self.own)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the values, one for each class of ``recall``."""
        return (*metric_names(self.known, self.class_names), *self.own)

    def of(self, y: np.ndarray, scores: np.ndarray, where: str, defined: bool = True) -> dict[str, float]:
        """Compute every metric; NaN where one is undefined.

        Args:
            y: True values, as an ``OwnMetric`` takes them.
            scores: Probabilities or predictions, as an ``OwnMetric`` takes them.
            where: Name of these samples for errors, such as ``"the test set"``.
            defined: Whether the user's functions must return a finite number. At single clients they may return NaN.

        Raises:
            ConfigError: If a function of the user's fails, or returns something else than a number.
        """
        if not np.isfinite(scores).all():
            return dict.fromkeys(self.names, math.nan)
        values = compute_metric_values(self.known, scores, y, self.class_names) if self.known else {}
        return values | {name: custom_metric_value(name, f, y, scores, where, defined) for name, f in self.own.items()}


def custom_metric_value(name: str, f: OwnMetric, y: np.ndarray, scores: np.ndarray, where: str, defined: bool) -> float:
    """Compute a metric of the user's and validate the result; see ``MetricSet.of``.

    Args:
        name: Name of the metric.
        f: The user's function.
        y: Targets, ``[n]``.
        scores: Probabilities or predictions, ``[n, C]``.
        where: What was evaluated, for the error.
        defined: Whether the value must be finite.
    """
    try:
        value: Any = f(y.copy(), scores.astype(np.float64))
    except (Exception, SystemExit) as error:  # the user's function may fail in any way
        raise ConfigError(
            f"The metric {name} failed on {where} ({type(error).__name__}: {error}). It is called as f(y_true, scores) "
            f"with arrays of shapes {y.shape} and {scores.shape}; return float('nan') for clients where it is undefined."
        ) from error
    try:
        if isinstance(value, str):
            raise TypeError
        number = float(value)
    except Exception:  # converting the user's object may fail in any way
        raise ConfigError(
            f"The metric {name} must return a number, but returned {short_repr(value)} on {where}."
        ) from None
    if math.isinf(number) or (defined and math.isnan(number)):
        raise ConfigError(f"The metric {name} must return a finite number, but returned {number} on {where}.")
    return number
