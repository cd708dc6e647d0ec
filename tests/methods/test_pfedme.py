"""APFL, Per-FedAvg and pFedMe against a loop over the papers' formulas, in closed form, and in their limits."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.batch_loop import DECAY, LR, MOMENTUM, Recorder, client_states, initial, local, loss, run, skewed
from support.quadratic import Quadratics, problem
from support.quadratic import sizes as shares
from support.tolerance import TRAINING, assert_close

from unskew.errors import ConfigError, MethodConflictError
from unskew.methods.perfedavg import PerFedAvg
from unskew.methods.registry import method
from unskew.models.execution import Batch
from unskew.protocol.training_config import Training
from unskew.runs.personal_model_files import load_personal_model

EXACT = 1e-12
PLAIN = {"momentum": 0.0, "weight_decay": 0.0}
SPLIT = {"sizes": (6, 11, 9, 15)}
"""Sizes with batches of at least three samples if ``batch_size`` is 6."""
slope = torch.func.grad(loss)


def mean(models, fed, uniform=False):
    """The mean of clients' models, uniform or weighted by samples."""
    count = {k: 1.0 if uniform else float(fed.clients[k].num_samples) for k in models}
    return sum(n * models[k] for k, n in count.items()) / sum(count.values())


def apfl_client(theta, own, alpha, batches, adaptive, decay):
    """Algorithm 1 of APFL at one client; the global copy has momentum and weight decay, the own model has not."""
    buffer = torch.zeros_like(theta)
    for step, (x, y) in enumerate(batches):
        g = slope(alpha * own + (1 - alpha) * theta, x, y)
        towards = (own - theta) @ g + decay * alpha
        buffer = MOMENTUM * buffer + slope(theta, x, y) + DECAY * theta
        own, theta_next = own - LR * alpha * g, theta - LR * buffer
        if adaptive and step == 0:
            alpha = (alpha - LR * towards).clamp(0, 1)
        theta = theta_next
    return theta, own, alpha


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize(("alpha", "adaptive", "decay"), [(0.4, True, 0.02), (0.9, True, 0.0), (0.3, False, 0.02)])
def test_apfl_is_the_papers_loop(alpha, adaptive, decay, participation, tmp_path):
    fed, expression = skewed(), f"apfl:alpha={alpha},adaptive={str(adaptive).lower()},decay={decay}"
    result, cohorts = run(expression, participation, fed, out=tmp_path / "run")
    x, kept = initial(), {}
    for cohort in cohorts:
        ends = {}
        for k, batches in cohort.items():
            own, weight = kept[k][1:] if k in kept else (x, torch.tensor(alpha, dtype=torch.float64))
            kept[k] = apfl_client(x, own, weight, batches, adaptive, decay)
            ends[k] = kept[k][0]
        x = mean(ends, fed)
    assert float((result.vector - x).abs().max()) < EXACT
    states = client_states(tmp_path / "run")
    assert set(states) == set(kept)
    for k, (theta, own, weight) in kept.items():
        assert float((states[k]["rules/apfl/v"] - own).abs().max()) < EXACT
        assert abs(float(states[k]["rules/apfl/alpha"] - weight)) < EXACT
        mixture = weight * own + (1 - weight) * theta
        assert float((states[k]["rules/apfl/personal"] - mixture).abs().max()) < EXACT


def test_apfl_leaves_the_global_model_of_fedavg_bit_for_bit():
    assert torch.equal(run("apfl", 0.5)[0].vector, run("fedavg", 0.5)[0].vector)


def test_apfl_between_fedavgs_local_models_and_training_alone(tmp_path):
    fed = skewed()
    _, cohorts = run("apfl:alpha=0,adaptive=false", 1.0, fed, out=tmp_path / "zero")
    x = initial()
    for cohort in cohorts:
        ends = {k: local(x, batches, slope) for k, batches in cohort.items()}
        x = mean(ends, fed)
    for k, tensors in client_states(tmp_path / "zero").items():
        assert float((tensors["rules/apfl/personal"] - ends[k]).abs().max()) < EXACT
    _, cohorts = run("apfl:alpha=1,adaptive=false", 1.0, fed, out=tmp_path / "one")
    for k, tensors in client_states(tmp_path / "one").items():
        alone = local(initial(), [b for cohort in cohorts for b in cohort[k]], slope, momentum=0.0, decay=0.0)
        assert float((tensors["rules/apfl/personal"] - alone).abs().max()) < EXACT


