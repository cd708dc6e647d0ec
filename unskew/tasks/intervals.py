"""Confidence intervals of metrics, 95 % unless another level is set: Wilson, DeLong, bootstrap, Student's t for means.

They describe the sampling error of the samples on which a single model is evaluated, not the spread over seeds. Wilson
1927 (JASA 22); DeLong, DeLong, Clarke-Pearson 1988 (Biometrics 44), on the logit scale; percentiles of Efron's
bootstrap; Student 1908 (Biometrika 6). An interval is None if it is not defined. The ECE has none: each resample adds
sampling error to the absolute values that it sums, so its percentiles would lie above the ECE of a calibrated model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from unskew.seeding import numpy_generator
from unskew.tasks.base import Task
from unskew.tasks.metrics import SMALLEST, ClassPredictions, MetricSet, Statistic, squared_errors
from unskew.tasks.primary_metric import RECALL, MetricInfo

Interval = tuple[float, float] | None

LEVEL = 0.95
"""Default level."""
NORMAL_95 = 1.959963984540054
"""Quantile of the normal distribution at 97.5 %."""
TWO_SIDED_95 = (
    *(12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157, 2.228139),
    *(2.200985, 2.178813, 2.160369, 2.144787, 2.131450, 2.119905, 2.109816, 2.100922, 2.093024, 2.085963),
    *(2.079614, 2.073873, 2.068658, 2.063899, 2.059539, 2.055529, 2.051831, 2.048407, 2.045230, 2.042272),
)
"""Quantiles of Student's t at 97.5 % for 1 to 30 degrees of freedom; the last one is used for more, slightly too wide."""
RESAMPLES = 1000
"""Number of bootstrap resamples."""
CELLS = 1 << 19
"""Maximum number of counts in memory at once."""
MOST_SAMPLES = 30_000
"""Maximum number of samples of a bootstrap, times that of ranked classes; more take seconds, and their error is small."""
DEFINED = 0.9
"""Minimum share of resamples in which a metric must be defined; a class needs three samples for that."""


def student_95(n: int) -> float:
    """Return the quantile of Student's t at 97.5 % for the mean of ``n`` values."""
    return TWO_SIDED_95[min(n - 2, len(TWO_SIDED_95) - 1)]


def normal_quantile(level: float) -> float:
    """Return the quantile of the normal distribution at ``(1 + level) / 2``."""
    return NORMAL_95 if level == LEVEL else NormalDist().inv_cdf((1 + level) / 2)


def interval95(values: Sequence[float]) -> Interval:
    """Return the 95 % interval of the mean of normal values, see ``student_interval``.

    >>> interval95([1.0, 2.0, 3.0])
    (-0.484..., 4.484...)
    """
    return student_interval(values)


