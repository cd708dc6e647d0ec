"""Newton's method on sums over clients, against iteratively reweighted least squares on all rows together."""

import numpy as np
import pytest
import torch

from unskew.errors import DataError
from unskew.sums.base import ClientRows, SumRequest
from unskew.sums.fisher import fisher_sums, hazard_sums
from unskew.sums.registry import SUMS
from unskew.tasks.coefficients import NoEstimateError, newton
from unskew.tasks.survival import Survival


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


CUTS = np.array([20.0, 60.0, 200.0])
# statsmodels 0.15.0, a row for each bin that a patient reaches, with indicators of the bins: GLM(events, x,
# family=Poisson(), offset=log(time in the bin)).fit(tol=1e-14).params and .bse, on the rows of patients()
POISSON = (-5.1294671490742925, -4.8973916622786815, -4.348538813602727, -0.002305615962814518, 0.003801706188422689)
ERRORS = (0.3099613806352956, 0.2724074141716665, 0.25414571270471487, 0.007657863361997575, 0.0506012816567117)


def patients():
    """Columns, times and events of 200 patients."""
    i = np.arange(200)
    age, dose = i * 37 % 41, i * 13 % 7
    return np.column_stack([age, dose]).astype(float), 1.0 + (i * 61 % 97) * (1 + dose % 2), i * 7 % 10 < 6


def summed_hazards(parts, offsets):
    def total(beta):
        sums = [hazard_sums(*part, CUTS, offsets, beta) for part in parts]
        return {name: torch.stack([own[name] for own in sums]).sum(0) for name in sums[0]}

    return total


def test_proportional_hazards_over_sites_are_a_poisson_regression_of_all_rows():
    x, time, event = patients()
    parts = [(x[k::3] - x.mean(0), time[k::3], event[k::3]) for k in range(3)]
    offsets = np.array([-5.0, -4.5, -5.0])
    estimate = newton(summed_hazards(parts, offsets), ["1", "2", "3", "age", "dose"])
    change = np.eye(5)
    change[:3, 3:] = -x.mean(0)
    beta = change @ (estimate.beta + np.append(offsets, [0, 0]))
    assert beta == pytest.approx(POISSON, rel=1e-6)
    assert np.sqrt(np.diag(change @ estimate.covariance @ change.T)) == pytest.approx(ERRORS, rel=1e-6)
    assert estimate.sums["counts"].tolist() == [200, event.sum()]


def test_sums_of_hazards_are_derivatives_of_the_piecewise_loss():
    """The loss of the task with the same hazards is minus the log likelihood."""
    x, time, event = patients()
    rates, beta = (0.01, 0.02, 0.005), torch.tensor([0.2, -0.1, 0.3, 0.01, -0.05], dtype=torch.float64)
    task = Survival(cuts=tuple(CUTS), rates=rates, shares=(0.1, 0.1, 0.1))
    columns, y = torch.from_numpy(x), torch.from_numpy(np.stack([time, event], 1))

    def log_likelihood(beta):
        return -task.losses(beta[:3] + (columns @ beta[3:])[:, None], y).sum()

    own = hazard_sums(x, time, event, CUTS, np.log(rates), beta.numpy())
    assert float(own["log_likelihood"]) == pytest.approx(float(log_likelihood(beta)), rel=1e-12)
    score = torch.autograd.functional.jacobian(log_likelihood, beta)
    assert own["score"].numpy() == pytest.approx(score.numpy(), rel=1e-10)
    hessian = torch.autograd.functional.hessian(log_likelihood, beta)
    assert own["information"].numpy() == pytest.approx(-hessian.numpy(), rel=1e-10, abs=1e-10)


def test_a_request_without_survival_times_is_rejected():
    tensors = {
        "cuts": torch.tensor([1.0, 2.0]),
        "offsets": torch.zeros(2),
        "center": torch.zeros(1),
        "beta": torch.zeros(3),
    }
    request = SumRequest("fisher", {"codes": [0], "kept": [True]}, {name: t.double() for name, t in tensors.items()})
    with pytest.raises(DataError, match="other inputs"):
        SUMS["fisher"].compute(ClientRows(x=torch.zeros(3, 1), y=torch.zeros(3)), request)
    rows = ClientRows(x=torch.zeros(3, 1), y=torch.tensor([[0.5, 1.0], [1.5, 0.0], [9.0, 1.0]]))
    own = SUMS["fisher"].compute(rows, request)
    SUMS["fisher"].check(request, own)
    assert own["counts"].tolist() == [3, 1]
