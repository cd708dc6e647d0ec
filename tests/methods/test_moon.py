"""MOON, FedSAM, FedExP, FedDecorr: identities, NumPy oracles, and that each changes the update as its paper says."""

import numpy as np
import pytest
import torch
from support import protocol
from support.federations import SmallBatchNorm, blobs
from support.quadratic import LR, STEPS, Quadratics, gradient, oracle, problem, sizes
from support.tolerance import FEW, MAGNIFIED, TRAINING, assert_close, near
from torch import nn

import unskew
from unskew.errors import ConfigError
from unskew.methods.feddecorr import FedDecorr, authors_energy, correlation_energy
from unskew.methods.moon import contrast
from unskew.models.execution import Batch


def train(method, **options):
    torch.manual_seed(0)
    given = {"rounds": 3, "lr": 0.05, "batch_size": 8, "precision": "fp64", "engine": "inline", **options}
    return unskew.run(blobs([12, 23, 17]), model=SmallBatchNorm(dropout=0.0), method=method, **given)


@pytest.mark.parametrize("same", ["fedsam:rho=0", "feddecorr:beta=0", "moon:mu=0,projection=0"])
def test_reductions_to_fedavg(same):
    assert torch.equal(train(same).vector, train("fedavg").vector)


def test_fedsam_equals_numpy():
    A, b = problem()
    rho = 0.3

    def perturbed(k, g, v, x):
        return gradient(A[k], b[k], v + rho * g / np.linalg.norm(g))

    expected = oracle(A, b, 3, lambda t: range(4), sizes(A), perturbed)
    assert_close(Quadratics(A, b, f"fedsam:rho={rho}").rounds(3), expected, MAGNIFIED)


def test_fedsam_takes_statistics_once_and_survives_a_zero_gradient():
    first = train("fedsam", rounds=1, local_steps=1)
    assert_close(
        first.model.norm.running_mean, train("fedavg", rounds=1, local_steps=1).model.norm.running_mean, TRAINING
    )
    A, b = problem(equal=True)
    zero = [np.zeros_like(y) for y in b]
    assert np.array_equal(Quadratics(A, zero, "fedsam").rounds(2)[-1], np.zeros(3))


def test_correlation_energy_is_the_mean_squared_correlation():
    draws = np.random.default_rng(0)
    for shape in ((30, 6), (6, 30)):
        x = draws.normal(size=shape) @ draws.normal(size=(shape[1], shape[1]))
        expected = np.square(np.corrcoef(x, rowvar=False)).mean()
        assert float(correlation_energy(torch.tensor(x))) == near(expected, FEW, dtype=torch.float32)
    constant = torch.ones(5, 3, dtype=torch.float64)
    assert float(correlation_energy(constant)) == 0.0


def test_the_authors_energy_is_that_of_their_code_and_tens_of_times_the_papers():
    """The mean over pairs of different dimensions, of a matrix that is not divided by the batch, and over the batch."""
    draws = np.random.default_rng(0)
    for shape in ((30, 6), (6, 30)):
        x = draws.normal(size=shape) @ draws.normal(size=(shape[1], shape[1]))
        z = (x - x.mean(0)) / np.sqrt(x.var(0, ddof=1) + 1e-8)
        pairs = (z.T @ z)[~np.eye(shape[1], dtype=bool)]
        assert float(authors_energy(torch.tensor(x))) == near((pairs**2).mean() / shape[0], FEW)
    assert float(authors_energy(torch.tensor(draws.normal(size=(5, 1))))) == pytest.approx(0, abs=1e-12)
    features = torch.tensor(draws.normal(size=(64, 256)))
    assert float(authors_energy(features) / correlation_energy(features)) == pytest.approx(50, rel=0.1)


def test_the_papers_form_of_feddecorr_is_an_option():
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 4), nn.Linear(4, 3)).double()
    spec = unskew.ModelSpec(model, (2, 6, 6), 3, dtype=torch.float64)
    ctx = protocol.context(spec, model=lambda v, x, track=False: spec.forward(v, v[:0], x))
    batch = Batch(blobs([9]).clients[0].x.double(), None, torch.tensor(0), torch.tensor(0))
    v = spec.flatten()
    features = ctx.model(v, batch.x).features
    for rule, energy in (
        (FedDecorr(beta=2.0, form="paper", scale=3.0), correlation_energy),
        (FedDecorr(), authors_energy),
    ):
        found = rule.loss(lambda v, batch: v.sum() * 0, ctx, {})(v, batch)
        assert float(found) == near(rule.beta * rule.scale * float(energy(features)))


@pytest.mark.slow
def test_feddecorr_decorrelates_the_features():
    x = blobs([50]).clients[0].x.double()

    def energy(result):
        spec = unskew.ModelSpec(result.model, (2, 6, 6), 3, dtype=torch.float64)
        return float(correlation_energy(spec.forward(spec.flatten(), spec.flatten_buffers(), x).features))

    assert energy(train("feddecorr:beta=5", rounds=6)) < 0.9 * energy(train("fedavg", rounds=6))


