"""Metrics of a classifier from numbers of samples in cells of probability, as sums over sites give them.

A cell has the positive and the negative samples of a class whose probability is in it. Ranks within a cell are ties.
"""

from __future__ import annotations

import math

import numpy as np

from unskew.tasks.intervals import Interval, delong_interval, wilson_interval
from unskew.tasks.metrics import METRICS, ClassPredictions, MetricSet
from unskew.tasks.primary_metric import RECALL

TAIL = np.geomspace(1e-8, 0.1, 701)[:-1]
EDGES = np.concatenate([TAIL, np.arange(100, 901) / 1000, 1 - TAIL[::-1]])
"""Inner edges of the cells of a class: every 0.001 from 0.1 to 0.9, and outside at a hundred equal steps of the logarithm per
factor of ten of the smaller probability, down to 1e-8, so that probabilities of a rare class have different cells."""
CELLS = len(EDGES) + 1
"""Number of cells of a class."""
MIDDLES = np.concatenate([[TAIL[0] / 2], (EDGES[1:] + EDGES[:-1]) / 2, [1 - TAIL[0] / 2]])
"""Middle of each cell."""


def count_cells(p: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Count the positive and the negative samples of each class in each cell, int64 ``[C, CELLS, 2]``.

    Args:
        p: Probabilities, ``[n, C]``.
        y: True classes, ``[n]``.
    """
    classes = p.shape[1]
    cell = np.searchsorted(EDGES, p, side="right")
    negative = y[:, None] != np.arange(classes)
    index = (np.arange(classes) * CELLS + cell) * 2 + negative
    return np.bincount(index.reshape(-1), minlength=classes * CELLS * 2).reshape(classes, CELLS, 2)


def auroc_from_cells(cells: np.ndarray) -> float:
    """Compute the area under the ROC curve; NaN without samples of both kinds.

    Args:
        cells: Numbers of positive and negative samples in each cell, by increasing probability, ``[cells, 2]``.

    >>> auroc_from_cells(np.array([[0, 2], [1, 1], [2, 0]]))
    0.944...
    """
    positive, wins = cells[:, 0], _wins(cells[:, 1])
    return float(positive @ wins / positive.sum()) if cells.any(0).all() else math.nan


def delong_variance_from_cells(cells: np.ndarray) -> float:
    """Compute DeLong's variance of the AUROC; NaN with fewer than two samples of a kind.

    Args:
        cells: Numbers of positive and negative samples in each cell, by increasing probability, ``[cells, 2]``.
    """
    if cells.sum(0).min() < 2:
        return math.nan
    placements = ((cells[:, 0], _wins(cells[:, 1])), (cells[:, 1], _wins(cells[::-1, 0])[::-1]))
    return sum(_variance(counts, values) / int(counts.sum()) for counts, values in placements)


def _wins(counts: np.ndarray) -> np.ndarray:
    """Return the share of samples below each cell, half of those in it included."""
    return np.asarray((np.cumsum(counts) - counts / 2) / max(1, counts.sum()))


def _variance(counts: np.ndarray, values: np.ndarray) -> float:
    """Return the variance of values that occur several times, divided by their number minus 1."""
    n = int(counts.sum())
    return float(counts @ (values - counts @ values / n) ** 2 / (n - 1))


def class_metrics_from_sums(
    cells: np.ndarray, confusion: np.ndarray, probabilities: np.ndarray, metrics: MetricSet
) -> dict[str, tuple[float, Interval]]:
    """Compute the metrics of a classifier, and the intervals that follow from sums.

    AUROC, AUPRC, ECE and calibration slope treat the samples of a cell as if their probability were its middle. With more
    than two classes, there is no AUPRC and no ECE.

    Args:
        cells: Numbers of positive and negative samples of each class in each cell, ``[C, CELLS, 2]``.
        confusion: Number of samples by true and predicted class, ``[C, C]``.
        probabilities: Sum of the probabilities of each class, and of their squared errors, ``[C, 2]``.
        metrics: Class names, positive class and level of the intervals.

    Returns:
        Value, NaN if undefined, and interval of each metric.
    """
    n, level = int(confusion.sum()), metrics.level
    hits, occurring, predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    two = len(confusion) == 2
    judged = [metrics.positive] if two else [*range(len(confusion))]
    found: dict[str, tuple[float, Interval]] = {
        "accuracy": (_ratio(hits.sum(), n), wilson_interval(int(hits.sum()), n, level))
    }
    area, interval = float(np.mean([auroc_from_cells(cells[c]) for c in judged])), None
    variance = delong_variance_from_cells(cells[judged[0]])
    if two and variance == variance:
        interval = delong_interval(area, variance, int(cells[judged[0]].sum(0).min()), level)
    found["auroc"] = area, interval
    f1 = 2 * hits / np.maximum(predicted + occurring, 1)
    recalls = [_ratio(hits[c], occurring[c]) for c in range(len(confusion))]
    found["f1"] = float(f1[judged].mean()), None
    found["balanced_accuracy"] = float(np.nanmean(recalls)) if n else math.nan, None
    found["brier"] = _ratio(probabilities[judged, 1].sum(), n), None
    for c, name in enumerate(metrics.class_names):
        found[f"{RECALL}{name}"] = recalls[c], wilson_interval(int(hits[c]), int(occurring[c]), level)
    if two and n:
        found["observed_expected"] = _ratio(occurring[judged[0]], probabilities[judged[0], 0]), None
        binned = middle_predictions(cells[judged[0]])
        found |= {name: (METRICS[name](binned)[0], None) for name in ("auprc", "ece", "calibration_slope")}
    return found


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else math.nan


def middle_predictions(cells: np.ndarray) -> ClassPredictions:
    """Return a prediction for each sample of a class, with the middle of its cell as probability.

    Args:
        cells: Numbers of positive and negative samples in each cell, ``[CELLS, 2]``.
    """
    middle = np.repeat(MIDDLES, 2)
    p, y = (np.repeat(values, cells.reshape(-1)) for values in (middle, np.tile([1, 0], len(cells))))
    return ClassPredictions(np.stack([1 - p, p], 1), y, (p > 0.5).astype(np.int64), (1,))
