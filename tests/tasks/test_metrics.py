"""Figures of imbalanced classes, as scikit-learn has them, and weights of classes."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn import metrics
from sklearn.linear_model import LogisticRegression
from sklearn.utils.class_weight import compute_class_weight
from support.tolerance import FEW, assert_close, near

import unskew
from unskew.cli.comparison_tables import metrics_table
from unskew.errors import ConfigError
from unskew.tasks.classification import Classification
from unskew.tasks.metrics import METRICS, ClassPredictions, MetricSet, calibration_slope
from unskew.tasks.registry import TASKS

TINY = {"model": "logistic", "rounds": 2, "local_steps": 5, "lr": 0.1, "engine": "inline"}
ASKED = ",".join(METRICS)


@pytest.fixture(scope="module")
def fed():
    draws = np.random.default_rng(0)

    def rows(n):
        y = (draws.random(n) < 0.15).astype(int)
        return draws.normal(size=(n, 3)).astype("float32") + y[:, None], y

    return unskew.Federation.from_arrays([rows(80), rows(50)], test=rows(120), class_names=["no", "yes"])


def test_figures_of_two_classes_are_scikit_learns(fed):
    result = unskew.run(fed, metrics=ASKED, **TINY)
    p, y = result.predictor().predict_proba(fed.test[0]), fed.test[1].numpy()
    said = p.argmax(1)
    true, sure = metrics.confusion_matrix(y, said, normalize="true").diagonal(), p[:, 1]
    parts = [(sure > low) & (sure <= high) for low, high in pairwise(np.linspace(0, 1, 16))]
    logits = np.log(sure / (1 - sure))[:, None]
    slope = LogisticRegression(C=1e9, tol=1e-9, max_iter=10_000).fit(logits, y).coef_[0, 0]
    expected = {
        "auroc": metrics.roc_auc_score(y, p[:, 1]),
        "auprc": metrics.average_precision_score(y, p[:, 1]),
        "f1": metrics.f1_score(y, said),
        "balanced_accuracy": metrics.balanced_accuracy_score(y, said),
        "ece": sum(abs(y[part].mean() - sure[part].mean()) * part.mean() for part in parts if part.any()),
        "brier": metrics.brier_score_loss(y, sure),
        "observed_expected": y.sum() / sure.sum(),
        "calibration_slope": slope,
        "recall/no": true[0],
        "recall/yes": true[1],
    }
    assert {name: result.history[-1][name] for name in expected} == near(expected, dtype=torch.float32)
    assert {name: result.summary[name] for name in expected} == {name: result.history[-1][name] for name in expected}


def test_the_calibration_slope_is_found_where_whole_newton_steps_diverge():
    logits = np.array([6.0, 0, 2, 0, -1, 0, 3, -2, -4, -34, -2, -1, -3, -3, 1, 4])[:, None]
    y, p = np.isin(np.arange(16), (9, 15)), 1 / (1 + np.exp(-logits))
    expected = LogisticRegression(C=1e12, tol=1e-12, max_iter=100_000).fit(np.log(p / (1 - p)), y).coef_[0, 0]
    found = calibration_slope(ClassPredictions(np.hstack([1 - p, p]), y.astype(int), y.astype(int), (1,)))
    assert found == [pytest.approx(expected, rel=1e-5)]


def test_figures_of_more_classes_are_means_of_each_against_all_others():
    draws = np.random.default_rng(1)
    p, y = draws.dirichlet(np.ones(4), 60), draws.integers(0, 4, 60)
    metric_set = MetricSet(("auroc", "auprc", "f1", "balanced_accuracy", "brier"), class_names=tuple("abcd"))
    found = Classification().metrics_of_all(y, p, metric_set)
    each = np.eye(4)[y]
    assert found == near({
        "auroc": metrics.roc_auc_score(y, p, multi_class="ovr"),
        "auprc": metrics.average_precision_score(each, p),
        "f1": metrics.f1_score(y, p.argmax(1), average="macro"),
        "balanced_accuracy": metrics.balanced_accuracy_score(y, p.argmax(1)),
        "brier": np.square(p - each).sum(1).mean(),
    })  # fmt: skip
    absent = Classification().metrics_of_all(np.minimum(y, 2), p, replace(metric_set, known=("auroc", "recall")))
    assert np.isnan(absent["auroc"])
    assert np.isnan(absent["recall/d"])


def test_they_are_null_where_nothing_is_evaluated_and_change_no_model(fed):
    asked = unskew.run(fed, metrics="auroc", eval_every=2, **TINY)
    assert [row["auroc"] is None for row in asked.history] == [True, False]
    assert torch.equal(asked.vector, unskew.run(fed, **TINY).vector)
    with pytest.raises(ConfigError, match="Did you mean 'auroc'"):
        unskew.run(fed, metrics="auroq", **TINY)
    rows = unskew.compare(fed, methods=["fedavg"], seeds=1, metrics="auroc,ece", **TINY).rows()
    shown = metrics_table(rows)
    assert [column.header for column in shown.columns] == ["method", "AUROC", "ECE of yes"]
    assert list(shown.columns[1].cells) == [f"{100 * rows[0]['auroc']:.1f}"]


def test_balanced_weights_are_scikit_learns_of_all_clients_together(fed):
    counts = fed.class_counts().sum(0)
    y = np.repeat([0, 1], counts)
    weights = compute_class_weight("balanced", classes=np.array([0, 1]), y=y)
    balanced = unskew.run(fed, class_weights="balanced", **TINY)
    given = unskew.run(fed, class_weights=weights.tolist(), **TINY)
    assert torch.equal(balanced.vector, given.vector)
    assert not torch.equal(balanced.vector, unskew.run(fed, **TINY).vector)
    assert balanced.summary["bytes_up"] - given.summary["bytes_up"] == 2 * 2 * 8
    assert balanced.summary["bytes_down"] - given.summary["bytes_down"] == 2 * 2 * 8


def test_weights_multiply_the_loss_of_each_sample_and_no_figure(fed):
    logits, y = torch.randn(6, 2, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1, 0])
    weighted = Classification((0.5, 3.0))
    each = TASKS["classification"].losses(logits, y) * torch.tensor([0.5, 3.0])[y]
    assert_close(weighted.losses(logits, y), each, FEW)
    assert_close(weighted.loss(logits, y), each.mean(), FEW)
    result = unskew.run(fed, class_weights=[0.5, 3.0], **TINY)
    p = result.predictor().predict_proba(fed.test[0])
    loss = -np.log(p[np.arange(len(p)), fed.test[1].numpy()]).mean()
    assert result.summary["loss"] == near(loss, dtype=torch.float32)


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], "some"])
def test_weights_that_do_not_fit_are_refused(fed, weights):
    with pytest.raises(ConfigError, match="class_weights"):
        unskew.run(fed, class_weights=weights, **TINY)
