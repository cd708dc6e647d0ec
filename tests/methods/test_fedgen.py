"""FedGen: the generator, what it minimizes, and what clients learn from it, against NumPy."""

import numpy as np
import pytest
import torch
from support import protocol
from support.federations import SmallBatchNorm, blobs
from support.running import Stop, StopAfter, assert_same_run
from support.tolerance import MAGNIFIED, TRAINING, assert_close, near
from torch import nn

import unskew
from unskew.generators.latent import LatentGenerator, diversity, draw_labels
from unskew.methods.fedgen import PURPOSE, FedGen
from unskew.models.execution import Batch
from unskew.models.registry import build_model
from unskew.protocol.rules import ClientRule
from unskew.seeding import fold, normal
from unskew.tasks.classification import Classification

SIZES = [12, 23, 17]


def train(method, **options):
    torch.manual_seed(0)
    given = {"rounds": 3, "lr": 0.05, "batch_size": 8, "precision": "fp64", "engine": "inline", **options}
    return unskew.run(blobs(SIZES), model=SmallBatchNorm(), method=method, **given)


@pytest.fixture
def spec():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(72, 5), nn.Tanh(), nn.Linear(5, 3))
    return unskew.ModelSpec(net, (2, 6, 6), 3, dtype=torch.float64)


def softmax(z):
    return np.exp(z) / np.exp(z).sum(-1, keepdims=True)


def generated(g, y, eps, classes, hidden, features):
    """The generator in NumPy, from the layout of its vector."""
    inputs = classes + eps.shape[1]
    w1, rest = g[: hidden * inputs].reshape(hidden, inputs), g[hidden * inputs :]
    b1, rest = rest[:hidden], rest[hidden:]
    w2, b2 = rest[: features * hidden].reshape(features, hidden), rest[features * hidden :]
    return np.maximum(np.hstack([np.eye(classes)[y], eps]) @ w1.T + b1, 0) @ w2.T + b2


def test_the_generator_equals_numpy_and_starts_as_linear_layers_do():
    G = LatentGenerator(classes=4, noise=3, hidden=50, features=6)
    assert G.size == 50 * 7 + 50 + 6 * 50 + 6
    g, y, eps = G.init(torch.tensor(1)).double(), torch.tensor([0, 3, 1]), torch.randn(3, 3, dtype=torch.float64)
    assert_close(G(g, y, eps), generated(g.numpy(), y.numpy(), eps.numpy(), 4, 50, 6))
    for piece, inputs in zip(torch.split(g, G.sizes), (7, 7, 50, 50), strict=True):
        assert float(piece.abs().max()) <= inputs**-0.5
    assert float(torch.split(g, G.sizes)[0].std()) == pytest.approx((3 * 7) ** -0.5, rel=0.1)


def test_diversity_equals_the_formula():
    eps, z = np.random.default_rng(0).normal(size=(2, 5, 4))
    pairs = [np.mean((eps[i] - eps[j]) ** 2) * np.mean(np.abs(z[i] - z[j])) for i in range(5) for j in range(5)]
    assert float(diversity(torch.tensor(eps), torch.tensor(z))) == near(np.exp(-np.mean(pairs)))
    assert float(diversity(torch.tensor(eps), torch.ones(5, 4))) == 1.0


def test_labels_are_drawn_evenly_from_those_present():
    drawn = draw_labels(torch.tensor(3), torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0]), 9000)
    counts = torch.bincount(drawn, minlength=6)
    assert counts[[0, 3, 5]].tolist() == [0, 0, 0]
    assert bool((counts[[1, 2, 4]] - 3000).abs().max() < 200)


