"""Floco against a loop over the paper's formulas, its projection against other solvers, and its limits."""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.decomposition import PCA
from support.batch_loop import (
    BODY,
    CLASSES,
    DECAY,
    FEATURES,
    HIDDEN,
    LR,
    MOMENTUM,
    OPTIONS,
    average,
    check_client_models,
    features,
    local,
    run,
    skewed,
    two_layers,
)
from torch import nn
from torch.nn.functional import cross_entropy

import unskew
from unskew.errors import ConfigError
from unskew.methods.floco import SimplexHead, principal_components, project_to_simplex, simplex_points
from unskew.methods.registry import method
from unskew.seeding import fold, uniform

EXACT = 1e-12
M, RHO, TAU = 3, 0.4, 2
HEADS = slice(BODY.stop, BODY.stop + M * CLASSES * HIDDEN)
BIAS = slice(HEADS.stop, HEADS.stop + CLASSES)
POINT = slice(BIAS.stop, BIAS.stop + M)
SHARED = torch.arange(POINT.stop) < POINT.start
METHOD = f"floco:endpoints={M},tau={TAU},rho={RHO}"


def objective(v, alpha, x, y):
    head = sum(alpha[j] * v[HEADS].view(M, CLASSES, HIDDEN)[j] for j in range(M))
    return cross_entropy(features(v, x) @ head.T + v[BIAS], y)


class Keys(unskew.ClientRule):
    """Records the keys of the batches."""

    name, summary, paper = "keys", "records keys", "none"

    def __init__(self):
        self.keys = []

    def gradient(self, grad_fn, ctx, carry):
        def recorded(v, batch):
            self.keys.append(batch.key.clone())
            return grad_fn(v, batch)

        return recorded


def drawn(key, point):
    """The point of a batch, by the paper's formulas."""
    key = fold(key, 11)
    u = uniform(fold(key, 0), (M,)).double()
    if point is None:
        e = -torch.log(1 - u)
        return e / e.sum()
    signed = 2 * u - 1
    return point + RHO * uniform(fold(key, 1), ()).double() * signed / signed.abs().sum()


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_a_run_is_the_papers_loop(participation, tmp_path):
    keys = Keys()
    result, cohorts = run([keys, method(METHOD).rules[0]], participation, model=two_layers(), out=tmp_path / "run")
    begin = run(METHOD, model=two_layers(), rounds=1, lr=1e-30, weight_decay=0.0)[0].vector
    assert torch.equal(begin[POINT], torch.full((M,), 1 / M).double())
    slope, fed, x, own, last, points = torch.func.grad(objective), skewed(), begin, {}, {}, {}
    draws = iter(keys.keys)
    for t, cohort in enumerate(cohorts):
        for k, batches in cohort.items():
            point = points.get(k, torch.full((M,), 1 / M).double()) if t >= TAU else None
            v = torch.where(SHARED, x, own.get(k, begin))
            v[POINT] = v[POINT] if point is None else point

            def direction(v, u, y, point=point):
                return torch.where(SHARED, slope(v, drawn(next(draws), point), u, y), -DECAY * v)

            own[k] = local(v, batches, direction, LR, MOMENTUM, DECAY)
            last[k] = (own[k] - x)[HEADS]
        x = torch.where(SHARED, average(fed, {k: own[k] for k in cohort}), begin)
        if t + 1 == TAU:
            known = sorted(last)
            points = dict(zip(known, simplex_points(torch.stack([last[k] for k in known]), M), strict=True))
    assert float((result.vector - x).abs().max()) < EXACT
    check_client_models(tmp_path / "run", own)
    assert any(float((v[POINT] - 1 / M).abs().max()) > 0.1 for v in own.values())


