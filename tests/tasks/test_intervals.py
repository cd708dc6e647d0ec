"""Intervals of metrics, against SciPy, an integral of Student's density, plain loops and scikit-learn on repeated rows."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from sklearn.metrics import (
    average_precision_score,
    balanced_accuracy_score,
    f1_score,
    log_loss,
    mean_absolute_error,
    r2_score,
    recall_score,
    roc_auc_score,
    root_mean_squared_error,
)

from unskew.simulation.evaluate import truth_and_scores
from unskew.tasks.classification import MultiLabel
from unskew.tasks.intervals import (
    MOST_SAMPLES,
    TWO_SIDED_95,
    auroc_interval,
    class_statistic,
    interval95,
    metric_interval,
    resampled_counts,
    wilson_interval,
)
from unskew.tasks.metrics import MetricSet
from unskew.tasks.registry import TASKS
from unskew.tasks.regression import Regression

CLASSIFICATION = TASKS["classification"]
LABELS = np.array([0, 0, 0, 0, 1, 1, 1, 1, 1, 0])
SCORES = np.array([0.1, 0.4, 0.35, 0.8, 0.65, 0.9, 0.3, 0.55, 0.7, 0.2])


@pytest.mark.parametrize("df", [1, 2, 3, 9, 30])
def test_quantiles_hold_95_percent_of_students_density(df):
    t = TWO_SIDED_95[df - 1]
    x = np.linspace(0, t, 200_001)
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
    density = scale * (1 + x**2 / df) ** (-(df + 1) / 2)
    # The quantiles have six decimals.
    assert 2 * np.trapezoid(density, x) == pytest.approx(0.95, abs=1e-6)


def test_an_interval_is_as_wide_as_its_values_differ():
    low, high = interval95([1.0, 2.0, 3.0, 6.0])
    assert (low + high) / 2 == pytest.approx(3)
    assert high - low == pytest.approx(2 * TWO_SIDED_95[2] * np.std([1, 2, 3, 6], ddof=1) / 2)
    assert interval95([1.0]) is None
    assert interval95([2.0] * 40) == (2.0, 2.0)


@pytest.mark.parametrize(("hits", "n"), [(0, 1), (1, 1), (9, 10), (10, 10), (0, 7), (313, 1000)])
def test_shares_have_the_score_interval_of_scipy(hits, n):
    expected = binomtest(hits, n).proportion_ci(method="wilson")
    assert wilson_interval(hits, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_published_values_of_wilson_and_delong():
    assert wilson_interval(9, 10) == pytest.approx((0.5958, 0.9821), abs=5e-5)
    assert wilson_interval(10, 10) == pytest.approx((0.7225, 1), abs=5e-5)
    low, high = np.array(auroc_interval(LABELS == 1, SCORES))
    assert (low, high) == pytest.approx((0.3218, 0.9548), abs=5e-5)
    center, half = (math.log(high / (1 - high)) + np.array([1, -1]) * math.log(low / (1 - low))) / 2
    assert 1 / (1 + math.exp(-center)) == pytest.approx(0.76, abs=1e-12)
    assert (half / 1.959963984540054 * 0.76 * 0.24) ** 2 == pytest.approx(0.0312, abs=1e-12)


def test_delong_is_a_loop_over_all_pairs():
    random = np.random.default_rng(0)
    positive, scores = random.random(60) < 0.3, random.integers(0, 9, 60) / 9  # many equal scores
    wins = np.array([[(a > b) + (a == b) / 2 for b in scores[~positive]] for a in scores[positive]])
    area = wins.mean()
    variance = wins.mean(1).var(ddof=1) / len(wins) + wins.mean(0).var(ddof=1) / wins.shape[1]
    logits = math.log(area / (1 - area)) + np.array([-1, 1]) * 1.959963984540054 * variance**0.5 / (area * (1 - area))
    assert auroc_interval(positive, scores) == pytest.approx(1 / (1 + np.exp(-logits)), abs=1e-12)


def test_a_perfect_ranking_of_a_few_samples_is_not_certain():
    assert auroc_interval(LABELS == 1, LABELS + 0.0) == wilson_interval(5, 5)
    assert auroc_interval(LABELS == 1, -LABELS + 0.0) == wilson_interval(0, 5)


def probabilities(n, classes, seed=0):
    random = np.random.default_rng(seed)
    y = random.integers(0, classes, n)
    # Rounded, so that some scores are equal.
    logits = np.round(random.standard_normal((n, classes)) + np.eye(classes)[y], 1)
    p = np.exp(logits)
    return y, p / p.sum(1, keepdims=True)


def one_class(score, positive):
    return lambda y, p: score(y == positive, p[:, positive])


TWO = {
    "auroc": one_class(roc_auc_score, 0),
    "auprc": one_class(average_precision_score, 0),
    "f1": lambda y, p: f1_score(y, p.argmax(1), pos_label=0),
    "balanced_accuracy": lambda y, p: balanced_accuracy_score(y, p.argmax(1)),
    "accuracy": lambda y, p: (p.argmax(1) == y).mean(),
    "recall/b": lambda y, p: recall_score(y, p.argmax(1), pos_label=1),
    "loss": lambda y, p: log_loss(y, p),
}
THREE = {
    "auroc": lambda y, p: np.mean([one_class(roc_auc_score, c)(y, p) for c in range(3)]),
    "auprc": lambda y, p: np.mean([one_class(average_precision_score, c)(y, p) for c in range(3)]),
    "f1": lambda y, p: f1_score(y, p.argmax(1), average="macro"),
    "balanced_accuracy": lambda y, p: balanced_accuracy_score(y, p.argmax(1)),
}


@pytest.mark.parametrize(
    ("classes", "name"), [*((2, name) for name in TWO), *((3, name) for name in THREE)], ids=lambda value: str(value)
)
def test_resampled_class_metrics_are_those_of_scikit_learn_on_repeated_rows(classes, name):
    y, p = probabilities(40, classes)
    counts = next(resampled_counts(np.arange(40)))[:20]
    names = ("a", "b", "c")[:classes]
    values = class_statistic(name, MetricSet(positive=0).predictions(y, p), names)(counts)
    oracle = {2: TWO, 3: THREE}[classes][name]
    rows = [np.repeat(np.arange(40), row) for row in counts]
    assert values == pytest.approx([oracle(y[row], p[row]) for row in rows], abs=1e-12)


@pytest.mark.parametrize(
    ("name", "oracle"),
    [("r2", r2_score), ("mae", mean_absolute_error), ("rmse", root_mean_squared_error)],
    ids=["r2", "mae", "rmse"],
)
def test_resampled_regression_metrics_are_those_of_scikit_learn_on_repeated_rows(name, oracle):
    random = np.random.default_rng(0)
    y = 1e8 + random.standard_normal((30, 2))
    predicted = y + random.standard_normal((30, 2)) / 2
    counts = next(resampled_counts(np.arange(30)))[:20]
    values = Regression(mean=(5.0, 5.0), std=(3.0, 2.0)).statistic(name, y, predicted, MetricSet())(counts)
    rows = [np.repeat(np.arange(30), row) for row in counts]
    assert values == pytest.approx([oracle(y[row], predicted[row]) for row in rows], abs=1e-8)


@pytest.mark.parametrize("name", ["macro_f1", "micro_f1", "samples_f1", "accuracy"])
def test_resampled_label_metrics_are_those_of_scikit_learn_on_repeated_rows(name):
    random = np.random.default_rng(0)
    y = (random.random((30, 4)) < 0.4).astype(np.uint8)
    p = np.clip(y * 0.3 + random.random((30, 4)) * 0.69, 0, 1)
    counts = next(resampled_counts(np.arange(30)))[:20]
    values = MultiLabel().statistic(name, y, p, MetricSet())(counts)
    for value, row in zip(values, (np.repeat(np.arange(30), row) for row in counts), strict=True):
        kind = name.removesuffix("_f1")
        score = (y[row] == (p[row] > 0.5)).mean()
        expected = score if name == "accuracy" else f1_score(y[row], p[row] > 0.5, average=kind, zero_division=0)
        assert value == pytest.approx(expected, abs=1e-12)


def test_the_interval_of_a_mean_error_is_close_to_the_normal_one():
    error = np.abs(np.random.default_rng(0).standard_normal(400))
    low, high = metric_interval("mae", Regression(mean=(0.0,), std=(1.0,)), error, np.zeros(400), MetricSet())
    half = 1.96 * error.std() / 20
    assert (low, high) == pytest.approx((error.mean() - half, error.mean() + half), abs=half / 5)


def test_groups_are_drawn_as_a_whole():
    y, p = probabilities(50, 2)
    patients, metrics = np.repeat(np.arange(50), 8), MetricSet(class_names=("a", "b"))
    alone = metric_interval("auprc", CLASSIFICATION, y, p, metrics)
    # Eight copies of every row contain no more information than one.
    copies = metric_interval("auprc", CLASSIFICATION, y[patients], p[patients], metrics, patients)
    assert copies == pytest.approx(alone, abs=1e-12)
    grouped = metric_interval("accuracy", CLASSIFICATION, y[patients], p[patients], metrics, patients)
    wilson = metric_interval("accuracy", CLASSIFICATION, y[patients], p[patients], metrics)
    assert np.ptp(grouped) > 2 * np.ptp(wilson)


def test_the_interval_of_the_same_predictions_is_the_same():
    y, p = probabilities(60, 3)
    assert len({metric_interval("f1", CLASSIFICATION, y, p, MetricSet()) for _ in range(2)}) == 1


@pytest.mark.parametrize(
    ("name", "y"),
    [
        *((name, []) for name in ("accuracy", "auroc", "auprc", "loss", "recall/b")),
        *((name, [1]) for name in ("auroc", "auprc", "f1", "loss")),
        *((name, [1] * 9) for name in ("auroc", "auprc", "recall/a")),
        ("auroc", [0] * 9 + [1]),
        ("auprc", [0] * 9 + [1]),  # a third of the resamples have no positive row
        ("auprc", [0] * 9 + [1] * 4),  # perfect in every resample, which says nothing about its error
        ("custom", [0, 1] * 5),
    ],
)
def test_undefined_intervals_are_none(name, y):
    y = np.array(y, np.int64)
    p = np.stack([0.9 - 0.8 * y, 0.1 + 0.8 * y], 1)
    assert metric_interval(name, CLASSIFICATION, y, p, MetricSet(class_names=("a", "b"))) is None


def test_predictions_that_are_not_finite_have_no_interval():
    y, p = probabilities(20, 2)
    p[3] = np.nan
    assert metric_interval("accuracy", CLASSIFICATION, y, p, MetricSet()) is None


@pytest.mark.parametrize(("samples", "classes"), [(MOST_SAMPLES + 1, 2), (MOST_SAMPLES // 3 + 1, 3)])
def test_very_large_sets_are_not_resampled(samples, classes):
    y, p = probabilities(samples, classes)
    assert metric_interval("auprc", CLASSIFICATION, y, p, MetricSet()) is None
    assert metric_interval("accuracy", CLASSIFICATION, y, p, MetricSet()) is not None


def test_large_logits_keep_their_ranks_and_losses():
    """Float32 has equal probabilities from a difference of 17 on."""
    draws = np.random.default_rng(0)
    y, logits = draws.integers(0, 2, 300), draws.normal(size=(300, 2)).clip(-2, 2).astype("float32") * 8
    logits[np.arange(300), y] += 4
    truth, scores = truth_and_scores(CLASSIFICATION, [torch.from_numpy(logits)], torch.from_numpy(y))
    margin = np.diff(logits.astype(float))[:, 0]
    losses = np.logaddexp(0, margin * np.where(y == 1, -1, 1))
    for positive in (0, 1):
        metrics = MetricSet(("auroc",), class_names=("a", "b"), positive=positive)
        found = CLASSIFICATION.metrics_of_outputs(truth, scores, metrics)
        assert found["auroc"] == pytest.approx(roc_auc_score(y, margin), abs=1e-12)
        assert found["loss"] == pytest.approx(losses.mean(), rel=1e-12)
    statistic = class_statistic("loss", MetricSet(class_names=("a", "b")).predictions(truth, scores))
    assert statistic(np.eye(300)) == pytest.approx(losses, rel=1e-9, abs=1e-15)


def test_language_models_have_no_intervals():
    assert metric_interval("perplexity", TASKS["language"], LABELS[:, None], np.eye(10), MetricSet()) is None
