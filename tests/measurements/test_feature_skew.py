"""Feature skew and the label's variance from two exchanges of sums, against loops over the pooled rows."""

import numpy as np
import pytest
import torch

import unskew
from unskew.measurements.feature_skew import feature_skew
from unskew.measurements.site_differences import LabelVariance, input_columns, site_differences
from unskew.sums.base import ClientRows
from unskew.sums.exchange import SimulatedExchange
from unskew.sums.statistics import skew_metrics


def omega2_by_rows(pairs, classes):
    """Omega squared of each class, weighted by its rows; one row of a class at a client has no scatter and is left out."""
    weights, shares = [], []
    for c in range(classes):
        groups = [np.array([row for row, label in zip(x, y, strict=True) if label == c]) for x, y in pairs]
        groups = [group for group in groups if len(group) > 1]
        if len(groups) < 2:
            continue
        center = np.concatenate(groups).mean(0)
        between = sum(((group.mean(0) - center) ** 2).sum() for group in groups for _ in group)
        within = sum(((row - group.mean(0)) ** 2).sum() for group in groups for row in group)
        n, K = sum(map(len, groups)), len(groups)
        error = within / (n - K)
        weights.append(n)
        shares.append((between - (K - 1) * error) / (between + within + error))
    return np.average(shares, weights=weights)


def test_feature_skew_from_sums_equals_loops_over_rows():
    fed = unskew.load_federation("digits", partition="dirichlet:0.3", clients=6, max_train_samples=400)
    moved = [(c.x.double() + 20 * k, c.y) for k, c in enumerate(fed.clients)]  # each client's scanner has an offset
    expected = omega2_by_rows([(x.flatten(1).numpy(), y.tolist()) for x, y in moved], fed.classes)
    assert expected > 0.05
    assert feature_skew(moved.__getitem__, range(6), fed.classes) == pytest.approx(expected, rel=1e-13)


def test_without_a_class_at_two_clients_there_is_no_feature_skew():
    x = torch.zeros(3, 2)
    assert feature_skew(lambda k: (x, torch.full((3,), k)), [0, 1], 2) is None
    ones = [torch.tensor([0, 1, 1]), torch.tensor([0, 0, 0])]  # class 0 once at the first client
    assert feature_skew(lambda k: (x, ones[k]), [0, 1], 2) is None


def test_the_labels_variance_from_sums_is_that_of_a_regression_on_all_rows():
    fed = unskew.load_federation("digits", partition="dirichlet:0.3", clients=5, max_train_samples=500, holdout=0.0)
    _, codes, center = input_columns(fed, ())
    rows = [ClientRows(x=client.x, y=client.y) for client in fed.clients]
    found = skew_metrics(SimulatedExchange(lambda: rows), [LabelVariance(tuple(codes), center, fed.classes)])
    X = np.concatenate([c.x.double().flatten(1).numpy() for c in fed.clients])
    T = np.eye(10)[np.concatenate([c.y.numpy() for c in fed.clients])]
    site = np.repeat(np.arange(5), [len(c.y) for c in fed.clients])
    used = X.std(0) > 0
    A = np.column_stack([np.ones(len(X)), X[:, used] - X[:, used].mean(0)])
    residuals = T - A @ np.linalg.lstsq(A, T, rcond=None)[0]
    variance = ((T - T.mean(0)) ** 2).sum()
    for values, name, parameters in ((T - T.mean(0), "label_between", 1), (residuals, "label_unexplained", 65)):
        between = sum(((values[site == k].mean(0)) ** 2).sum() * (site == k).sum() for k in range(5))
        chance = 4 * ((values**2).sum() - between) / (len(T) - 5 - parameters + 1)
        assert found[name] == pytest.approx(max(0, (between - chance) / variance), rel=1e-9), name
    whole = site_differences(fed)
    assert found == pytest.approx({n: getattr(whole, n) for n in found}, rel=1e-10)
