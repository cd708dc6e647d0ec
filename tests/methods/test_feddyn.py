"""FedDyn, FedPVR and Ditto against NumPy."""

import numpy as np
import pytest
import torch
from support.federations import SmallBatchNorm, blobs
from support.protocol import state_at
from support.quadratic import LR, STEPS, Quadratics, gradient, optimum, problem, sizes
from support.tolerance import MAGNIFIED, TRAINING, assert_close
from torch import nn

import unskew
from unskew.protocol.training_config import Training


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_feddyn_equals_the_papers_algorithm(participation):
    A, b = problem()
    alpha, K = 0.3, 4
    run = Quadratics(A, b, f"feddyn:alpha={alpha}", participation=participation)
    x, h, g = np.zeros(3), np.zeros(3), np.zeros((K, 3))
    for t, found in enumerate(run.rounds(6)):
        moved = {}
        for k in run.sampler.draw(t):
            v = x.copy()
            for _ in range(STEPS):
                v -= LR * (gradient(A[k], b[k], v) - g[k] + alpha * (v - x))
            g[k] -= alpha * (v - x)
            moved[k] = v
        h = h - alpha / K * sum(v - x for v in moved.values())
        x = np.mean(list(moved.values()), axis=0) - h / alpha
        assert_close(found, x, MAGNIFIED)
    assert_close(run.server.state.server_rule["h"], g.mean(0), MAGNIFIED)


@pytest.mark.parametrize(("before", "after"), [("feddyn:alpha=0.1", "feddyn:alpha=1"), ("fedsmoo:lam=1", "fedsmoo")])
def test_with_another_strength_the_states_of_clients_and_server_start_anew_together(before, after, tmp_path):
    """Else ``h = sum_k p_k g_k`` would not hold, and the run would converge to another model."""
    fed = blobs((9, 14, 20))
    options = {"local_steps": 2, "batch_size": 50, "lr": 0.1, "precision": "fp64", "engine": "inline"}
    first = unskew.run(fed, model="logistic", method=before, rounds=3, out=tmp_path / "a", **options)
    found = unskew.run(fed, model="logistic", method=after, rounds=5, start_from=str(tmp_path / "a"), **options)
    fresh = unskew.run(fed, model=first.model, method=after, rounds=2, **options)  # batches are whole data sets
    assert_close(found.vector, fresh.vector, TRAINING)
    control = unskew.run(fed, model="logistic", method=before, rounds=5, start_from=str(tmp_path / "a"), **options)
    assert_close(control.vector, unskew.run(fed, model="logistic", method=before, rounds=5, **options).vector, TRAINING)


@pytest.mark.slow
def test_feddyn_reaches_the_optimum():
    A, b = problem(sizes=(6, 6, 6, 6))
    best = optimum(A, b, np.full(4, 0.25))
    training = Training(local_steps=10, batch_size=100, lr=0.3, precision="fp64")
    found = Quadratics(A, b, "feddyn:alpha=1", training).rounds(40)[-1]
    assert np.linalg.norm(found - best) < 1e-6


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize(
    ("chosen", "own", "mean"),
    [("scaffold", "c", "c"), ("scaffold:option=I", "c", "c"), ("fedpvr", "c", "c"), ("feddyn:alpha=1", "g", "h")],
)
def test_the_servers_variate_is_the_mean_that_the_weights_name(chosen, own, mean, weights):
    """The mean over all clients, of whom some were absent: what rests only at the objective's optimum."""
    A, b = problem(sizes=(6, 18, 9, 27))
    run = Quadratics(A, b, chosen, weights=weights, participation=0.5)
    run.rounds(5)
    name, share = run.method.name, sizes(A) if weights == "samples" else np.full(4, 0.25)
    states = [state_at(run.server, k).rules.get(name, {}) for k in range(4)]
    kept = np.array([state[own].numpy() if own in state else np.zeros(3) for state in states])
    found = run.server.state.server_rule[mean] if name == "feddyn" else run.server.state.rules[name][mean]
    assert_close(found, share @ kept, TRAINING)
    assert np.linalg.norm(sizes(A) @ kept - kept.mean(0)) > 1e-3


def train(method, **options):
    torch.manual_seed(0)
    given = {"rounds": 4, "lr": 0.05, "batch_size": 8, "precision": "fp64", "participation": 0.7, "engine": "inline"}
    return unskew.run(blobs([12, 23, 17, 9]), model=SmallBatchNorm(), method=method, **{**given, **options})


@pytest.mark.parametrize("wrapped", [True, False], ids=["in a sequence", "bare"])
def test_fedpvr_on_a_model_that_is_only_a_head_is_scaffold(wrapped):
    given = {"rounds": 4, "precision": "fp64", "lr": 0.1, "participation": 0.7, "engine": "inline"}
    draws = np.random.default_rng(0)
    clients = [(draws.normal(size=(n, 4)), draws.integers(0, 3, n)) for n in (12, 23, 17, 9)]
    fed = unskew.Federation.from_arrays(clients, test=clients[0], classes=3)
    linear = nn.Linear(4, 3)
    model = nn.Sequential(linear) if wrapped else linear
    scaffold, fedpvr = (unskew.run(fed, model=model, method=m, **given) for m in ("scaffold", "fedpvr"))
    assert_close(fedpvr.vector, scaffold.vector, TRAINING)
    extra = [s.summary["bytes_up"] for s in (scaffold, fedpvr)]
    assert extra[0] == extra[1]


