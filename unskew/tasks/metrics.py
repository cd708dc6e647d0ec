"""Further figures of a classifier, by scikit-learn, from all its predictions for the test set."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

BINS = 15
"""Of the calibration error, as in Guo et al. 2017, arXiv:1706.04599."""
RECALL = "recall/"
"""What the names of the recalls of single classes begin with."""


def metric_names(metrics: Sequence[str], class_names: Sequence[str]) -> list[str]:
    """Names of the figures that are asked for: those of ``recall`` are one for each class.

    >>> metric_names(["auroc", "recall"], ["no", "yes"])
    ['auroc', 'recall/no', 'recall/yes']
    """
    recalls = [f"{RECALL}{name}" for name in class_names]
    return [name for metric in metrics for name in (recalls if metric == "recall" else [metric])]


def metric_figures(
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
    found = [figure for metric in metrics for figure in METRICS[metric](probabilities.astype(np.float64), y)]
    return dict(zip(metric_names(metrics, class_names), found, strict=True))


def one_against_others(score: Callable[[np.ndarray, np.ndarray], float], p: np.ndarray, y: np.ndarray) -> list[float]:
    """A score of probabilities for the positive class, or the mean over classes; NaN if one is not there, or all are."""
    classes = [1] if p.shape[1] == 2 else range(p.shape[1])
    if any((y == c).all() or not (y == c).any() for c in classes):
        return [float("nan")]
    return [float(np.mean([score(y == c, p[:, c]) for c in classes]))]


def auroc(p: np.ndarray, y: np.ndarray) -> list[float]:
    """Area under the curve of true against false positives."""
    from sklearn.metrics import roc_auc_score

    return one_against_others(roc_auc_score, p, y)


def auprc(p: np.ndarray, y: np.ndarray) -> list[float]:
    """Average precision."""
    from sklearn.metrics import average_precision_score

    return one_against_others(average_precision_score, p, y)


def f1(p: np.ndarray, y: np.ndarray) -> list[float]:
    """F1 of the positive class, or the mean over classes; 0 where there is nothing to divide by."""
    from sklearn.metrics import f1_score

    labels = [1] if p.shape[1] == 2 else list(range(p.shape[1]))
    return [float(f1_score(y, p.argmax(1), labels=labels, average="macro", zero_division=0))]


def recall(p: np.ndarray, y: np.ndarray) -> list[float]:
    """Share of each class that is found; NaN of a class that is not there."""
    right = p.argmax(1) == y
    return [float(right[y == c].mean()) if (y == c).any() else float("nan") for c in range(p.shape[1])]


def balanced_accuracy(p: np.ndarray, y: np.ndarray) -> list[float]:
    """Mean recall of the classes that are there."""
    return [float(np.nanmean(recall(p, y)))]


def ece(p: np.ndarray, y: np.ndarray) -> list[float]:
    """Expected calibration error: how far the probability of the predicted class is from how often it is right.

    In each of ``BINS`` equal bins of that probability the distance of the means, weighted by samples.
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
"""What can be asked for, from probabilities ``[n, C]`` and classes ``[n]``."""
