"""Newton's method on sums over clients, against iteratively reweighted least squares on all rows together."""

import numpy as np
import pytest
import torch

from unskew.sums.fisher import fisher_sums
from unskew.tasks.coefficients import NoEstimateError, newton


def maximum_likelihood(x, y):
    """Coefficients and standard errors of a logistic regression of all rows, by weighted least squares."""
    beta = np.zeros(x.shape[1])
    for _ in range(30):
        p = 1 / (1 + np.exp(-x @ beta))
        w = np.sqrt(p * (1 - p))
        beta = np.linalg.lstsq(x * w[:, None], w * (x @ beta) + (y - p) / w, rcond=None)[0]
    _, r = np.linalg.qr(x * w[:, None])
    return beta, np.sqrt(np.square(np.linalg.inv(r)).sum(1))


def sites(seed=0, sizes=(40, 15, 70, 30, 1)):
    random = np.random.default_rng(seed)
    parts = []
    for n in sizes:
        x = np.column_stack([np.ones(n), random.normal(0, 9, n), random.random(n) < 0.3, random.normal(size=(n, 2))])
        y = random.random(n) < 1 / (1 + np.exp(-x @ [-0.5, 0.07, 0.8, -0.5, 0.1]))
        parts.append((x, y))
    return parts


def summed(parts):
    def total(beta):
        sums = [fisher_sums(x, y, beta) for x, y in parts]
        return {name: torch.stack([own[name] for own in sums]).sum(0) for name in sums[0]}

    return total


NAMES = ["(intercept)", "age", "male", "a", "b"]


def test_newton_over_five_sites_is_pooled_maximum_likelihood():
    parts = sites()
    x, y = (np.concatenate(each) for each in zip(*parts, strict=True))
    estimate = newton(summed(parts), NAMES)
    beta, error = maximum_likelihood(x, y)
    assert estimate.beta == pytest.approx(beta, rel=1e-12)
    assert np.sqrt(np.diag(estimate.covariance)) == pytest.approx(error, rel=1e-12)
    p = 1 / (1 + np.exp(-x @ beta))
    assert float(estimate.sums["log_likelihood"]) == pytest.approx(np.log(np.where(y, p, 1 - p)).sum(), rel=1e-12)
    assert estimate.sums["counts"].tolist() == [len(y), y.sum()]
    assert estimate.exchanges <= 9


def test_score_and_information_are_derivatives_of_the_log_likelihood():
    x, y = sites()[0]
    beta = torch.tensor([-0.3, 0.05, 0.2, -0.3, 0.4], dtype=torch.float64)

    def log_likelihood(beta):
        logits = torch.from_numpy(x) @ beta
        return -torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.tensor(y * 1.0), reduction="sum")

    sums = fisher_sums(x, y, beta.numpy())
    assert float(sums["log_likelihood"]) == pytest.approx(float(log_likelihood(beta)), rel=1e-12)
    assert torch.allclose(sums["score"], torch.func.grad(log_likelihood)(beta), rtol=1e-10)
    assert torch.allclose(sums["information"], -torch.func.hessian(log_likelihood)(beta), rtol=1e-10)


def test_sums_of_extreme_coefficients_are_finite():
    x, y = sites()[0]
    assert all(value.isfinite().all() for value in fisher_sums(x, y, np.full(5, 1e5)).values())


def test_estimates_do_not_depend_on_the_units_of_columns():
    parts, units = sites(), np.array([1, 1e-6, 1, 1e5, 1])
    plain, scaled = newton(summed(parts), NAMES), newton(summed([(x * units, y) for x, y in parts]), NAMES)
    assert scaled.beta * units == pytest.approx(plain.beta, rel=1e-9)


def test_a_column_that_no_row_has_gets_no_coefficient_and_changes_nothing():
    parts = sites()
    wider = [(np.column_stack([x, np.zeros(len(x))]), y) for x, y in parts]
    estimate = newton(summed(wider), [*NAMES, "missing"])
    assert estimate.beta.tolist() == pytest.approx([*newton(summed(parts), NAMES).beta, 0], rel=1e-12)


def separate(x, y):
    """A category that occurs only with events, a column that ranks all rows, and a single class."""
    yield "male", np.column_stack([x[:, :2], x[:, 2] * y, x[:, 3:]]), y
    yield "age", np.column_stack([x[:, :1], np.where(y, 5.0, -5.0) + x[:, 3] / 9, x[:, 2:]]), y
    yield "(intercept)", x, np.ones(len(y), bool)


@pytest.mark.parametrize("case", range(3))
def test_separated_classes_have_no_estimate(case):
    x, y = (np.concatenate(each) for each in zip(*sites(), strict=True))
    name, x, y = list(separate(x, y))[case]
    with pytest.raises(NoEstimateError, match="did not converge") as raised:
        newton(summed([(x, y)]), NAMES)
    assert repr(name) in str(raised.value)


def test_linearly_dependent_columns_are_named():
    parts = [(np.column_stack([x, 3 - x[:, 2] / 2]), y) for x, y in sites()]
    with pytest.raises(
        NoEstimateError, match=r"linearly dependent in the training rows: \(intercept\), male, twice\. "
    ):
        newton(summed(parts), [*NAMES, "twice"])