def student_interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Return the interval of the mean of normal values, ``mean -+ t s / sqrt(n)``; None for fewer than two values.

    Args:
        values: Values.
        level: Level of the interval.
    """
    n = len(values)
    if n < 2:
        return None
    quantile = student_95(n)
    if level != LEVEL:
        from scipy.special import stdtrit

        quantile = float(stdtrit(n - 1, (1 + level) / 2))
    mean = math.fsum(values) / n
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = quantile * std / math.sqrt(n)
    return mean - half, mean + half


def clip_interval(interval: Interval, metric: MetricInfo) -> Interval:
    """Clip the interval of a mean to the range of the metric: at most 1 if it is shown in percent, at least 0 except for R².

    Args:
        interval: Interval, or None.
        metric: Metric of the mean.
    """
    if interval is None or not metric.percent:
        return interval
    low, high = interval
    return low if metric.name == "r2" else max(0.0, low), min(1.0, high)


def wilson_interval(hits: int, n: int, level: float = LEVEL) -> Interval:
    """Return the Wilson score interval of a share.

    Args:
        hits: Number of successes.
        n: Number of trials; there is no interval for 0.
        level: Level of the interval.

    >>> wilson_interval(9, 10)
    (0.5958..., 0.9821...)
    """
    if not n:
        return None
    quantile = normal_quantile(level)
    share, widening = hits / n, quantile**2 / n
    center = (share + widening / 2) / (1 + widening)
    half = quantile * math.sqrt(share * (1 - share) / n + widening / (4 * n)) / (1 + widening)
    # Rounding must not move the ends away from 0 and 1, which they reach exactly.
    return (0.0 if hits == 0 else center - half), (1.0 if hits == n else center + half)


def auroc_interval(positive: np.ndarray, scores: np.ndarray, level: float = LEVEL) -> Interval:
    """Return DeLong's interval of the AUROC on the logit scale; None with fewer than two samples of a class.

    Args:
        positive: Whether each sample is positive, ``[n]``.
        scores: Scores, ``[n]``.
        level: Level of the interval.
    """
    above, below = np.sort(scores[positive]), np.sort(scores[~positive])
    if min(len(above), len(below)) < 2:
        return None
    wins = (np.searchsorted(below, above, "left") + np.searchsorted(below, above, "right")) / (2 * len(below))
    losses = (np.searchsorted(above, below, "left") + np.searchsorted(above, below, "right")) / (2 * len(above))
    variance = float(wins.var(ddof=1) / len(above) + losses.var(ddof=1) / len(below))
    return delong_interval(float(wins.mean()), variance, min(len(above), len(below)), level)


def delong_interval(area: float, variance: float, fewest: int, level: float = LEVEL) -> Interval:
    """Return the interval of an AUROC with a known variance, on the logit scale.

    The variance of an AUROC of 1 is estimated as 0. Its interval is then Wilson's for as many trials as the smaller class
    has samples: that many pairs are independent, and all of them are ranked correctly. The same holds for 0.

    Args:
        area: The AUROC.
        variance: DeLong's variance.
        fewest: Number of samples of the smaller class.
        level: Level of the interval.
    """
    if area in (0.0, 1.0):
        return wilson_interval(int(area) * fewest, fewest, level)
    center, half = math.log(area / (1 - area)), normal_quantile(level) * math.sqrt(variance) / (area * (1 - area))
    return 1 / (1 + math.exp(half - center)), 1 / (1 + math.exp(-half - center))


def interval_fields(name: str, interval: Interval) -> dict[str, float | None]:
    """Return an interval as the fields ``NAME_low`` and ``NAME_high`` of a file.

    Args:
        name: Name of the metric.
        interval: Interval, or None if it is not defined.

    >>> interval_fields("f1", (0.25, 0.5)), interval_fields("f1", None)
    ({'f1_low': 0.25, 'f1_high': 0.5}, {'f1_low': None, 'f1_high': None})
    """
    low, high = interval or (None, None)
    return {f"{name}_low": low, f"{name}_high": high}


def colliding_end(names: Sequence[str], metrics: Collection[str]) -> tuple[str, str] | None:
    """Return a metric and the end of its interval that has the name of another metric; None if there is none.

    Args:
        names: Names of metrics with intervals.
        metrics: Names of all metrics.

    >>> colliding_end(["recall/risk"], ["recall/risk", "recall/risk_low"]), colliding_end(["recall/a"], ["recall/b_low"])
    (('recall/risk', 'recall/risk_low'), None)
    """
    return next(((name, end) for name in names for end in interval_fields(name, None) if end in metrics), None)


def mean_statistic(values: np.ndarray) -> Statistic:
    """Return the statistic that is the mean of one value per sample, ``[n]``."""
    return lambda counts: counts @ values / counts.sum(1)


def bootstrap_interval(statistic: Statistic, groups: np.ndarray, level: float = LEVEL) -> Interval:
    """Return the percentile interval of a statistic over resampled groups.

    There is none for fewer than two groups, if too many resamples leave the statistic undefined, or if all give the same
    value: they then say nothing about the sampling error.

    Args:
        statistic: Statistic of resamples; NaN if undefined.
        groups: Group of each sample, ``[n]``. Groups are drawn as a whole; different numbers resample single samples.
        level: Level of the interval.
    """
    if len(groups) < 2:
        return None
    values = np.concatenate([statistic(counts) for counts in resampled_counts(groups)])
    values = values[np.isfinite(values)]
    if len(values) < DEFINED * RESAMPLES or np.ptp(values) == 0:
        return None
    low, high = np.percentile(values, [2.5, 97.5] if level == LEVEL else [50 - 50 * level, 50 + 50 * level])
    return float(low), float(high)


def resampled_counts(groups: np.ndarray) -> Iterator[np.ndarray]:
    """Yield how often each sample occurs in each of ``RESAMPLES`` resamples, in parts ``[r, n]``.

    Args:
        groups: Group of each sample, ``[n]``.

    Yields:
        Counts of some resamples, ``[r, n]``.
    """
    names, index = np.unique(groups, return_inverse=True)
    size, random = len(names), numpy_generator(0, "bootstrap")
    part = max(1, CELLS // len(groups))
    for first in range(0, RESAMPLES, part):
        rows = min(part, RESAMPLES - first)
        drawn = random.integers(size, size=(rows, size)) + size * np.arange(rows)[:, None]
        yield np.bincount(drawn.reshape(-1), minlength=rows * size).reshape(rows, size)[:, index.reshape(-1)]


def metric_interval(
    name: str,
    task: Task,
    y: np.ndarray,
    scores: np.ndarray,
    metrics: MetricSet,
    groups: np.ndarray | None = None,
    bootstrap: bool = True,
) -> Interval:
    """Return the interval of a metric, given the predictions for some samples.

    Accuracy and recall have Wilson's interval, the AUROC of two classes DeLong's, and all other metrics the bootstrap's.
    With groups, whose samples depend on each other, every interval is the bootstrap's. Custom metrics and metrics of
    language models have none.

    Args:
        name: Name of the metric in files, such as ``auprc`` or ``recall/yes``.
        task: Task of the model.
        y: True values, as in ``Task.requested_metrics``.
        scores: Probabilities, or predictions in the targets' units, as in ``Task.requested_metrics``.
        metrics: Class names, positive class and level of the interval.
        groups: Group of each sample, such as the patient, ``[n]``; None if samples are independent.
        bootstrap: Whether to resample samples; otherwise the metrics that need it have no interval.
    """
    if len(y) == 0 or not np.isfinite(scores).all():
        return None
    ranked = scores.shape[1] if name in ("auroc", "auprc") and scores.shape[1] > 2 else 1
    if groups is None and "one_class" in task.provides:
        predictions = metrics.predictions(y, scores)
        if name == "accuracy" or name.startswith(RECALL):
            right = predictions.decided == y
            if name != "accuracy":
                right = right[y == metrics.class_names.index(name.removeprefix(RECALL))]
            return wilson_interval(int(right.sum()), len(right), metrics.level)
        if name == "auroc" and predictions.positive is not None:
            return auroc_interval(*predictions.positive, metrics.level)
    statistic = task.statistic(name, y, scores, metrics)
    if statistic is None or not bootstrap or len(y) * ranked > MOST_SAMPLES:
        return None
    return bootstrap_interval(statistic, np.arange(len(y)) if groups is None else groups, metrics.level)


def class_statistic(name: str, predictions: ClassPredictions, class_names: Sequence[str] = ()) -> Statistic | None:
    """Return the statistic of a classification metric; None if it has none.

    Args:
        name: Name of the metric.
        predictions: Predictions of the samples.
        class_names: Names of the classes, for recalls.
    """
    y, p = predictions.y, predictions.p
    classes = p.shape[1]
    if name in ("auroc", "auprc"):
        ranked = [(np.argsort(-p[:, c], kind="stable"), y == c, p[:, c]) for c in predictions.judged]
        return lambda counts: np.mean([curve_area(name, counts, *by_score) for by_score in ranked], axis=0)
    if name in ("loss", "brier"):
        likelihood = p[np.arange(len(y)), y]
        return mean_statistic(
            -np.log(np.maximum(likelihood, SMALLEST)) if name == "loss" else squared_errors(predictions)
        )
    if name == "observed_expected" and predictions.positive is not None:
        positive, chance = predictions.positive
        return lambda counts: counts @ positive / (counts @ chance)
    decided, actual = (np.equal.outer(labels, np.arange(classes)) for labels in (predictions.decided, y))
    parts = np.stack([decided & actual, decided, actual], axis=1).astype(np.float64)

    def statistic(counts: np.ndarray) -> np.ndarray:
        sums = (counts @ parts.reshape(len(y), -1)).reshape(len(counts), 3, classes)
        hits, predicted, occurring = sums.transpose(1, 0, 2)
        if name == "accuracy":
            return np.asarray(hits.sum(1) / counts.sum(1))
        if name == "f1":
            return np.asarray((2 * hits / np.maximum(predicted + occurring, 1))[:, predictions.judged].mean(1))
        recalls = hits / np.where(occurring > 0, occurring, np.nan)
        if name == "balanced_accuracy":
            return np.asarray(np.nanmean(recalls, axis=1))
        return np.asarray(recalls[:, class_names.index(name.removeprefix(RECALL))])

    return statistic if name in ("accuracy", "f1", "balanced_accuracy") or name.startswith(RECALL) else None


def curve_area(
    name: str, counts: np.ndarray, order: np.ndarray, positive: np.ndarray, scores: np.ndarray
) -> np.ndarray:
    """Compute the AUROC or the average precision of each resample, ``[r]``; NaN if a class has no samples.

    Args:
        name: ``auroc`` or ``auprc``.
        counts: Occurrences of each sample, ``[r, n]``.
        order: Order of the samples by decreasing score, ``[n]``.
        positive: Whether each sample is positive, ``[n]``.
        scores: Scores, ``[n]``.
    """
    last = np.append(np.diff(scores[order]) != 0, True)  # last sample of each group of equal scores
    sorted_counts = counts[:, order]
    hits = np.cumsum(sorted_counts * positive[order], axis=1)[:, last]
    others = np.cumsum(sorted_counts, axis=1)[:, last] - hits
    gained = np.diff(hits, axis=1, prepend=0)
    defined = (hits[:, -1] > 0) & (others[:, -1] > 0)
    if name == "auprc":
        area = (gained * hits / np.maximum(hits + others, 1)).sum(1) / np.maximum(hits[:, -1], 1)
    else:
        below = others[:, -1:] - others + np.diff(others, axis=1, prepend=0) / 2  # equal scores count half
        area = (gained * below).sum(1) / np.maximum(hits[:, -1] * others[:, -1], 1)
    return np.where(defined, area, np.nan)


def sums_statistic(name: str, task: Task, logits: Tensor, y: Tensor) -> Statistic | None:
    """Return the statistic of a metric that ``measure`` computes from the sums of ``tally``; None for other metrics.

    Args:
        name: Name of the metric.
        task: Task that computes the metric.
        logits: Outputs of the model, ``[n, C]``.
        y: Targets, ``[n, L]``.
    """
    if name not in (task.scored, *task.extra_metrics):
        return None
    tallies = torch.vmap(lambda one, target: task.tally(one[None], target[None]))(logits, y)
    columns = tallies.reshape(len(y), -1).numpy()

    def statistic(counts: np.ndarray) -> np.ndarray:
        sums = torch.from_numpy(counts @ columns).reshape(-1, *tallies.shape[1:])
        return np.array([task.measure(part, 0.0)[name] for part in sums])

    return statistic