@pytest.mark.parametrize("other", ["feddecorr", "feduv", "moon", "fedlc"])
def test_other_terms_of_the_loss_belong_to_the_drawn_point_in_any_order(other):
    """One pass over the batch updates the buffers: after a step, they are the momentum times the statistics of the batch."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))
    options = {"rounds": 1, "local_steps": 1, "batch_size": 100, "precision": "fp64", "engine": "inline"}
    fed = skewed()
    results = [unskew.run(fed, model=model, method=m, **options) for m in (f"{METHOD}+{other}", f"{other}+{METHOD}")]
    assert torch.equal(results[0].vector, results[1].vector)
    inputs = {k: model[0].double()(client.x.double()).detach() for k, client in enumerate(fed.clients)}
    mean = average(fed, {k: 0.1 * a.mean(0) for k, a in inputs.items()})
    for result in results:
        assert float((result.model[1].running_mean - mean).abs().max()) < EXACT


def test_one_endpoint_is_fedavg_bit_for_bit():
    plain = run("fedavg", model=two_layers())[0].vector
    assert torch.equal(run("floco:endpoints=1", model=two_layers())[0].vector[:-1], plain)


def test_the_gradient_of_an_endpoint_is_that_of_the_head_times_its_share():
    head, alpha = SimplexHead(nn.Linear(HIDDEN, CLASSES).double(), M), torch.tensor([0.5, 0.2, 0.3]).double()
    head.alpha.data.copy_(alpha)
    x, y = torch.randn(5, HIDDEN).double(), torch.randint(CLASSES, (5,))
    w = torch.einsum("m,mcf->cf", alpha, head.endpoints.detach()).requires_grad_()
    cross_entropy(head(x), y).backward()
    cross_entropy(x @ w.T + head.bias.detach(), y).backward()
    assert float((head.endpoints.grad - alpha[:, None, None] * w.grad).abs().max()) < EXACT


def test_principal_components_are_those_of_scikit_learn_up_to_signs():
    updates = torch.from_numpy(np.random.default_rng(0).normal(size=(9, 20)))
    scores, pca = principal_components(updates, 4), PCA(4, svd_solver="full")
    expected = pca.fit_transform(updates.numpy())
    signs = np.sign(pca.components_[np.arange(4), np.abs(pca.components_).argmax(1)])
    assert np.abs(scores.numpy() - expected * signs).max() < EXACT * 100
    assert not principal_components(updates[:2], 4)[:, 2:].any()  # fewer clients than components


def test_the_projection_is_the_nearest_point_of_the_simplex():
    points = np.random.default_rng(1).normal(size=(6, 3))
    for z in (0.3, 1.0):
        projected = project_to_simplex(torch.from_numpy(points), z).numpy()
        for point, mine in zip(points, projected, strict=True):
            limits = {"type": "eq", "fun": lambda b, z=z: b.sum() - z}
            best = minimize(lambda b, p=point: ((b - p) ** 2).sum(), np.full(3, z / 3), bounds=[(0, None)] * 3,
                            constraints=limits, tol=1e-14).x  # fmt: skip
            assert np.abs(mine - best).max() < 1e-6


def test_the_points_have_the_smallest_energy_of_all_sizes_of_the_simplex():
    updates = torch.from_numpy(np.random.default_rng(2).normal(size=(5, 7)))

    def energy(points):
        pairs = itertools.combinations(points.numpy(), 2)
        return np.mean([max(np.linalg.norm(a - b), 1e-4) ** -2 for a, b in pairs])

    chosen, scores = simplex_points(updates, 3), principal_components(updates, 3)
    assert torch.allclose(chosen.sum(1), torch.ones(5).double())
    assert bool((chosen >= 0).all())
    energies = []
    for z in np.linspace(1e-4, 1, 1000):
        points = project_to_simplex(scores, z)
        energies.append(energy(points / points.sum(1, keepdim=True)))
    assert energy(chosen) == pytest.approx(min(energies), rel=1e-9)
    assert max(energies) > 1.01 * min(energies)


def test_bytes_are_those_of_all_heads_and_of_the_point():
    summary = run(METHOD, model=two_layers())[0].summary
    visits, late = 4 * 4, 2 * 4
    assert summary["bytes_up"] == visits * POINT.start * 8
    assert summary["bytes_down"] == (visits * POINT.start + late * M) * 8


def test_a_resumed_run_has_the_same_points(tmp_path):
    whole = run(METHOD, model=two_layers())[0].vector
    options = {**OPTIONS, "model": two_layers(), "method": METHOD, "precision": "fp64", "engine": "inline"}
    options["out"] = tmp_path / "run"
    unskew.run(skewed(), **{**options, "rounds": 1})
    assert torch.equal(unskew.run(skewed(), resume=True, **options).vector, whole)


def test_it_needs_enough_clients_and_warns_without_points():
    with pytest.raises(ConfigError, match="endpoints=10 needs at least as many clients, and there are 4"):
        run("floco", model=two_layers())
    with pytest.warns(UserWarning, match="all clients use the center"):
        assert np.isfinite(run("floco:endpoints=2,tau=4+fedprox:mu=0.1", model=two_layers())[0].summary["accuracy"])