def test_apfls_weight_falls_for_equal_clients_and_rises_for_contradicting_ones():
    one, training = np.ones((1, 1)), Training(local_steps=3, batch_size=100, lr=0.1, precision="fp64")
    for targets, rises in (((1.0, 1.0), False), ((1.0, -1.0), True)):
        federated = Quadratics([one, one], [np.array([t]) for t in targets], "apfl:decay=0", training)
        weights = [0.5]
        for _ in range(5):
            federated.rounds(1)
            weights.append(float(federated.server.clients.store.get(0)["rules/apfl/alpha"]))
        steps = np.diff(weights)[1:]  # in the first round the own model is the global one
        assert weights[1] == 0.5
        assert (steps > 0).all() if rises else (steps < 0).all()


def pfedme_client(theta, batches, lam, K, eta_p, decay):
    """Algorithm 1 of pFedMe at one client."""
    w, t = theta, theta
    for x, y in batches:
        for _ in range(K):
            t = t - eta_p * (slope(t, x, y) + lam * (t - w) + decay * t)
        w = w - LR * lam * (w - t)
    return w, t


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("beta", [1, 1.5])
def test_pfedme_is_the_papers_loop(beta, participation, tmp_path):
    fed, expression = skewed(), f"pfedme:lam=2,K=3,eta_p=0.1,decay=0.01,beta={beta}"
    result, cohorts = run(expression, participation, fed, out=tmp_path / "run", **PLAIN)
    x, personal = initial(), {}
    for cohort in cohorts:
        ends = {}
        for k, batches in cohort.items():
            ends[k], personal[k] = pfedme_client(x, batches, 2, 3, 0.1, 0.01)
        x = (1 - beta) * x + beta * mean(ends, fed)
    assert float((result.vector - x).abs().max()) < EXACT
    states = client_states(tmp_path / "run")
    assert set(states) == set(personal)
    for k, t in personal.items():
        assert float((states[k]["rules/pfedme/personal"] - t).abs().max()) < EXACT


def test_pfedme_is_fedavg_if_the_local_model_follows_at_once_and_still_without_the_pull():
    follows = run("pfedme:lam=5,K=1,eta_p=0.07,decay=0", 0.5, **PLAIN)[0]  # lr lam = 1
    assert float((follows.vector - run("fedavg", 0.5, lr=0.07, **PLAIN)[0].vector).abs().max()) < EXACT
    with pytest.warns(UserWarning, match="The model did not change"):
        still = run("pfedme:lam=0", **PLAIN)[0]
    assert torch.equal(still.vector, initial())


@pytest.mark.slow  # long training to convergence
def test_pfedme_finds_the_minimum_of_the_moreau_envelopes():
    """``grad F_k = M_k (H_k x - c_k)`` with ``M_k = lam (H_k + lam)^-1``; the personal models are proximal points."""
    A, b = problem()
    lam, eye = 2.0, np.eye(3)
    H = [a.T @ a / len(a) for a in A]
    c = [a.T @ y / len(a) for a, y in zip(A, b, strict=True)]
    M = [lam * np.linalg.inv(h + lam * eye) for h in H]
    p = shares(A)
    left = sum(w * m @ h for w, m, h in zip(p, M, H, strict=True))
    best = np.linalg.solve(left, sum(w * m @ q for w, m, q in zip(p, M, c, strict=True)))
    training = Training(local_steps=1, batch_size=100, lr=1.5, precision="fp64")
    federated = Quadratics(A, b, "pfedme:lam=2,K=40,eta_p=0.25,decay=0", training)
    federated.rounds(100)
    assert_close(federated.server.state.v.numpy(), best, TRAINING)
    for k, (h, q) in enumerate(zip(H, c, strict=True)):
        point = np.linalg.solve(h + lam * eye, q + lam * best)
        assert_close(federated.server.clients.store.get(k)["rules/pfedme/personal"].numpy(), point, TRAINING)