@pytest.mark.parametrize(("spelling", "first"), [("fedpvr", 0), ("fedpvr:layers=1", 365), ("fedpvr:layers=2", 0)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fedpvr_equals_the_papers_algorithm(spelling, first, momentum):
    """Variates on the last linear layers only; 360 and 5 numbers of the first layer, 15 and 3 of the second."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(72, 5), nn.Tanh(), nn.Linear(5, 3))
    fed, lr, steps = blobs([12, 23, 17, 9]), 0.1, 3
    x = torch.cat([p.detach().flatten() for p in net.parameters()]).double()
    chosen = (torch.arange(383) >= first).double()

    def loss(v, data):
        h = torch.tanh(data.x.double().flatten(1) @ v[:360].view(5, 72).T + v[360:365])
        return nn.functional.cross_entropy(h @ v[365:380].view(3, 5).T + v[380:], data.y)

    c, c_k = torch.zeros(383).double(), torch.zeros(4, 383).double()
    for _ in range(4):
        ends, new = [], torch.zeros_like(c_k)
        for k in range(4):
            y, buffer = x.clone(), torch.zeros_like(x)
            for _ in range(steps):
                g = torch.func.grad(loss)(y, fed.clients[k])
                new[k] += chosen * g / steps
                buffer = momentum * buffer + g + chosen * (c - c_k[k])
                y = y - lr * buffer
            ends.append(y)
        c, c_k, x = c + (new - c_k).mean(0), new, torch.stack(ends).mean(0)
    given = {"rounds": 4, "lr": lr, "local_steps": steps, "batch_size": 100, "precision": "fp64", "engine": "inline"}
    found = unskew.run(fed, model=net, method=spelling, momentum=momentum, **given).vector
    assert_close(found, x, MAGNIFIED)


def test_fedpvr_pays_for_the_classifier_only():
    plain, pvr, full = train("fedavg"), train("fedpvr"), train("scaffold")
    head = 16 * 3 + 3
    cohorts = sum(row["cohort"] for row in plain.history)
    assert pvr.summary["bytes_up"] - plain.summary["bytes_up"] == cohorts * head * 8
    assert full.summary["bytes_up"] - plain.summary["bytes_up"] == cohorts * plain.summary["parameters"] * 8
    uniform = train("fedavg", client_weighting="uniform", rounds=1)
    assert_close(train("fedpvr", rounds=1).vector, uniform.vector, TRAINING)
    assert not torch.allclose(pvr.vector, train("fedavg", client_weighting="uniform").vector)


DITTO = "ditto:lam=0.4"
ALONE = {
    DITTO: "fedavg",
    **{f"{DITTO}+{other}": other for other in ("fedsam:rho=0.5", "fedlesam", "fedsmoo")},
    **{f"{other}+{DITTO}": other for other in ("scaffold", "feddyn:alpha=0.3", "fedcm")},
}
"""Compositions with Ditto, and the method of the global model."""


@pytest.mark.parametrize("expression", ALONE)
def test_dittos_personal_models_equal_numpy_and_leave_the_global_path_alone(expression):
    """Also if other rules compute further gradients in a step, or add corrections to those of the global model."""
    A, b = problem()
    lam = 0.4
    run, plain = Quadratics(A, b, expression), Quadratics(A, b, ALONE[expression])
    xs = [np.zeros(3), *plain.rounds(3)]
    assert_close(run.rounds(3), xs[1:], TRAINING)
    for k in range(4):
        v = np.zeros(3)
        for t in range(3):
            for _ in range(STEPS):
                v = v - LR * (gradient(A[k], b[k], v) + lam * (v - xs[t]))
        assert_close(state_at(run.server, k).rules["ditto"]["personal"], v, TRAINING)


@pytest.mark.slow
def test_dittos_personal_models_serve_their_clients_better_than_the_global_one():
    torch.manual_seed(0)
    fed = blobs([40, 40, 40], skew=True)
    given = {"rounds": 8, "lr": 0.05, "local_steps": 10, "engine": "inline"}
    result = unskew.run(fed, model=SmallBatchNorm(dropout=0.0), method="ditto:lam=0.01", **given)
    assert result.summary["personal_accuracy_mean"] > result.summary["client_accuracy_mean"]
    assert "personal_accuracy_mean" not in train("fedavg").summary


def test_methods_of_a_comparison_share_data_cohorts_and_initial_model():
    given = {"rounds": 3, "clients": 6, "participation": 0.5, "model": "logistic", "engine": "inline", "seeds": 2}
    both = unskew.compare(methods=["fedavg", "fedprox:mu=0"], **given)
    for mine, theirs in zip(*both.histories.values(), strict=True):
        assert [row["accuracy"] for row in mine] == [row["accuracy"] for row in theirs]
        assert [row["train_loss"] for row in mine] == [row["train_loss"] for row in theirs]
    hashes = [[s["partition_hash"] for s in group] for group in both.summaries.values()]
    assert hashes[0] == hashes[1]
    assert hashes[0][0] != hashes[0][1]
