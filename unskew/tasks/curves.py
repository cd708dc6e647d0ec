"""Curves of a classifier on the test set: ROC, precision and recall, calibration, and the confusion matrix."""

from __future__ import annotations

from typing import Any

import numpy as np

from unskew.tasks.metrics import MetricSet

POINTS = 101
"""Points of a curve."""
BINS = 10
"""Bins of the calibration curve."""
MOST_CLASSES = 50
"""Maximum number of classes of a confusion matrix."""


def classifier_curves(y: np.ndarray, p: np.ndarray, metrics: MetricSet) -> dict[str, Any]:
    """Compute the curves with scikit-learn; curves that need a class without samples are left out.

    With two classes the curves are those of the positive class. With more classes, ROC and precision-recall curves are
    means of the one-vs-rest curves, and calibration is that of the predicted class.

    Args:
        y: True classes, ``[n]``.
        p: Predicted probabilities, ``[n, C]``.
        metrics: Names of the ``C`` classes, and the positive class.
    """
    from sklearn.calibration import calibration_curve
    from sklearn.metrics import confusion_matrix, precision_recall_curve, roc_curve

    if not np.isfinite(p).all():
        return {}
    predictions = metrics.predictions(y, p)
    p, classes = predictions.p, predictions.judged
    grid = np.linspace(0, 1, POINTS)
    curves: dict[str, Any] = {}
    if all(0 < (y == c).sum() < len(y) for c in classes):
        rocs = [roc_curve(y == c, p[:, c])[:2] for c in classes]
        pairs = [precision_recall_curve(y == c, p[:, c])[:2] for c in classes]
        tpr = np.mean([np.interp(grid, *roc) for roc in rocs], axis=0)
        precision = np.mean([np.interp(grid, recall[::-1], values[::-1]) for values, recall in pairs], axis=0)
        curves["roc"], curves["pr"] = one_curve(grid, tpr), one_curve(grid, precision)
    occurred, chance = predictions.outcomes
    share, mean = calibration_curve(occurred, chance.clip(0, 1), n_bins=BINS)
    curves["calibration"] = one_curve(mean, share)
    if p.shape[1] <= MOST_CLASSES:
        matrix = confusion_matrix(y, predictions.decided, labels=range(p.shape[1]))
        curves["confusion"] = {"classes": list(metrics.class_names), "counts": matrix.tolist()}
    return curves


def one_curve(x: np.ndarray, y: np.ndarray) -> dict[str, list[float]]:
    """Return the points of a curve in the format of ``curves.json``.

    Args:
        x: Horizontal coordinates.
        y: Vertical coordinates.
    """
    return {"x": x.round(4).tolist(), "y": y.round(4).tolist()}