@pytest.mark.parametrize("first", ["apfl", "pfedme", "perfedavg"])
@pytest.mark.parametrize("other", ["scaffold", "feddyn", "fedcm", "fedpvr"])
def test_corrections_of_the_local_model_apply_once_per_step_in_any_order(first, other):
    assert [rule.name for rule in method(f"{other}+{first}").client] == [first, other]


def test_the_step_of_pfedme_has_the_correction_of_scaffold_once(tmp_path):
    """``lam (w - t) + c - c_k`` with full participation, from Algorithm 1 of both papers."""
    fed, lam, K, eta_p = skewed(), 5.0, 3, 0.05
    result, cohorts = run(f"scaffold+pfedme:lam={lam},K={K},eta_p={eta_p},decay=0", fed=fed, **PLAIN)
    x, count = initial(), len(fed.clients)
    c, c_k = torch.zeros_like(x), [torch.zeros_like(x) for _ in range(count)]
    for cohort in cohorts:
        ends, new = [], []
        for k in range(count):
            w, t = x, x
            for u, y in cohort[k]:
                for _ in range(K):
                    t = t - eta_p * (slope(t, u, y) + lam * (t - w))
                w = w - LR * (lam * (w - t) + c - c_k[k])
            ends.append(w)
            new.append((x - w) / (LR * len(cohort[k])) - (c - c_k[k]))
        c = c + sum(after - before for after, before in zip(new, c_k, strict=True)) / count
        x, c_k = sum(ends) / count, new
    assert float((result.vector - x).abs().max()) < EXACT


def perfedavg_client(v, batches, version, alpha, beta, delta):
    """Algorithm 1 of Per-FedAvg at one client."""
    for x, y in batches:
        size = len(y) // (2 if version == "fo" else 3)
        first, second, third = ((x[i * size : (i + 1) * size], y[i * size : (i + 1) * size]) for i in range(3))
        g = slope(v - alpha * slope(v, *first), *second)
        if version == "hf":
            g = g - alpha * (slope(v + delta * g, *third) - slope(v - delta * g, *third)) / (2 * delta)
        v = v - beta * g
    return v


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize(("version", "alpha"), [("fo", 0.15), ("fo", None), ("fo", 0), ("hf", 0.15)])
def test_perfedavg_is_the_papers_loop(version, alpha, participation, tmp_path):
    """With ``alpha = 0`` this is FedAvg on the second halves of the batches."""
    fed, recorder = skewed(**SPLIT), Recorder()
    option = ("" if alpha is None else f",alpha={alpha}") + (",delta=0.01" if version == "hf" else "")
    result, cohorts = run(
        f"perfedavg:version={version},beta=0.3,steps=2{option}", participation, fed, recorder=recorder,
        outermost=True, batch_size=6, out=tmp_path / "run", **PLAIN,
    )  # fmt: skip
    rate = LR if alpha is None else alpha
    x = initial()
    for cohort in cohorts:
        ends = {k: perfedavg_client(x, batches, version, rate, 0.3, 0.01) for k, batches in cohort.items()}
        x = mean(ends, fed, uniform=True)
    assert float((result.vector - x).abs().max()) < EXACT
    assert len(recorder.final) == 4
    for k, batches in enumerate(recorder.final):
        v = x
        for batch in batches[:2]:
            v = v - rate * slope(v, *batch)
        assert float((load_personal_model(tmp_path / "run", k)[0] - v).abs().max()) < EXACT


def test_perfedavgs_direction_on_a_quadratic():
    torch.manual_seed(0)
    H = torch.randn(4, 4, dtype=torch.float64)
    H, v = H @ H.T, torch.randn(4, dtype=torch.float64)

    def grad_fn(v, batch):
        return H @ v - batch.x.mean(0)

    batch = Batch(torch.randn(6, 4, dtype=torch.float64), torch.zeros(6), torch.tensor(0), torch.tensor(0), lr=0.1)
    ctx = SimpleNamespace(final=False, training=Training(lr=0.1))
    found = PerFedAvg(version="hf", alpha=0.3, beta=0.1).gradient(grad_fn, ctx, {})(v, batch)
    t = v - 0.3 * (H @ v - batch.x[:2].mean(0))
    g = H @ t - batch.x[2:4].mean(0)
    assert float((found - (g - 0.3 * H @ g)).abs().max()) < 1e-8


