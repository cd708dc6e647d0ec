"""FedCM, MimeLite and Mime against a loop over the papers' formulas, in closed form, and in their limits."""

import numpy as np
import pytest
import torch
from support.batch_loop import LR, initial, local, loss, run, skewed
from support.quadratic import Quadratics, gradient, problem
from support.tolerance import TRAINING, assert_close

from unskew.errors import MethodConflictError
from unskew.protocol.training_config import Training

EXACT = 1e-12
slope = torch.func.grad(loss)


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("method", ["fedcm", "mimelite", "mime"])
def test_a_run_is_the_papers_loop(method, participation, weights):
    fed, share = skewed(), {"fedcm": 0.7}.get(method, 0.8)
    option = {"fedcm": "alpha=0.3"}.get(method, "beta=0.8")
    result, cohorts = run(f"{method}:{option}", participation, fed, client_weighting=weights)
    x = initial()
    m = torch.zeros_like(x)
    for cohort in cohorts:
        count = {k: float(fed.clients[k].num_samples) if weights == "samples" else 1.0 for k in cohort}
        p = {k: n / sum(count.values()) for k, n in count.items()}
        full = {k: slope(x, fed.clients[k].x.double(), fed.clients[k].y) for k in cohort}
        c = sum(p[k] * full[k] for k in cohort)

        def direction(v, u, y, x=x, m=m, c=c):
            g = slope(v, u, y) - slope(x, u, y) + c if method == "mime" else slope(v, u, y)
            return (1 - share) * g + share * m

        ends = {k: local(x, b, direction) for k, b in cohort.items()}
        new = sum(p[k] * end for k, end in ends.items())
        if method == "fedcm":
            m = (x - new) / sum(p[k] * LR * len(b) for k, b in cohort.items())
        else:
            m = share * m + (1 - share) * c
        x = new
    assert float((result.vector - x).abs().max()) < EXACT


@pytest.mark.parametrize("order", ["mime:beta=0+feddyn:alpha=0.3", "feddyn:alpha=0.3+mime:beta=0"])
def test_mime_corrects_the_gradient_before_the_linear_term_of_feddyn(order):
    """``grad f(theta_k) - grad f(theta) + c - g_k + alpha (theta_k - theta)``, whatever the order written."""
    fed, alpha = skewed(), 0.3
    result, cohorts = run(order, fed=fed)
    x, count = initial(), len(fed.clients)
    h, g = torch.zeros_like(x), [torch.zeros_like(x) for _ in range(count)]
    for cohort in cohorts:
        c = sum(slope(x, client.x.double(), client.y) for client in fed.clients) / count
        ends = []
        for k in range(count):
            g_k = g[k]

            def direction(v, u, y, x=x, c=c, g_k=g_k):
                return slope(v, u, y) - slope(x, u, y) + c - g_k + alpha * (v - x)

            ends.append(local(x, cohort[k], direction))
            g[k] = g[k] - alpha * (ends[-1] - x)
        h = h - alpha * sum(end - x for end in ends) / count
        x = sum(ends) / count - h / alpha
    assert float((result.vector - x).abs().max()) < EXACT


@pytest.mark.parametrize("other", ["scaffold", "fedpvr", "fedcm", "fedsmoo", "mimelite"])
def test_mime_acts_before_rules_that_add_a_vector(other):
    """In the other order, the difference of two gradients would not contain the vector."""
    assert torch.equal(run(f"{other}+mime")[0].vector, run(f"mime+{other}")[0].vector)
    assert not torch.allclose(run(f"{other}+mime")[0].vector, run("mime")[0].vector)


@pytest.mark.parametrize("neutral", ["fedcm:alpha=1", "mimelite:beta=0"])
def test_neutral_options_are_fedavg_bit_for_bit(neutral):
    plain = run("fedavg", client_weighting="uniform")[0]
    assert torch.equal(run(neutral)[0].vector, plain.vector)


@pytest.mark.parametrize("method", ["fedcm:alpha=0.3", "mimelite:beta=0.7"])
def test_one_full_step_of_all_clients_is_gradient_descent_with_momentum(method):
    """Both momenta are then the last step, ``m <- share m + (1 - share) g``."""
    A, b = problem()
    training = Training(local_steps=1, batch_size=100, lr=0.1, precision="fp64")
    x, m = np.zeros(3), np.zeros(3)
    for found in Quadratics(A, b, method, training).rounds(6):
        g = np.mean([gradient(a, y, x) for a, y in zip(A, b, strict=True)], axis=0)
        step = 0.7 * m + 0.3 * g
        x, m = x - 0.1 * step, step
        assert_close(found, x, TRAINING)


@pytest.mark.parametrize("method", ["fedcm", "mimelite"])
def test_equal_clients_are_one(method):
    A, b = problem(sizes=(5,))
    assert_close(Quadratics(A * 3, b * 3, method).rounds(4), Quadratics(A, b, method).rounds(4), TRAINING)


@pytest.mark.parametrize(("method", "extra"), [("fedcm", 1), ("mimelite", 24)])
def test_bytes_are_those_of_the_formula(method, extra):
    """Twice the model down; the model and one number, or the model and a gradient, up."""
    summary = run(method, 0.5)[0].summary
    visits, d = 4 * 2, 24
    assert summary["parameters"] == d
    assert summary["bytes_down"] == visits * 2 * d * 8
    assert summary["bytes_up"] == visits * (d + extra) * 8


@pytest.mark.parametrize("other", ["fedrep", "fedals", "fedbn"])
@pytest.mark.parametrize("method", ["fedcm", "mimelite"])
def test_partial_updates_are_refused(method, other):
    with pytest.raises(MethodConflictError):
        run(f"{method}+{other}")


def test_updates_divided_by_steps_are_refused():
    with pytest.raises(MethodConflictError, match="with fednova clients send something else"):
        run("fedcm+fednova")
