"""FedLESAM against loops over the paper's formula, and in its limits."""

import numpy as np
import pytest
import torch
from support.batch_loop import BODY, LR, average, client_states, flat, initial, local, loss, run, skewed, two_layers
from support.quadratic import LR as STEP
from support.quadratic import Quadratics, gradient, problem
from support.tolerance import MAGNIFIED, assert_close

from unskew.errors import MethodConflictError
from unskew.methods.registry import COMPOSITIONS, method
from unskew.protocol.training_config import Training

EXACT = 1e-12
slope = torch.func.grad(loss)


def perturbation(old, x, rho):
    """The perturbation of a client that received ``old`` before; None before its first round."""
    return torch.zeros_like(x) if old is None else rho * (old - x) / torch.linalg.vector_norm(old - x)


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_a_run_is_the_papers_loop(participation, tmp_path):
    result, cohorts = run("fedlesam:rho=0.3", participation, rounds=8, out=tmp_path / "run")
    x, old, fed = initial(), {}, skewed()
    for cohort in cohorts:
        ends = {}
        for k, batches in cohort.items():
            e = perturbation(old.get(k), x, 0.3)
            ends[k], old[k] = local(x, batches, lambda v, u, y, e=e: slope(v + e, u, y)), x
        x = average(fed, ends)
    assert float((result.vector - x).abs().max()) < EXACT
    states = client_states(tmp_path / "run")
    assert all(float((states[k]["rules/fedlesam/start"] - v).abs().max()) < EXACT for k, v in old.items())


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_with_scaffold_the_correction_is_added_to_the_gradient_at_the_perturbed_point(participation):
    rounds, clients = 6, len(skewed().clients)
    expression = "fedlesam:rho=0.5+scaffold"
    assert COMPOSITIONS["fedlesam-s"][0] == expression
    options = {"client_weighting": "uniform", "momentum": 0.0, "weight_decay": 0.0, "rounds": rounds}
    result, cohorts = run(expression, participation, **options)
    assert torch.equal(result.vector, run("fedlesam-s", participation, **options)[0].vector)
    x, old = initial(), {}
    c, c_k = torch.zeros_like(x), {k: torch.zeros_like(x) for k in range(clients)}
    for cohort in cohorts:
        ends, change = {}, torch.zeros_like(x)
        for k, batches in cohort.items():
            e, shift = perturbation(old.get(k), x, 0.5), c - c_k[k]
            ends[k] = local(x, batches, lambda v, u, y, e=e, s=shift: slope(v + e, u, y) + s, LR, 0, 0)
            new = c_k[k] - c + (x - ends[k]) / (len(batches) * LR)
            change, c_k[k], old[k] = change + (new - c_k[k]) / clients, new, x
        x, c = torch.stack(list(ends.values())).mean(0), c + change
    assert float((result.vector - x).abs().max()) < EXACT


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_with_feddyn_the_regularization_is_that_of_the_unperturbed_model(participation):
    rounds, clients, alpha = 6, len(skewed().clients), 0.1
    options = {"momentum": 0.0, "weight_decay": 0.0, "rounds": rounds}
    result, cohorts = run("fedlesam-d", participation, **options)
    x, old = initial(), {}
    h, g = torch.zeros_like(x), {k: torch.zeros_like(x) for k in range(clients)}
    for cohort in cohorts:
        ends = {}
        for k, batches in cohort.items():
            e = perturbation(old.get(k), x, 0.1)

            def direction(v, u, y, e=e, g=g[k], x=x):
                return slope(v + e, u, y) - g + alpha * (v - x)

            ends[k], old[k] = local(x, batches, direction, LR, 0, 0), x
            g[k] = g[k] - alpha * (ends[k] - x)
        h = h - alpha / clients * sum(v - x for v in ends.values())
        x = torch.stack(list(ends.values())).mean(0) - h / alpha
    assert float((result.vector - x).abs().max()) < EXACT


def test_without_radius_and_in_the_first_round_it_is_fedavg():
    assert torch.equal(run("fedlesam:rho=0")[0].vector, run("fedavg")[0].vector)
    assert torch.equal(run("fedlesam", rounds=1)[0].vector, run("fedavg", rounds=1)[0].vector)
    assert not torch.equal(run("fedlesam", rounds=2)[0].vector, run("fedavg", rounds=2)[0].vector)


def test_one_step_on_quadratics_goes_uphill_first():
    """All clients take one full step on least squares: the mean gradient at ``v + e`` decides the second round."""
    A, b = problem()
    training = Training(local_steps=1, batch_size=100, lr=STEP, precision="fp64")
    found = Quadratics(A, b, "fedlesam:rho=0.4", training, weights="uniform").rounds(2)
    zero = np.zeros(3)
    first = zero - STEP * np.mean([gradient(a, y, zero) for a, y in zip(A, b, strict=True)], axis=0)
    e = 0.4 * (zero - first) / np.linalg.norm(zero - first)
    second = first - STEP * np.mean([gradient(a, y, first + e) for a, y in zip(A, b, strict=True)], axis=0)
    assert_close(found[0], first, MAGNIFIED)
    assert_close(found[1], second, MAGNIFIED)


def test_with_fedals_it_does_not_perturb_the_part_that_is_not_received(tmp_path):
    """The body is received in the rounds 0 and 2 only: the perturbation of round 1 changes the head alone."""
    runs = []
    for rounds in (2, 3):
        given = {"model": two_layers(), "out": tmp_path / str(rounds), "rounds": rounds}
        run("fedlesam+fedals:alpha=2", **given)
        runs.append(client_states(tmp_path / str(rounds)))
    for k, state in runs[0].items():
        assert torch.equal(state["rules/fedlesam/start"][BODY], flat(two_layers())[BODY])
        assert not torch.equal(runs[1][k]["rules/fedlesam/start"][BODY], state["rules/fedlesam/start"][BODY])


def test_it_sends_the_model_only():
    summary = run("fedlesam", 0.5)[0].summary
    assert summary["bytes_down"] == summary["bytes_up"] == 4 * 2 * summary["parameters"] * 8


@pytest.mark.parametrize("expression", ["fedala+fedlesam", "fedlesam+fedala", "fedas+fedlesam", "fedlesam+fedas"])
def test_the_received_model_is_stored_if_another_rule_starts_training_from_its_own(expression, tmp_path):
    model = two_layers()
    received = run(expression, model=model, rounds=3)[0].vector
    run(expression, model=model, rounds=4, out=tmp_path / "run")
    shared = slice(None) if "fedala" in expression else BODY
    for state in client_states(tmp_path / "run").values():
        assert float((state["rules/fedlesam/start"] - received)[shared].abs().max()) < EXACT


@pytest.mark.parametrize("other", ["fedamp", "fedfomo", "fedproto", "fedtgp", "fedgh"])
def test_methods_in_which_clients_receive_no_model_are_rejected(other):
    for expression in (f"fedlesam+{other}", f"{other}+fedlesam"):
        with pytest.raises(MethodConflictError, match=f"with {other} it receives none"):
            method(expression)


@pytest.mark.parametrize("other", ["ifca", "flora", "heterofl", "fedrolex"])
def test_methods_that_send_another_model_in_every_round_are_rejected(other):
    for expression in (f"fedlesam+{other}", f"{other}+fedlesam"):
        with pytest.raises(MethodConflictError, match=f"with {other} they are not the same part"):
            method(expression)
