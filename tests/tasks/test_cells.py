"""Metrics from cells of probability are those of the samples, up to ranks within a cell."""

import math

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from unskew.tasks.cells import (
    CELLS,
    EDGES,
    auroc_from_cells,
    class_metrics_from_sums,
    count_cells,
    delong_variance_from_cells,
)
from unskew.tasks.classification import Classification
from unskew.tasks.intervals import LEVEL
from unskew.tasks.metrics import MetricSet


def drawn(n=2000, separation=1.3):
    random = np.random.default_rng(0)
    y = (random.random(n) < 0.3).astype(np.int64)
    p = 1 / (1 + np.exp(-(random.normal(size=n) + separation * y - 1.5)))
    return y, np.stack([1 - p, p], 1)


def pairs(positive, negative):
    """AUROC and DeLong's variance from all pairs of samples."""
    kernel = np.greater.outer(positive, negative) + np.equal.outer(positive, negative) / 2
    variance = kernel.mean(1).var(ddof=1) / len(positive) + kernel.mean(0).var(ddof=1) / len(negative)
    return kernel.mean(), variance


def test_samples_of_two_thousand_rows_in_cells_lose_little():
    y, p = drawn()
    cells = count_cells(p, y)[1]
    area, variance = pairs(p[y == 1, 1], p[y == 0, 1])
    assert area == pytest.approx(roc_auc_score(y, p[:, 1]), abs=1e-12)
    assert auroc_from_cells(cells) == pytest.approx(area, abs=5e-5)
    assert math.sqrt(delong_variance_from_cells(cells)) == pytest.approx(math.sqrt(variance), abs=2e-5)


@pytest.mark.parametrize("offset", [-5.0, -8.0, -12.0])
def test_probabilities_of_a_rare_class_have_different_cells(offset):
    """Calibrated risks of one in 100 to one in 80,000, and their complements; with equal cells, most are in one cell."""
    random = np.random.default_rng(0)
    p = 1 / (1 + np.exp(-(1.2 * random.normal(size=200_000) + offset)))
    y = (random.random(200_000) < p).astype(np.int64)
    assert 2 <= y.sum() < 4000
    cells = count_cells(np.stack([1 - p, p], 1), y)
    exact = roc_auc_score(y, p)
    error = 0.01 / math.sqrt(y.sum())  # a cell has about one percent of the negative samples
    assert auroc_from_cells(cells[1]) == pytest.approx(exact, abs=error)
    assert auroc_from_cells(cells[0]) == pytest.approx(exact, abs=error)


def test_cells_end_where_bins_of_the_calibration_error_and_decisions_change():
    assert len(EDGES) == CELLS - 1
    assert (np.diff(EDGES) > 0).all()
    assert {0.1, 0.2, 0.3, 0.5, 0.9} <= {*EDGES.tolist()}
    assert EDGES + EDGES[::-1] == pytest.approx(np.ones(CELLS - 1), abs=1e-15)


def test_ranks_within_a_cell_are_ties():
    """Exactly what all pairs give for the numbers of the cells instead of the probabilities."""
    y, p = drawn(60)
    coarse = np.clip((p * 4).astype(int), 0, 3)[:, 1]
    cells = np.stack([np.bincount(coarse[y == kind], minlength=4) for kind in (1, 0)], 1)
    area, variance = pairs(coarse[y == 1], coarse[y == 0])
    assert auroc_from_cells(cells) == pytest.approx(area, abs=1e-14)
    assert delong_variance_from_cells(cells) == pytest.approx(variance, abs=1e-14)
    swapped = cells[:, ::-1]
    assert auroc_from_cells(swapped) == pytest.approx(1 - area, abs=1e-14)
    assert delong_variance_from_cells(swapped) == pytest.approx(variance, abs=1e-14)


def test_without_two_kinds_there_is_no_area():
    assert math.isnan(auroc_from_cells(np.array([[3, 0], [1, 0]])))
    assert math.isnan(delong_variance_from_cells(np.array([[3, 1], [1, 0]])))


def test_cells_of_several_clients_add_up():
    y, p = drawn(100)
    both = count_cells(p[:40], y[:40]) + count_cells(p[40:], y[40:])
    assert (both == count_cells(p, y)).all()
    assert both.sum((1, 2)).tolist() == [100, 100]
    assert count_cells(np.array([[0.0, 1.0]]), np.array([1]))[:, [0, -1]].tolist() == [
        [[0, 1], [0, 0]],
        [[0, 0], [1, 0]],
    ]


@pytest.mark.parametrize("classes", [2, 3])
def test_metrics_of_sums_are_those_of_all_samples(classes):
    random = np.random.default_rng(1)
    y = random.integers(classes, size=500)
    logits = random.normal(size=(500, classes)) + 1.5 * np.eye(classes)[y]
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    decided = p.argmax(1)
    confusion = np.bincount(y * classes + decided, minlength=classes**2).reshape(classes, classes)
    probabilities = np.stack([p.sum(0), ((p - np.eye(classes)[y]) ** 2).sum(0)], 1)
    names = tuple("abc"[:classes])
    known = ("auroc", "f1", "recall", "balanced_accuracy", "brier")
    known += ("auprc", "ece", "observed_expected", "calibration_slope") if classes == 2 else ()
    metrics = MetricSet(known, class_names=names)
    found = class_metrics_from_sums(count_cells(p, y), confusion, probabilities, metrics)
    exact = {**Classification().requested_metrics(metrics, y, p, "here"), "accuracy": float((decided == y).mean())}
    assert {*found} == {*exact}
    near = {"auroc": 1e-4, "auprc": 1e-3, "ece": 2e-3, "calibration_slope": 1e-2}
    for name, (value, interval) in found.items():
        assert value == pytest.approx(exact[name], abs=near.get(name, 1e-12)), name
        bounded = name == "accuracy" or name.startswith("recall/") or (name == "auroc" and classes == 2)
        assert (interval is not None) == bounded
        assert interval is None or interval[0] < value < interval[1]
    if classes == 2:
        assert found["auprc"][0] == pytest.approx(average_precision_score(y, p[:, 1]), abs=1e-3)
    wider = class_metrics_from_sums(
        count_cells(p, y), confusion, probabilities, MetricSet(class_names=names, level=0.99)
    )
    assert wider["accuracy"][1][0] < found["accuracy"][1][0]
    assert metrics.level == LEVEL