def test_what_the_generator_minimizes_equals_numpy(spec):
    draws = np.random.default_rng(0)
    z, eps, y = draws.normal(size=(6, 5)), draws.normal(size=(6, 4)), np.array([0, 1, 2, 0, 1, 1])
    heads, student = draws.normal(size=(4, 18)), draws.normal(size=18)
    alpha = draws.uniform(size=(4, 3))
    alpha /= alpha.sum(0)

    def logits(head):
        return z @ head[:15].reshape(3, 5).T + head[15:]

    value, mixed = 0.0, np.zeros((6, 3))
    for k in range(4):
        out = logits(heads[k])
        value += np.mean([-alpha[k, y[i]] * np.log(softmax(out)[i, y[i]]) for i in range(6)])
        mixed += alpha[k, y][:, None] * out
    teacher, q = softmax(mixed), softmax(logits(student))
    value -= 0.3 * np.mean((teacher * np.log(teacher / q)).sum(1))
    value += 0.7 * float(diversity(torch.tensor(eps), torch.tensor(z)))
    rule = FedGen(beta_s=0.3, eta_div=0.7)
    given = (torch.tensor(t) for t in (z, y, eps, heads, student, alpha))
    assert float(rule.server_objective(spec, *given)) == near(value, TRAINING)


def context(spec, rule, g, counts, round=0):
    b = spec.flatten_buffers()
    return protocol.context(
        spec, round=round, download={"g": g}, model=lambda u, x, track=True: spec.forward(u, b, x), task=Classification(),
        key=torch.tensor(11), steps=torch.tensor(4.0), client_info={"counts": torch.tensor(counts)},
    )  # fmt: skip


def plain_loss(ctx):
    return lambda v, batch: ctx.task.loss(ctx.model(v, batch.x, batch.track).logits, batch.y)


@pytest.mark.parametrize("labels", ["own", "all"])
def test_the_clients_loss_equals_numpy(spec, labels):
    rule = FedGen(a=3, b=2, decay=0.9, labels=labels, hidden=7, noise=4, batch=6)
    g = rule.generator(spec).init(torch.tensor(5)).double() * 3
    ctx = context(spec, rule, g, [5.0, 0.0, 2.0], round=2)
    if labels == "all":  # what clients reported so far, told with the generator
        ctx.download["labels"] = torch.ones(3, dtype=torch.float64)
    carry = rule.begin(ctx)
    data = blobs(SIZES).clients[1]
    batch = Batch(data.x[:4].double(), data.y[:4], torch.tensor(0), torch.tensor(3))
    found = rule.loss(plain_loss(ctx), ctx, carry)(spec.flatten(), batch)

    w1, b1, w2, b2 = (p.numpy() for p in spec.parameters(spec.flatten()).values())
    key = fold(fold(ctx.key, PURPOSE), 3)
    y = draw_labels(fold(key, 1), torch.tensor([1.0, float(labels == "all"), 1.0]), 6).numpy()
    eps, other = (normal(fold(key, i), (n, 4)).numpy() for i, n in ((2, 6), (3, 4)))
    own = np.tanh(batch.x.numpy().reshape(4, -1) @ w1.T + b1) @ w2.T + b2
    made = generated(g.numpy(), y, eps, 3, 7, 5) @ w2.T + b2
    teacher = softmax(generated(g.numpy(), batch.y.numpy(), other, 3, 7, 5) @ w2.T + b2)
    expected = -np.mean(np.log(softmax(own)[np.arange(4), batch.y.numpy()]))
    expected -= 0.81 * 3 * np.mean(np.log(softmax(made)[np.arange(6), y]))
    expected += 0.81 * 2 * np.mean((teacher * np.log(teacher / softmax(own))).sum(1))
    assert float(found) == near(expected, TRAINING)


def test_the_teacher_has_no_gradient_and_the_student_comes_nearer(spec):
    """With ``a = 0`` only the distillation is added; the head moves through the student's pass alone."""
    rule = FedGen(a=0, b=1, hidden=7, noise=4)
    g = rule.generator(spec).init(torch.tensor(5)).double() * 5
    ctx = context(spec, rule, g, [5.0, 1.0, 2.0])
    data = blobs(SIZES).clients[1]
    batch = Batch(data.x[:8].double(), data.y[:8], torch.tensor(0), torch.tensor(0))
    v = spec.flatten().requires_grad_()
    eps = normal(fold(fold(fold(ctx.key, PURPOSE), 0), 3), (8, 4))
    teacher = spec.head(v.detach(), rule.generator(spec)(g, batch.y, eps)).softmax(-1)

    def distance(u):
        return (teacher * (teacher.log() - ctx.model(u, batch.x).logits.log_softmax(-1))).sum(-1).mean()

    zero = rule.loss(lambda u, batch: 0 * u.sum(), ctx, rule.begin(ctx))
    (found,) = torch.autograd.grad(zero(v, batch), v)
    (expected,) = torch.autograd.grad(distance(v), v)
    assert_close(found, expected)
    assert distance(v.detach() - 0.1 * found) < distance(v.detach())