@pytest.mark.parametrize(("version", "power"), [("fo", 1), ("hf", 2)])
def test_perfedavg_serves_clients_of_unlike_curvature_after_one_step(version, power):
    """With ``f_k = c_k / 2 (x - b_k)^2``, it finds the mean of ``b_k`` with weights ``c_k (1 - alpha c_k)^power``."""
    c, b, alpha = np.array([2.0, 0.5]), np.array([1.0, -1.0]), 0.3
    A = [np.full((6, 1), np.sqrt(k)) for k in c]
    targets = [np.full(6, np.sqrt(k) * y) for k, y in zip(c, b, strict=True)]
    training = Training(local_steps=1, batch_size=100, lr=0.1, precision="fp64")
    meta = Quadratics(A, targets, f"perfedavg:version={version},alpha={alpha},beta=0.5", training).rounds(300)[-1]
    plain = Quadratics(A, targets, "fedavg", training, weights="uniform").rounds(300)[-1]
    weights = c * (1 - alpha * c) ** power
    assert_close(meta, [weights @ b / weights.sum()], TRAINING)
    assert_close(plain, [c @ b / c.sum()], TRAINING)

    def loss_after_a_step(x):
        t = x - alpha * c * (x - b)
        return (c * (t - b) ** 2).mean()

    assert loss_after_a_step(meta) < loss_after_a_step(plain)


def test_perfedavg_rejects_batches_that_cannot_be_split_and_too_many_steps():
    for version, option in (("fo", {}), ("hf", {"batch_size": 7})):
        with pytest.raises(ConfigError, match="the last batch of client"):
            run(f"perfedavg:version={version}", **PLAIN, **option)
    few = {"fed": skewed(sizes=(8, 2, 9)), "batch_size": 8, "drop_last": True}
    with pytest.raises(ConfigError, match=r"3 parts, but client 1 has fewer training samples \(2\).*larger min"):
        run("perfedavg:version=hf", **few, **PLAIN)
    with pytest.raises(ConfigError, match=r"2 parts, but batch_size is 1\. Set batch_size=2 or more"):
        run("perfedavg", drop_last=True, batch_size=1, **PLAIN)
    with pytest.raises(ConfigError, match="perfedavg:steps=3 is more than the local steps of client 0"):
        run("perfedavg:steps=3", fed=skewed(**SPLIT), batch_size=6, **PLAIN)


@pytest.mark.parametrize("option", [{"momentum": 0.5}, {"weight_decay": 0.1}, {"optimizer": "adam"}])
@pytest.mark.parametrize("name", ["pfedme", "perfedavg"])
def test_other_optimizers_are_rejected(name, option):
    with pytest.raises(ConfigError, match=f"{name} supports only plain SGD"):
        run(name, **{**PLAIN, **option})


@pytest.mark.parametrize(("name", "extra"), [("apfl", PLAIN), ("pfedme", PLAIN), ("perfedavg", PLAIN)])
def test_bytes_are_those_of_fedavg(name, extra):
    options = {"fed": skewed(**SPLIT), "batch_size": 6, **extra}
    summary, visits, d = run(name, 0.5, **options)[0].summary, 4 * 2, 24
    assert summary["bytes_down"] == summary["bytes_up"] == visits * d * 8


@pytest.mark.parametrize("other", ["ditto", "ft", "fedbabu"])
@pytest.mark.parametrize("name", ["apfl", "pfedme", "perfedavg"])
def test_a_client_has_one_personal_model(name, other):
    for expression in (f"{name}+{other}", f"{other}+{name}"):
        with pytest.raises(MethodConflictError, match="both define a client's personal model"):
            method(expression)
