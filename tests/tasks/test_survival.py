"""Losses and predictions of survival analysis, against closed forms and loops in float64."""

import numpy as np
import pytest
import torch
from support.survival_sums import bin_sums, fitted, rows
from support.tolerance import FORMULA, assert_close

from unskew.errors import ConfigError
from unskew.tasks.metrics import MetricSet

KINDS = ("piecewise", "discrete")


@pytest.mark.parametrize("options", [{}, {"bins": 4}, {"until": 500.0}, {"bins": (90.0, 365.0, 500.0)}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_training_starts_at_the_optimum_of_the_intercepts(kind, options):
    """Which is d/T, or d/(n - c/2): the offsets give them exactly, and the gradient of a constant is 0 there."""
    y, _ = rows(whole=True)
    task = fitted(y, **options).with_loss(kind)
    events, exposure, at_risk = bin_sums(y, task.cuts)
    assert events.all()
    hazards = events / exposure if kind == "piecewise" else events / at_risk
    offsets = np.log(hazards) if kind == "piecewise" else np.log(hazards) - np.log1p(-hazards)
    assert_close(torch.tensor(task.offsets, dtype=torch.float64), offsets, FORMULA)
    logits = torch.zeros(len(y), len(task.cuts), dtype=torch.float64, requires_grad=True)
    task.losses(logits, y).sum().backward()
    assert_close(logits.grad.sum(0), 0.0, FORMULA, size=float(events.max()))
    assert_close(task.constant(y, len(task.cuts)), 0.0, FORMULA)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_negative_log_likelihoods(kind):
    y, _ = rows()
    task = fitted(y, bins=5).with_loss(kind)
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(len(y), 5)))
    z = (logits + torch.tensor(task.offsets, dtype=torch.float64)).numpy()
    expected = []
    for (time, event), own in zip(y.tolist(), z, strict=True):
        low, total = 0.0, 0.0
        for high, o in zip(task.cuts, own, strict=True):
            inside = (low < time <= high) or (time == 0 and low == 0)
            if kind == "piecewise":
                total += np.exp(o) * min(max(time - low, 0), high - low) - o * (inside and event)
            else:
                at_risk = 1 if time >= high or (inside and event) else 0.5 * inside
                chance = 1 / (1 + np.exp(-o))
                total -= np.log(chance) if inside and event else at_risk * np.log(1 - chance)
            low = high
        expected.append(total)
    assert_close(task.losses(logits, y), np.array(expected), FORMULA)
    assert_close(task.loss(logits, y), np.mean(expected), FORMULA)
    single = torch.vmap(lambda o, own: task.losses(o[None], own[None])[0])(logits, y)
    assert_close(single, np.array(expected), FORMULA)
    assert task.losses(logits.float(), y).dtype == torch.float32


def newton(design, exposure, events, steps=30):
    """Coefficients of a Poisson regression with the logarithm of the exposure as offset, by Newton's method."""
    beta = np.zeros(design.shape[1])
    for _ in range(steps):
        mean = exposure * np.exp(design @ beta)
        beta += np.linalg.solve(design.T @ (design * mean[:, None]), design.T @ (events - mean))
    return beta


def test_proportional_hazards_are_a_poisson_regression_of_rows_and_bins():
    y, x = rows()
    task = fitted(y, bins=4)
    design, exposure, events = [], [], []
    for own, (time, event) in zip(x, y.tolist(), strict=True):
        low = 0.0
        for j, high in enumerate(task.cuts):
            if time > low:
                design.append([*own, *np.eye(4)[j]])
                exposure.append(min(time, high) - low)
                events.append(float(event and time <= high))
            low = high
    expected = newton(np.array(design), np.array(exposure), np.array(events))
    kept = y[:, 0] > 0  # a censored row of time 0 has no exposure; none of the others has an event there
    assert not y[~kept, 1].any() or bin_sums(y[~kept], task.cuts)[0].sum() == y[~kept, 1].sum()
    rows_used, inputs = y[kept], torch.from_numpy(x)[kept]
    beta = torch.zeros(6, dtype=torch.float64)

    def loss(beta):
        return task.loss((inputs @ beta[:2])[:, None] + beta[2:], rows_used)

    for _ in range(30):
        beta -= torch.linalg.solve(torch.func.hessian(loss)(beta), torch.func.grad(loss)(beta))
    found = beta.numpy()
    np.testing.assert_allclose(found[:2], expected[:2], atol=1e-6)
    np.testing.assert_allclose(found[2:] + np.array(task.offsets), expected[2:], atol=1e-6)


def test_one_bin_is_exponential_regression():
    y, _ = rows()
    task = fitted(y, bins=1, until=1000.0)
    assert task.rates == pytest.approx((float(y[:, 1].sum() / y[:, 0].sum()),))
    survival = task.outputs(torch.zeros(1, 1, dtype=torch.float64)).numpy()
    for t in (0.0, 10.0, 365.0, 1000.0):
        assert task.survival(survival, [t])[0, 0] == pytest.approx(np.exp(-task.rates[0] * t))
    assert task.decisions(survival, MetricSet()) == pytest.approx([np.log(2) / task.rates[0]])


@pytest.mark.parametrize("kind", KINDS)
def test_survival_follows_from_the_hazards_of_bins(kind):
    y, _ = rows()
    task = fitted(y, bins=3).with_loss(kind)
    logits = torch.tensor([[0.3, -0.2, 0.1], [-4.0, -4.0, -4.0]], dtype=torch.float64)
    z, (first, second, last) = logits[0].numpy() + np.array(task.offsets), task.cuts
    time = second + 0.25 * (last - second)
    if kind == "piecewise":
        expected = np.exp(-np.exp(z) @ np.array([first, second - first, time - second]))
    else:
        expected = np.prod((1 / (1 + np.exp(z))) ** np.array([1, 1, 0.25]))
    outputs = task.outputs(logits).numpy()
    assert task.survival(outputs, [time])[0, 0] == pytest.approx(expected)
    median, never = task.decisions(outputs, MetricSet())
    assert task.survival(outputs[:1], [median])[0, 0] == pytest.approx(0.5)
    assert never is None
    columns = task.predicted_columns(outputs, task.names, None, [time, last], curve=True)
    assert [*columns] == [f"risk({time:g})", f"risk({last:.6g})", "median", *task.names]
    assert columns[f"risk({time:g})"][0] == float(f"{1 - expected:.6g}")
    assert columns["median"] == [median, never]
    assert columns[task.names[0]] == [float(f"{chance:.6g}") for chance in outputs[:, 0]]
    with pytest.raises(ConfigError, match="--horizons: 5000 is after"):
        task.predicted_columns(outputs, task.names, None, [5000.0])
