"""FedAS against a loop over the paper's formulas, and in its limits."""

from types import SimpleNamespace

import pytest
import torch
from support.batch_loop import (
    BODY,
    CLASSES,
    FEATURES,
    HIDDEN,
    OPTIONS,
    SIZES,
    Recorder,
    client_states,
    deep_loss,
    features,
    flat,
    local,
    run,
    skewed,
    two_layers,
)

import unskew
from unskew.errors import ConfigError
from unskew.methods.fedas import PURPOSE, FedAS
from unskew.seeding import fold, uniform
from unskew.serving.load import open_run

EXACT = 1e-12
BATCH = OPTIONS["batch_size"]
slope = torch.func.grad(deep_loss)


class Keys(Recorder):
    """Also records the clients' keys, and the models that training starts from."""

    def __init__(self):
        super().__init__()
        self.keys, self.starts = [], []

    def begin(self, ctx):
        self.keys.append(ctx.key)
        self.starts.append(ctx.v_global.clone())
        return super().begin(ctx)


def order_of(key, number, n):
    return uniform(fold(fold(key, PURPOSE), number), (n,)).argsort().split(BATCH)


def aligned(v, own, client, key, eta, epochs):
    """The received model ``v`` after gradient steps towards the class means of ``own``."""
    x, y = client.x.double(), client.y
    means = {int(c): features(own, x[y == c]).mean(0) for c in y.unique()}

    def distance(v, rows):
        total = 0.0
        for c in y[rows].unique():
            a = features(v, x[rows][y[rows] == c])
            total += torch.nn.MSELoss()(a, means[int(c)].expand_as(a))
        return total

    for epoch in range(epochs):
        for rows in order_of(key, 1 + epoch, len(y)):
            v = v - eta * torch.func.grad(distance)(v, rows)
    return v


def fisher_of(v, client, key, epochs):
    x, y = client.x.double(), client.y
    return sum(slope(v, x[rows], y[rows]).square().sum() for rows in order_of(key, 1 + epochs, len(y)))


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize(("eta", "epochs", "fisher"), [(0.3, 1, True), (0.05, 2, True), (0.3, 1, False)])
def test_a_run_is_the_papers_loop(eta, epochs, fisher, participation, weights, tmp_path):
    fed, recorder = skewed(), Keys()
    result, cohorts = run(
        f"fedas:eta={eta},epochs={epochs},fisher={fisher}", participation, fed, two_layers(), recorder, outermost=True,
        client_weighting=weights, out=tmp_path / "run",
    )  # fmt: skip
    x, own, keys, starts = flat(two_layers()), {}, iter(recorder.keys), iter(recorder.starts)
    moved = 0.0
    for cohort in cohorts:
        weight = {}
        new = {}
        for k, batches in cohort.items():
            key, start = next(keys), own.get(k, flat(two_layers())).clone()
            start[BODY] = x[BODY]
            if k in own:
                received, start = start, aligned(start, own[k], fed.clients[k], key, eta, epochs)
                moved = max(moved, float((start - received).norm()))
            assert float((next(starts) - start).abs().max()) < EXACT
            new[k] = local(start, batches, slope)
            weight[k] = SIZES[k] if weights == "samples" else 1.0
            weight[k] *= fisher_of(new[k], fed.clients[k], key, epochs) if fisher else 1.0
        own = {**own, **new}
        x = x.clone()
        x[BODY] = x[BODY] + sum(weight[k] * (own[k][BODY] - x[BODY]) for k in cohort) / sum(weight.values())
    assert float((result.vector - x).abs().max()) < EXACT
    states = client_states(tmp_path / "run")
    assert set(states) == set(own)
    for k, v in own.items():
        assert float((next(t for name, t in states[k].items() if name.endswith("personal")) - v).abs().max()) < EXACT
    assert moved > 1e-3  # the alignment has a gradient


def test_without_alignment_and_fisher_it_is_fedper_with_uniform_weights(tmp_path):
    result = run("fedas:epochs=0,fisher=false", 0.5, model=two_layers(), out=tmp_path / "a")[0]
    other = run("fedper", 0.5, model=two_layers(), client_weighting="uniform", out=tmp_path / "b")[0]
    assert torch.equal(result.vector, other.vector)
    mine, theirs = client_states(tmp_path / "a"), client_states(tmp_path / "b")
    assert set(mine) == set(theirs) != set()
    for k in mine:
        assert torch.equal(mine[k]["model"][BODY.stop :], theirs[k]["model"][BODY.stop :])


