"""GPFL against a loop over the paper's formulas, and in its limits."""

import pytest
import torch
from support.batch_loop import (
    CLASSES,
    DECAY,
    FEATURES,
    HIDDEN,
    MOMENTUM,
    average,
    check_client_models,
    features,
    local,
    run,
    skewed,
    two_layers,
)
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy, one_hot

import unskew
from unskew.methods.gpfl import GPFL

EXACT = 1e-12
LAM, MU = 0.3, 0.05
RATE = 0.05
"""The normalization of three units after a ReLU may divide by 0.003, which larger steps make visible in rounding errors."""
LAYER = (HIDDEN * HIDDEN, HIDDEN, HIDDEN, HIDDEN)
"""Numbers of a condition's layer: weight and bias of the linear layer, scale and shift of the normalization."""
SIZES = {
    "w": HIDDEN * FEATURES, "b": HIDDEN, "embeddings": CLASSES * HIDDEN, "condition": HIDDEN, "head": CLASSES * HIDDEN,
    "bias": CLASSES, "gamma": sum(LAYER), "beta": sum(LAYER),
}  # fmt: skip
LOCAL = ("condition", "head", "bias")
SHARED = torch.cat([torch.full((n,), name not in LOCAL) for name, n in SIZES.items()])
FROZEN = torch.cat([torch.full((n,), name == "condition") for name, n in SIZES.items()])


def parts(v):
    return dict(zip(SIZES, torch.split(v, list(SIZES.values())), strict=True))


def layer(numbers, condition):
    """Linear layer, ReLU, and a normalization by mean and variance."""
    w, b, scale, shift = torch.split(numbers, LAYER)
    z = (w.view(HIDDEN, HIDDEN) @ condition + b).clamp(min=0)
    return (z - z.mean()) / (z.var(correction=0) + 1e-5).sqrt() * scale + shift


def conditioned(p, x, condition):
    a = features(torch.cat([p["w"], p["b"]]), x)
    return ((1 + layer(p["gamma"], condition)) * a + layer(p["beta"], condition)).clamp(min=0)


def objective(v, x, y, received, lam=LAM, mu=MU):
    p, before = parts(v), received.view(CLASSES, HIDDEN)
    e = p["embeddings"].view(CLASSES, HIDDEN)
    own = conditioned(p, x, p["condition"].detach()) @ p["head"].view(CLASSES, HIDDEN).T + p["bias"]
    generic = conditioned(p, x, before.mean(0))
    cosine = cosine_similarity(generic[:, None], e[None], dim=2, eps=1e-12)
    pull = ((generic - before[y]) ** 2).sum().sqrt()
    decay = sum((p[name] ** 2).sum() for name in ("gamma", "beta", "embeddings"))
    return cross_entropy(own, y) + cross_entropy(cosine, y) + lam * pull + mu / 2 * decay


def start():
    """The initial model, in which no update is visible."""
    return run(f"gpfl:lam={LAM},mu={MU}", model=two_layers(), rounds=1, lr=1e-30, weight_decay=0.0)[0].vector


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_a_run_is_the_papers_loop(participation, tmp_path):
    expression = f"gpfl:lam={LAM},mu={MU}"
    result, cohorts = run(expression, participation, model=two_layers(), lr=RATE, out=tmp_path / "run")
    slope, fed, begin = torch.func.grad(objective), skewed(), start()
    assert not begin[FROZEN].any()
    x, own = begin, {}
    for cohort in cohorts:
        received = parts(x)["embeddings"]
        for k, batches in cohort.items():
            shares = one_hot(fed.clients[k].y, CLASSES).double().mean(0)
            v = torch.where(SHARED, x, own.get(k, begin))
            v = torch.where(FROZEN, 0.0, v)
            v[FROZEN] = shares @ received.view(CLASSES, HIDDEN)
            personal = v[FROZEN]

            def direction(v, u, y, received=received):
                return torch.where(FROZEN, -DECAY * v, slope(v, u, y, received))  # against the weight decay

            own[k] = local(v, batches, direction, RATE, MOMENTUM, DECAY)
            assert float((own[k][FROZEN] - personal).abs().max()) < EXACT
        x = torch.where(SHARED, average(fed, {k: own[k] for k in cohort}), begin)
    assert float((result.vector - x).abs().max()) < EXACT
    check_client_models(tmp_path / "run", own)


@pytest.mark.parametrize(("lam", "mu"), [(1.0, 0.0), (0.0, 1.0)])
def test_every_term_has_a_gradient(lam, mu):
    torch.manual_seed(0)
    v, received = torch.randn(len(SHARED)).double(), torch.randn(CLASSES * HIDDEN).double()
    x, y = torch.randn(7, FEATURES).double(), torch.randint(CLASSES, (7,))
    slopes = [torch.func.grad(objective)(v, x, y, received, *weights) for weights in ((lam, mu), (0.0, 0.0))]
    assert float((slopes[0] - slopes[1]).abs().max()) > 1e-3
    plain, changed = (run(f"gpfl:lam={a},mu={b}", model=two_layers())[0].vector for a, b in ((0, 0), (lam, mu)))
    assert float((changed - plain).abs().max()) > 1e-4


class HeadAlone(GPFL):
    """Without conditions and without the terms of the generic features."""

    name = "head-alone"

    def adapt(self, module, head):
        module, head = super().adapt(module, head)
        for layers in (module.get_submodule(head).gamma, module.get_submodule(head).beta):
            nn.init.zeros_(layers[2].weight)
        return module, head

    def loss(self, loss_fn, ctx, carry):
        return loss_fn

    def trainable_mask(self, ctx, carry, batch):
        alone = (".gamma.", ".beta.", ".condition")
        frozen = [any(part in name for part in alone) for name in ctx.spec.names]
        return ~torch.repeat_interleave(torch.tensor(frozen), torch.tensor(ctx.spec.sizes))


def test_without_conditions_it_is_fedper_for_features_after_a_relu():
    torch.manual_seed(1)
    layers = [nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)]
    options = {"weight_decay": 0.0, "participation": 0.5, "rounds": 5, "local_steps": 4, "batch_size": 4, "lr": 0.2}
    both = [
        unskew.run(skewed(), model=nn.Sequential(*layers), method=rule, precision="fp64", engine="inline", **options)
        for rule in (HeadAlone(), "fedper")
    ]
    body = HIDDEN * FEATURES + HIDDEN
    assert torch.equal(both[0].vector[:body], both[1].vector[:body])
    assert [row["accuracy"] for row in both[0].clients] == [row["accuracy"] for row in both[1].clients]


def test_bytes_are_those_of_all_but_the_head():
    summary = run("gpfl", model=two_layers())[0].summary
    size = HIDDEN * FEATURES + HIDDEN + 2 * HIDDEN**2 + 6 * HIDDEN + CLASSES * HIDDEN
    assert summary["bytes_up"] == summary["bytes_down"] == 4 * 4 * size * 8