@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn", "resnet20", "vgg11"])
def test_the_head_alone_gives_the_models_logits(name):
    spec = unskew.ModelSpec(build_model(name, (3, 32, 32), 10), (3, 32, 32), 10)
    v, x = spec.flatten(), torch.randn(3, 3, 32, 32)
    out = spec.forward(v, spec.flatten_buffers(), x)
    assert tuple(out.features.shape[1:]) == spec.feature_shape
    torch.testing.assert_close(spec.head(v, out.features), out.logits)
    torch.testing.assert_close(spec.head(spec.head_of(v), out.features), out.logits)


@pytest.mark.slow
def test_without_its_terms_it_is_fedavg():
    assert torch.equal(train("fedgen:a=0,b=0,gen_steps=5").vector, train("fedavg").vector)
    assert torch.equal(train("fedgen", rounds=1).vector, train("fedavg", rounds=1).vector)
    assert not torch.equal(train("fedgen", rounds=2).vector, train("fedavg", rounds=2).vector)


def updates_of(spec, heads, counts, round=0):
    """A round in which client ``k`` sends the head ``heads[k]`` and says it holds ``counts[k]``."""
    v, individual = spec.flatten(), []
    for k, (head, held) in enumerate(zip(heads, counts, strict=True)):
        delta = torch.zeros_like(v)
        delta[spec.parts["head"][0]] = torch.as_tensor(head) - spec.head_of(v)
        upload = {"fedgen": {"counts": torch.tensor(held, dtype=v.dtype)}}
        individual.append(protocol.an_update(k, delta, round, upload=upload))
    return protocol.some_updates(individual, round, v, spec=spec, key=torch.tensor(100 + round))


def test_the_generator_is_trained_by_adam_whose_moments_last(spec):
    draws = np.random.default_rng(1)
    heads, counts = torch.tensor(draws.normal(size=(2, 18))), [[3.0, 1.0, 0.0], [1.0, 1.0, 0.0]]
    rule = FedGen(gen_steps=4, gen_lr=0.01, hidden=7, noise=4, batch=6, beta_s=0.2)
    G, alpha = rule.generator(spec), torch.tensor([[0.75, 0.5, 0.0], [0.25, 0.5, 0.0]], dtype=torch.float64)
    leaf = nn.Parameter(G.init(fold(torch.tensor(100), 0)).double())
    optimizer, state = torch.optim.Adam([leaf], lr=0.01), {}
    for round in range(3):
        state = rule.server_update(state, updates_of(spec, heads, counts, round))
        for i in range(4):
            now = fold(fold(torch.tensor(100 + round), 1), i)
            y = draw_labels(fold(now, 1), torch.tensor([1.0, 1.0, 0.0]), 6)
            eps = normal(fold(now, 2), (6, 4))
            optimizer.zero_grad()
            student = spec.head_of(spec.flatten())
            rule.server_objective(spec, G(leaf, y, eps), y, eps, heads, student, alpha).backward()
            optimizer.step()
        assert_close(state["g"], leaf.detach(), MAGNIFIED)
    assert float(state["t"]) == 12