def test_moons_contrast_equals_the_formula():
    draws = np.random.default_rng(0)
    z, g, p = draws.normal(size=(3, 7, 4))

    def cosine(u, w):
        return (u * w).sum(1) / np.linalg.norm(u, axis=1) / np.linalg.norm(w, axis=1)

    eg, ep = np.exp(cosine(z, g) / 0.5), np.exp(cosine(z, p) / 0.5)
    expected = -np.log(eg / (eg + ep)).mean()
    assert float(contrast(*(torch.tensor(t) for t in (z, g, p)), 0.5)) == near(expected)


def test_moon_has_no_effect_before_there_is_a_previous_model():
    moon = "moon:mu=5,projection=0"
    assert torch.equal(train(moon, rounds=1).vector, train("fedavg", rounds=1).vector)
    assert not torch.equal(train(moon, rounds=2).vector, train("fedavg", rounds=2).vector)


def test_moons_gradient_lowers_the_contrast():
    """One step from a point where previous and global model differ: more pull, less contrast loss."""
    spec = unskew.ModelSpec(SmallBatchNorm(dropout=0.0), (2, 6, 6), 3, dtype=torch.float64)
    torch.manual_seed(3)
    v_global, v_prev = spec.flatten(), spec.flatten() + 0.3 * torch.randn(spec.size, dtype=torch.float64)
    b, x = spec.flatten_buffers(), torch.randn(16, 2, 6, 6, dtype=torch.float64)
    v = (v_global + 0.3 * torch.randn(spec.size, dtype=torch.float64)).requires_grad_()

    def value(u):
        z, g, p = (spec.forward(w, b, x).features for w in (u, v_global, v_prev))
        return contrast(z, g.detach(), p.detach(), 0.5)

    before = value(v)
    (g,) = torch.autograd.grad(before, v)
    assert value(v.detach() - 0.01 * g) < before


@pytest.mark.parametrize("wrapped", [True, False], ids=["in a sequence", "bare"])
def test_a_model_that_is_only_a_head_is_refused_or_told_where_a_body_is_needed(wrapped):
    draws = np.random.default_rng(0)
    clients = [(draws.normal(size=(n, 4)), draws.integers(0, 3, n)) for n in (12, 9)]
    fed = unskew.Federation.from_arrays(clients, test=clients[0], classes=3)

    def run(method):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3)) if wrapped else nn.Linear(4, 3)
        return unskew.run(fed, model=model, method=method, rounds=2, lr=0.1, engine="inline")

    with pytest.raises(ConfigError, match="fedrep shares the body of the model"):
        run("fedrep")
    with pytest.raises(ConfigError, match="this model has only one layer, its head"):
        run("fedals")
    assert run("fedals:split=1,alpha=2").summary["bytes_up"] == run("fedavg").summary["bytes_up"] / 2
    for method in ("moon:projection=0", "feddecorr"):
        with pytest.warns(UserWarning, match=f"{method[:4]}.*has no effect"):
            assert torch.equal(run(method).vector, run("fedavg").vector)
    assert run("moon:projection=5").summary["parameters"] == (4 * 4 + 4) + (4 * 5 + 5) + (5 * 3 + 3)


def test_moon_with_a_projection_head_trains_a_larger_model():
    plain, projected = train("moon:projection=0"), train("moon:projection=7")
    extra = (16 * 16 + 16) + (16 * 7 + 7) + (7 * 3 + 3) - (16 * 3 + 3)
    assert projected.summary["parameters"] == plain.summary["parameters"] + extra


def test_fedexp_equals_the_formula():
    A, b = problem()
    run = Quadratics(A, b, "fedexp:evaluate=last")
    p, x = sizes(A), np.zeros(3)
    for found in run.rounds(4):
        moves = []
        for k in range(4):
            v = x.copy()
            for _ in range(STEPS):
                v -= LR * gradient(A[k], b[k], v)
            moves.append(v - x)
        mean = p @ np.array(moves)
        eta = max(1.0, p @ np.square(moves).sum(1) / (2 * (mean @ mean + 1e-3)))
        x = x + eta * mean
        assert_close(found, x, TRAINING)
    assert run.server.setup.rule.metrics(run.server.state.server_rule, 0, run.server.setup.spec)[
        "fedexp_eta"
    ] == pytest.approx(eta)


def test_fedexp_takes_the_plain_average_when_all_agree():
    A, b = problem(sizes=(5,))
    same, plain = (Quadratics(A * 3, b * 3, m).rounds(2)[-1] for m in ("fedexp", "fedavg"))
    assert_close(same, plain)


def test_fedexp_evaluates_the_mean_of_its_last_two_iterates():
    mean = train("fedexp", rounds=2)
    last, before = (train("fedexp:evaluate=last", rounds=r).vector for r in (2, 1))
    assert_close(mean.vector, (last + before) / 2, TRAINING)
    assert mean.history[-1]["fedexp_eta"] >= 1
