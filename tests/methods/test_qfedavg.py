"""q-FedAvg against a loop over the paper's formulas, and in its limits."""

import warnings

import numpy as np
import pytest
import torch
from support.batch_loop import LR, initial, local, loss, run, skewed
from support.quadratic import LR as RATE
from support.quadratic import STEPS, Quadratics, gradient, problem
from support.tolerance import TRAINING, assert_close

import unskew
from unskew.errors import ConfigError, MethodConflictError
from unskew.methods.qfedavg import SMALLEST

EXACT = 1e-12
slope = torch.func.grad(loss)


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("q", [0.3, 2.0])
def test_a_run_is_the_papers_loop(q, participation, weights):
    fed = skewed()
    result, cohorts = run(f"qfedavg:q={q}", participation, fed, client_weighting=weights)
    x = initial()
    for cohort in cohorts:
        numerator, denominator = torch.zeros_like(x), 0.0
        for k, batches in cohort.items():
            w = fed.clients[k].num_samples if weights == "samples" else 1
            d = (x - local(x, batches, slope)) / LR
            f = loss(x, fed.clients[k].x.double(), fed.clients[k].y) + SMALLEST
            numerator += w * f**q * d
            denominator += w * (q * f ** (q - 1) * d.square().sum() + f**q / LR)
        x = x - numerator / denominator
    assert float((result.vector - x).abs().max()) < EXACT


def test_the_rate_is_that_of_the_round():
    fed = skewed()
    result, cohorts = run("qfedavg:q=1", 1.0, fed, lr_schedule="cosine")
    x = initial()
    for t, cohort in enumerate(cohorts):
        lr, numerator, denominator = LR * (1 + np.cos(np.pi * t / 4)) / 2, torch.zeros_like(x), 0.0
        for k, batches in cohort.items():
            d = (x - local(x, batches, slope, lr=lr)) / lr
            f = loss(x, fed.clients[k].x.double(), fed.clients[k].y) + SMALLEST
            numerator += f * d
            denominator += d.square().sum() + f / lr
        x = x - numerator / denominator
    assert float((result.vector - x).abs().max()) < EXACT


def test_power_zero_is_fedavg_with_uniform_weights():
    plain = run("fedavg", client_weighting="uniform")[0]
    assert_close(run("qfedavg:q=0")[0].vector.numpy(), plain.vector.numpy(), TRAINING)


@pytest.mark.parametrize("q", [0.5, 1.0, 3.0])
def test_the_update_of_one_client_is_scaled(q):
    """By ``1 / (1 + q ||D||^2 lr / F)``."""
    (a,), (b,) = problem(sizes=(6,))
    x = np.zeros(3)
    for found in Quadratics([a], [b], f"qfedavg:q={q}").rounds(3):
        v = x.copy()
        for _ in range(STEPS):
            v = v - RATE * gradient(a, b, v)
        d, f = (x - v) / RATE, np.mean((a @ x - b) ** 2) / 2 + SMALLEST
        x = x + (v - x) / (1 + q * d @ d * RATE / f)
        assert_close(found, x, TRAINING)


@pytest.mark.slow  # long training to convergence
def test_larger_powers_make_losses_more_equal():
    """At the fixed point of a convex problem, the variance of the clients' losses falls and their mean rises."""
    A, b = problem(sizes=(6, 6, 6))
    means, variances = [], []
    for q in (0, 0.3, 1, 3):
        v = Quadratics(A, b, f"qfedavg:q={q}").rounds(100)[-1]
        losses = [np.mean((a @ v - y) ** 2) / 2 for a, y in zip(A, b, strict=True)]
        means.append(np.mean(losses))
        variances.append(np.var(losses))
    assert means == sorted(means)
    assert variances == sorted(variances, reverse=True)
    assert variances[-1] < 0.5 * variances[0]


def test_bytes_are_those_of_the_formula():
    """The model and one number up."""
    summary = run("qfedavg", 0.5)[0].summary
    assert summary["bytes_down"] == 4 * 2 * 24 * 8
    assert summary["bytes_up"] == 4 * 2 * 25 * 8


@pytest.mark.parametrize("other", ["fedrep", "fedals", "fedbn", "fedavgm", "dp:noise=1", "dpsgd:noise=1", "median"])
def test_what_needs_other_updates_is_refused(other):
    with pytest.raises(MethodConflictError):
        unskew.method(f"qfedavg+{other}")


def test_delays_are_refused():
    with pytest.raises(ConfigError, match=r"network\.delay"):
        run("qfedavg", network={"delay": "fixed:1"})


def test_secure_aggregation_gives_the_same_vector():
    masked, plain = (run("qfedavg", secure_aggregation=value)[0] for value in ("required", "off"))
    assert torch.equal(masked.vector, plain.vector)


def test_adaptive_optimizers_warn():
    """By the formula for one client, with steps of Adam: an update of nearly one rate per entry and step."""
    adam = {"optimizer": "adam", "momentum": 0.0, "rounds": 1, "lr": 0.1}
    with pytest.warns(
        UserWarning, match="With optimizer=adam the server's steps can be far too small. Use optimizer=sgd"
    ):
        scaled = run("qfedavg:q=1", fed=skewed((6,)), **adam)[0].vector - initial()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "qfedavg estimates")
        plain = run("qfedavg:q=0", fed=skewed((6,)), **adam)[0].vector - initial()
        run("qfedavg:q=1", rounds=1)
    f = loss(initial(), skewed((6,)).clients[0].x.double(), skewed((6,)).clients[0].y)
    assert_close(scaled, plain / (1 + plain.square().sum() / adam["lr"] / (f + SMALLEST)), TRAINING)
    assert float(scaled.norm()) < 0.5 * float(plain.norm())