@pytest.mark.slow
def test_generated_features_come_to_mean_their_class(spec):
    """Two clients that know two classes each: after training, each takes features of its classes for what they are."""
    draws = np.random.default_rng(0)
    heads, counts = draws.normal(size=(2, 18)), [[9.0, 5.0, 0.0], [0.0, 5.0, 9.0]]
    rule = FedGen(gen_steps=300, gen_lr=3e-3)
    updates = updates_of(spec, heads, counts)
    y, eps = torch.arange(300) % 3, torch.randn(300, 32, dtype=torch.float64)

    def accuracy(state):
        z = rule.generator(spec)(state["g"], y, eps)
        right = [(spec.head(torch.as_tensor(head), z).argmax(1) == y).numpy() for head in heads]
        held = [np.array(c)[y.numpy()] > 0 for c in counts]
        return np.concatenate([r[h] for r, h in zip(right, held, strict=True)]).mean()

    before = rule.generator(spec).init(fold(torch.tensor(100), 0)).double()
    assert accuracy({"g": before}) < 0.7
    assert accuracy(rule.server_update({}, updates)) > 0.98


def test_traffic_counts_generator_and_labels():
    methods = ("fedavg", *(f"fedgen:gen_steps=1,hidden=7,noise=4{more}" for more in ("", ",labels=own")))
    plain, fedgen, own = (train(m, participation=0.7).history for m in methods)
    g = LatentGenerator(3, 4, 7, 16).size
    for t, (before, after, less) in enumerate(zip(plain, fedgen, own, strict=True)):
        assert after["bytes_up"] - before["bytes_up"] == 8 * 2 * (t + 1) * 3
        assert less["bytes_down"] - before["bytes_down"] == 8 * 2 * t * g
        assert after["bytes_down"] - less["bytes_down"] == 8 * 2 * t * 3


def test_labels_of_all_are_those_that_some_client_has_reported(spec):
    """Also in an earlier round; a class that no client holds is never drawn."""
    rule, v = FedGen(gen_steps=1, hidden=7, noise=4), spec.flatten()

    def report(state, *counts):
        some = [
            protocol.an_update(k, torch.zeros_like(v), upload={"fedgen": {"counts": torch.tensor(c, dtype=v.dtype)}})
            for k, c in enumerate(counts)
        ]
        return rule.server_update(state, protocol.some_updates(some, v=v, spec=spec, one_by_one={"fedgen"}))

    state = report({}, [3, 0, 0], [1, 0, 0])
    assert rule.download(state, 0)["labels"].tolist() == [1, 0, 0]
    state = report(state, [0, 0, 5])
    assert rule.download(state, 0)["labels"].tolist() == [1, 0, 1]
    ctx = context(spec, rule, state["g"], [5.0, 0.0, 0.0])
    ctx.download["labels"] = state["labels"]
    assert rule.begin(ctx)["present"].tolist() == [1, 0, 1]


def test_the_seed_decides_the_generator():
    first, again, other = (train("fedgen:gen_steps=5", seed=seed, rounds=2).vector for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.slow
def test_a_resumed_run_equals_one_without_interruption(tmp_path):
    given = {"method": "fedgen:gen_steps=10+fedavgm", "model": "mlp", "rounds": 4, "lr": 0.05, "engine": "inline"}
    fed = blobs(SIZES)
    unskew.run(fed, out=tmp_path / "straight", **given)
    with pytest.raises(Stop):
        unskew.run(fed, out=tmp_path / "stopped", callbacks=[StopAfter(2)], checkpoint_every=1, **given)
    unskew.resume(tmp_path / "stopped", federation=fed)
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")


def test_a_head_that_takes_no_vectors_is_refused():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            return self.head(x.mean(1)).mean(1)

    with pytest.raises(unskew.UnskewError, match="takes inputs of shape"):
        unskew.run(blobs(SIZES), model=Rows(), method="fedgen", rounds=1, engine="inline")


def test_a_client_rule_that_asks_for_sums_gets_only_sums():
    class Curious(ClientRule):
        name, summary, paper = "curious", "for tests", "none"

        def server_update(self, state, updates):
            return {"first": next(iter(updates)).delta}

    with pytest.raises(unskew.UnskewError, match="single updates"):
        train(Curious())

    class Reader(Curious):
        needs = ("individual",)

    assert torch.equal(train(Reader()).vector, train("fedavg").vector)
