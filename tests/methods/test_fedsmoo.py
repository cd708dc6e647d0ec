"""FedSMOO against a loop over the formula, and in its limits FedDyn and FedSAM with FedDyn."""

import pytest
import torch
from support.batch_loop import SIZES, initial, local, loss, run
from support.tolerance import TRAINING, assert_close

from unskew.errors import MethodConflictError

slope = torch.func.grad(loss)


def scaled(v, length):
    return length * v / v.norm()


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_a_run_is_the_papers_loop(participation, weights):
    rho, lam = 0.3, 0.2
    result, cohorts = run(f"fedsmoo:rho={rho},lam={lam}", participation, client_weighting=weights)
    n = torch.tensor(SIZES if weights == "samples" else [1.0] * 4).double()
    x = initial()
    s = torch.zeros_like(x)
    h, mu = torch.zeros(4, len(x)).double(), torch.zeros(4, len(x)).double()
    for cohort in cohorts:
        ends = {}
        for k, batches in cohort.items():

            def direction(v, u, y, k=k, x=x, s=s):
                e = scaled(slope(v, u, y) - mu[k] - s, rho)
                mu[k] = mu[k] + e - s
                return slope(v + e, u, y) + lam * (v - x + h[k])

            ends[k] = local(x, batches, direction)
            h[k] += ends[k] - x
        chosen = sum(n[k] for k in cohort)
        x = sum(n[k] / chosen * end for k, end in ends.items()) + n @ h / n.sum()
        s = scaled(sum(n[k] / chosen * mu[k] for k in cohort), rho)
    assert float((result.vector - x).abs().max()) < 1e-12


def test_without_perturbation_it_is_feddyn():
    assert_close(run("fedsmoo:rho=0,lam=0.2", 0.5)[0].vector, run("feddyn:alpha=0.2", 0.5)[0].vector, TRAINING)


def test_before_its_duals_move_it_is_fedsam_with_feddyn():
    """One local step from ``mu_k = s = 0``."""
    short = {"rounds": 1, "local_epochs": None, "local_steps": 1}
    one, other = (run(m, **short)[0].vector for m in ("fedsmoo:rho=0.3,lam=0.2", "fedsam:rho=0.3+feddyn:alpha=0.2"))
    assert_close(one, other, TRAINING)


def test_bytes_are_those_of_the_formula():
    summary = run("fedsmoo", 0.5)[0].summary
    visits, d = 4 * 2, 24
    assert summary["bytes_down"] == summary["bytes_up"] == visits * 2 * d * 8


@pytest.mark.parametrize("other", ["fedrep", "fedals", "fedbn"])
def test_partial_updates_are_refused(other):
    with pytest.raises(MethodConflictError):
        run(f"fedsmoo+{other}")
