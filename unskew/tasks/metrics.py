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
TINY = 1e-15
"""Smallest probability, and smallest difference to 1, for which a logit or both logarithms are taken."""
SMALLEST = float(np.finfo(np.float64).tiny)
"""Smallest probability whose logarithm alone is taken."""
Statistic = Callable[[np.ndarray], np.ndarray]
"""Maps counts ``[r, n]``, the occurrences of each sample in each resample, to the metric of each resample, ``[r]``."""
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


@dataclass(frozen=True)
class ClassPredictions:
    """Predictions of a classifier for some samples.

    Attributes:
        p: Probabilities, ``[n, C]``.
        y: True classes, ``[n]``.
        decided: Predicted classes, ``[n]``.
        judged: Classes whose metrics are averaged: the positive one of two classes, or all of more classes.
    """

    p: np.ndarray
    y: np.ndarray
    decided: np.ndarray
    judged: tuple[int, ...]

    @property
    def positive(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return which samples are positive, and their probabilities, ``[n]`` each; None unless there are two classes."""
        return (self.y == self.judged[0], self.p[:, self.judged[0]]) if len(self.judged) == 1 else None

    @property
    def outcomes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return whether the predicted event occurs for each sample, and its probability, ``[n]`` each.

        With two classes, the event is the positive class: the predicted class would hide probabilities that are too high
        for a rare class. With more classes, it is the most probable class.
        """
        return self.positive or (self.p.argmax(1) == self.y, self.p.max(1))


def one_vs_rest(score: Callable[[np.ndarray, np.ndarray], float], predictions: ClassPredictions) -> list[float]:
    """Compute a score for the positive class, or its one-vs-rest mean; NaN if a class has no or all samples.

    Args:
        score: Function of true labels (0 or 1) and probabilities of the positive class.
        predictions: Predictions for some samples.
    """
    y, p = predictions.y, predictions.p
    if any((y == c).all() or not (y == c).any() for c in predictions.judged):
        return [math.nan]
    return [float(np.mean([score(y == c, p[:, c]) for c in predictions.judged]))]


def auroc(predictions: ClassPredictions) -> list[float]:
    """Compute the area under the ROC curve."""
    from sklearn.metrics import roc_auc_score

    return one_vs_rest(roc_auc_score, predictions)


def auprc(predictions: ClassPredictions) -> list[float]:
    """Compute the average precision."""
    from sklearn.metrics import average_precision_score

    return one_vs_rest(average_precision_score, predictions)


def f1(predictions: ClassPredictions) -> list[float]:
    """Compute F1 of the positive class, or the mean over classes; 0 instead of a division by zero."""
    from sklearn.metrics import f1_score

    y, judged = predictions.y, list(predictions.judged)
    return [float(f1_score(y, predictions.decided, labels=judged, average="macro", zero_division=0))]


def recall(predictions: ClassPredictions) -> list[float]:
    """Compute the recall of each class, as ``recall/CLASS``; NaN for classes without samples."""
    y, right = predictions.y, predictions.decided == predictions.y
    return [float(right[y == c].mean()) if (y == c).any() else math.nan for c in range(predictions.p.shape[1])]


def balanced_accuracy(predictions: ClassPredictions) -> list[float]:
    """Compute the mean recall of the classes that have samples."""
    return [float(np.nanmean(recall(predictions)))]


def calibration_gaps(predictions: ClassPredictions) -> tuple[np.ndarray, np.ndarray]:
    """Return the bin of each sample's probability and the outcome minus this probability, ``[n]`` each."""
    occurred, chance = predictions.outcomes
    return np.clip(np.ceil(chance * BINS).astype(int) - 1, 0, BINS - 1), occurred - chance


def ece(predictions: ClassPredictions) -> list[float]:
    """Compute the expected calibration error.

    This is the distance between mean probability and share of outcomes in 15 equal bins (Guo et al. 2017,
    arXiv:1706.04599) of the positive class's probability, or of the predicted class's with more than two classes.
    """
    bins, gaps = calibration_gaps(predictions)
    return [float(np.abs(np.bincount(bins, weights=gaps, minlength=BINS)).sum() / len(predictions.y))]


def squared_errors(predictions: ClassPredictions) -> np.ndarray:
    """Return the squared error of each sample's probabilities, ``[n]``, summed over the judged classes."""
    return np.asarray(sum((predictions.p[:, c] - (predictions.y == c)) ** 2 for c in predictions.judged))


def brier(predictions: ClassPredictions) -> list[float]:
    """Compute the Brier score: the mean squared error of the probability, with more than two classes summed over them."""
    return [float(squared_errors(predictions).mean())]


def observed_expected(predictions: ClassPredictions) -> list[float]:
    """Compute the number of positive samples divided by the sum of their probabilities; 1 is calibrated."""
    if predictions.positive is None or not predictions.positive[1].any():
        return [math.nan]
    return [float(predictions.positive[0].sum() / predictions.positive[1].sum())]


def calibration_slope(predictions: ClassPredictions) -> list[float]:
    """Compute the slope of a logistic regression of the outcome on the logit of its probability.

    It is 1 for calibrated probabilities and below 1 for too extreme ones. It is NaN if it is not defined, such as if the
    probabilities separate the classes. Newton's method starts at the constant model; steps that lower the likelihood are
    halved.
    """
    if predictions.positive is None or predictions.positive[0].all() or not predictions.positive[0].any():
        return [math.nan]
    outcome, chance = predictions.positive[0], np.clip(predictions.positive[1], TINY, 1 - TINY)
    x = np.stack([np.ones(len(chance)), np.log(chance) - np.log1p(-chance)], 1)
    sign = np.where(outcome, 1.0, -1.0)

    def loss(beta: np.ndarray) -> float:
        return float(np.logaddexp(0, -sign * (x @ beta)).sum())

    beta = np.array([math.log(outcome.mean() / (1 - outcome.mean())), 0.0])
    for _ in range(50):
        mean = 1 / (1 + np.exp(np.clip(-x @ beta, -700, 700)))
        try:
            step = np.linalg.solve(x.T * (mean * (1 - mean)) @ x, x.T @ (outcome - mean))
        except np.linalg.LinAlgError:
            break
        if np.abs(step).max() < 1e-10 * (1 + np.abs(beta).max()):
            return [float((beta + step)[1])]
        before = loss(beta)
        while not loss(beta + step) <= before + 1e-12 * len(outcome) and np.abs(step).max() > 1e-10:
            step /= 2
        beta += step
    return [math.nan]


METRICS: dict[str, Callable[[ClassPredictions], list[float]]] = {
    metric.__name__: metric
    for metric in (auroc, auprc, f1, balanced_accuracy, ece, brier, observed_expected, calibration_slope, recall)
}
"""Available metrics. Each returns one value, and ``recall`` one per class."""
TWO_CLASSES = ("observed_expected", "calibration_slope")
"""Metrics that are defined only for two classes. Their best value is 1, so they cannot be the objective."""


def missing_classes(metric: str, y: np.ndarray, class_names: Sequence[str]) -> list[str]:
    """Return the classes that a metric needs and of which there are no samples; the metric is then undefined.

    Args:
        metric: Name of the metric.
        y: Classes of the samples, ``[n]``.
        class_names: Names of the classes.

    >>> missing_classes("auprc", np.array([0, 0]), ["no", "yes"]), missing_classes("f1", np.array([0]), ["no", "yes"])
    (['yes'], [])
    """
    needed = class_names if metric in ("auroc", "auprc") else [metric.removeprefix(RECALL)]
    occurring = {class_names[index] for index in np.unique(y).tolist()}
    return [name for name in class_names if name in needed and name not in occurring]


@dataclass(frozen=True)
class MetricSet:
    """Metrics that are computed from all predictions for a set of samples.

    Attributes:
        known: Names of ``METRICS``.
        own: Custom metrics by name.
        class_names: Names of the classes.
        positive: Number of the positive one of two classes.
        trained_with: Class weights of the training, for which the probabilities are corrected; empty means none.
        with_intervals: Names of the metrics whose intervals a run reports.
        level: Level of the intervals.
    """

    known: tuple[str, ...] = ()
    own: Mapping[str, OwnMetric] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()
    positive: int = 1
    trained_with: tuple[float, ...] = ()
    with_intervals: tuple[str, ...] = ()
    level: float = 0.95

    def __bool__(self) -> bool:
        return bool(self.known or self.own)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the values; ``recall`` has one per class."""
        return (*metric_names(self.known, self.class_names), *self.own)

    def decided(self, scores: np.ndarray) -> np.ndarray:
        """Return the predicted class of each sample, ``[n]``, given its probabilities ``[n, C]``.

        It has the largest output of the model, so class weights make rare classes more likely.
        """
        return np.asarray((scores * self.trained_with if self.trained_with else scores).argmax(1))

    def predictions(self, y: np.ndarray, scores: np.ndarray) -> ClassPredictions:
        """Return the predictions of a classifier.

        Args:
            y: True classes, ``[n]``.
            scores: Probabilities, ``[n, C]``.
        """
        p = scores.astype(np.float64)
        judged = (self.positive,) if p.shape[1] == 2 else tuple(range(p.shape[1]))
        return ClassPredictions(p, y, self.decided(p), judged)


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
