"""FedDBE against a loop over the paper's formulas, and in its limits."""

from types import SimpleNamespace

import pytest
import torch
from support.batch_loop import (
    BODY,
    CLASSES,
    DECAY,
    FEATURES,
    HIDDEN,
    LR,
    MOMENTUM,
    average,
    check_client_models,
    features,
    flat,
    local,
    run,
    skewed,
    two_layers,
)
from torch import nn
from torch.nn.functional import cross_entropy

import unskew
from unskew.engines.vmap_trainer import GroupTrainer
from unskew.methods.feddbe import FedDBE
from unskew.models.spec import ModelOutput

EXACT = 1e-12
KAPPA = 3.0
SIZE = BODY.stop + CLASSES * HIDDEN + CLASSES
SHIFT = slice(BODY.stop, BODY.stop + HIDDEN)
"""In the order of the module's parameters: its own one comes before those of the linear layer."""
SHARED = torch.ones(SIZE + HIDDEN, dtype=torch.bool)
SHARED[SHIFT] = False


def start():
    """The initial model: that of ``two_layers`` with a shift of zeros."""
    v = flat(two_layers())
    return torch.cat([v[BODY], torch.zeros(HIDDEN, dtype=v.dtype), v[BODY.stop :]])


def penalized(v, x, y, r, mean, mu):
    """The loss of a step; without the second term if ``mean`` is None."""
    a = features(v, x)
    u, c = torch.split(v[SHIFT.stop :], [CLASSES * HIDDEN, CLASSES])
    loss = cross_entropy((a + v[SHIFT]) @ u.view(CLASSES, HIDDEN).T + c, y)
    if mean is None:
        return loss
    return loss + KAPPA * (0.5 * ((1 - mu) * r + mu * a.mean(0) - mean) ** 2).mean()


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("mu", [1.0, 0.3])
def test_a_run_is_the_papers_loop(mu, participation, tmp_path):
    expression = f"feddbe:kappa={KAPPA},mu={mu}"
    result, cohorts = run(expression, participation, model=two_layers(), out=tmp_path / "run")
    slope, fed = torch.func.grad(penalized), skewed()
    x, own, mean = start(), {}, None
    for cohort in cohorts:
        for k, batches in cohort.items():
            r = [torch.zeros(HIDDEN, dtype=torch.float64)]

            def direction(v, u, y, r=r, mean=mean):
                g = slope(v, u, y, r[0], mean, mu)
                r[0] = (1 - mu) * r[0] + mu * features(v, u).mean(0)
                return torch.where(SHARED, g, 0.0) if mean is None else g

            own[k] = local(torch.where(SHARED, x, own.get(k, start())), batches, direction, LR, MOMENTUM, DECAY)
        x = torch.where(SHARED, average(fed, {k: own[k] for k in cohort}), 0.0)
        if mean is None:
            mean = average(fed, {k: features(own[k], fed.clients[k].x.double()).mean(0) for k in cohort})
    assert float((result.vector - x).abs().max()) < EXACT
    check_client_models(tmp_path / "run", own)
    assert any(v[SHIFT].any() for v in own.values())


@pytest.mark.parametrize(("engine", "together"), [("inline", 3), ("vectorized", "auto")])
def test_a_moving_mean_with_dropout_is_the_same_on_every_engine(engine, together, monkeypatch):
    def train(engine, together):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, CLASSES)
        )  # fmt: skip
        options = {"rounds": 3, "local_steps": 4, "batch_size": 4, "lr": 0.1, "precision": "fp64"}
        return unskew.run(
            skewed(), model=model, method="feddbe:mu=0.4", engine=engine, clients_per_group=together, **options
        ).vector

    reference = train("inline", 1)
    monkeypatch.setattr(GroupTrainer, "train", GroupTrainer.mapped)
    assert float((train(engine, together) - reference).abs().max()) < EXACT


def test_without_bias_and_pull_it_is_fedavg():
    plain = run("fedavg", model=two_layers())[0].vector
    assert torch.equal(run("feddbe:kappa=0,bias=false", model=two_layers())[0].vector[SHARED], plain)
    for options in ("kappa=0", "bias=false"):
        changed = run(f"feddbe:{options}", model=two_layers())[0].vector[SHARED]
        assert float((changed - plain).abs().max()) > 1e-4


def test_the_gradients_of_bias_and_pull_are_those_by_hand():
    """``db = W^T mean(p - y)`` for a common shift of all features, and ``kappa (mean - g) / (f B)`` for each feature."""
    torch.manual_seed(0)
    head = FedDBE().adapt(nn.Sequential(nn.Linear(2, HIDDEN), nn.Linear(HIDDEN, CLASSES)), "1")[0][1].double()
    a, y = torch.randn(6, HIDDEN, dtype=torch.float64, requires_grad=True), torch.randint(CLASSES, (6,))
    z = head(a)
    cross_entropy(z, y).backward()
    mean = (z.softmax(1) - nn.functional.one_hot(y, CLASSES)).mean(0).detach()
    assert float((head.shift.grad - head.linear.weight.detach().T @ mean).abs().max()) < EXACT
    goal = torch.randn(HIDDEN, dtype=torch.float64)
    ctx = SimpleNamespace(download={"mean": goal}, model=lambda v, x, track: ModelOutput(head(x), x))
    v, batch = torch.zeros(1, dtype=torch.float64), SimpleNamespace(x=a, track=True)
    pull = FedDBE(kappa=KAPPA).loss(lambda v, batch: v.sum(), ctx, {})(v, batch)
    expected = KAPPA * (a.detach().mean(0) - goal) / (HIDDEN * len(a))
    assert float((torch.autograd.grad(pull, a)[0] - expected).abs().max()) < EXACT


def test_the_pull_brings_the_mean_features_of_clients_together():
    def spread(method):
        model, _ = run(method, model=two_layers(), rounds=8, momentum=0.0, weight_decay=0.0)
        means = torch.stack([features(model.vector, c.x.double()).mean(0) for c in skewed().clients])
        return float(means.std(0).mean())

    assert spread("feddbe:kappa=10,bias=false") < spread("fedavg")


def test_bytes_are_those_of_the_model_and_the_mean_feature():
    summary = run("feddbe", model=two_layers())[0].summary
    visits = 4 * 4
    assert summary["bytes_up"] == (visits * SIZE + 4 * HIDDEN) * 8
    assert summary["bytes_down"] == (visits * SIZE + 3 * 4 * HIDDEN) * 8