def test_the_fisher_information_of_a_softmax_regression_is_that_by_hand(monkeypatch):
    """Under a linear body ``a = W x``, with the residuals ``r = p - y`` of each batch."""
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, HIDDEN, bias=False), torch.nn.Linear(HIDDEN, CLASSES))
    seen, end = [], FedAS.end

    def recorded(self, ctx, carry, v):
        end(self, ctx, carry, v)
        seen.append((v, ctx.upload["fisher"]))

    monkeypatch.setattr(FedAS, "end", recorded)
    fed, recorder = skewed((9,), present=3), Keys()
    run("fedas", 1.0, fed, model, recorder, rounds=1, weight_decay=0.0)
    (v, found), x, y = seen[0], fed.clients[0].x.double(), fed.clients[0].y
    w, u, c = torch.split(v, [HIDDEN * FEATURES, CLASSES * HIDDEN, CLASSES])
    w, u = w.view(HIDDEN, FEATURES), u.view(CLASSES, HIDDEN)
    total = 0.0
    for rows in order_of(recorder.keys[0], 2, len(y)):
        a, n = x[rows] @ w.T, len(rows)
        r = torch.softmax(a @ u.T + c, 1)
        r[torch.arange(n), y[rows]] -= 1
        gradients = (r.T @ a / n, r.mean(0), u.T @ r.T @ x[rows] / n)
        total += float(sum(g.square().sum() for g in gradients))
    assert float(found) == pytest.approx(total, rel=1e-12)


def test_without_information_the_body_stays():
    """If the weights of all clients are 0, so are their uploads."""
    v, zero = torch.ones(3), torch.zeros(())
    mean = SimpleNamespace(delta=torch.zeros(3), upload={"fedas": {"fisher": zero}}, weight=2.0)
    assert torch.equal(FedAS().step({"v": v}, SimpleNamespace(aggregate=mean))["v"], v)


def test_a_client_is_served_by_its_own_model():
    fed = unskew.load_federation("digits", clients=5, partition="classes:2", holdout=0.2)
    result = unskew.run(fed, model="mlp", method="fedas", rounds=4, local_epochs=2, lr=0.1, engine="inline")
    assert result.summary["personal_accuracy_mean"] > 0.8
    assert result.summary["client_accuracy_mean"] < 0.8


def test_a_client_is_served_with_the_buffers_of_its_own_model(tmp_path):
    """They follow from its last training, which here starts from fresh ones, and not from the mean over clients."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, HIDDEN), torch.nn.BatchNorm1d(HIDDEN), torch.nn.Linear(HIDDEN, 4)
    )
    fed, options = skewed(), {"local_steps": 1, "batch_size": 100, "precision": "fp64", "engine": "inline", "rounds": 1}
    unskew.run(fed, model=model, method="fedas", out=tmp_path / "run", **options)
    for client, data in enumerate(fed.clients):
        served = open_run(tmp_path / "run", client_number=client, model=model).module[1]
        a = model[0].double()(data.x.double()).detach()
        assert float((served.running_mean - 0.1 * a.mean(0)).abs().max()) < EXACT
        assert float((served.running_var - 0.9 - 0.1 * a.var(0)).abs().max()) < EXACT


@pytest.mark.parametrize(("options", "numbers"), [("fisher=true", 1), ("fisher=false", 0)])
def test_bytes_are_those_of_the_formula(options, numbers):
    summary = run(f"fedas:{options}", 0.5, model=two_layers())[0].summary
    visits = OPTIONS["rounds"] * 2
    assert summary["bytes_down"] == visits * BODY.stop * 8
    assert summary["bytes_up"] == visits * (BODY.stop + numbers) * 8


def test_a_model_without_a_body_and_options_without_an_effect_are_rejected():
    with pytest.raises(ConfigError, match="fedas shares the body of the model"):
        run("fedas")
    with pytest.raises(ConfigError, match="fedas:eta has no effect with epochs=0"):
        run("fedas:epochs=0,eta=0.1", model=two_layers())


def test_delays_are_rejected():
    with pytest.raises(ConfigError, match=r"network\.delay"):
        run("fedas", model=two_layers(), network={"delay": "fixed:1"})


def test_secure_aggregation_gives_the_same_vector():
    masked, plain = (run("fedas", model=two_layers(), secure_aggregation=value)[0] for value in ("required", "off"))
    assert torch.equal(masked.vector, plain.vector)
