"""Surveys and other initial models: the same on every engine, and as a NumPy loop over all samples computes them."""

import numpy as np
import pytest
import torch
from support.running import Stop, StopAfter
from support.tolerance import TRAINING, assert_close
from torch import nn

import unskew
from unskew.engines.local_trainer import LocalTrainer
from unskew.engines.vmap_trainer import GroupTrainer
from unskew.errors import ConfigError, MethodConflictError
from unskew.methods.qfedavg import QFedAvg
from unskew.protocol.rules import SHIFT, START

SIZES, FEATURES, HIDDEN, CLASSES, ROUNDS = (1203, 40, 700), 3, 4, 3, 2
"""More samples than one chunk; the sizes are multiples of neither a chunk nor a batch."""


class Small(nn.Module):
    """BatchNorm and dropout: eval mode gives other outputs than training."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x):
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


def federation():
    draws = np.random.default_rng(1)
    clients = []
    for n in SIZES:
        y = draws.integers(0, CLASSES, n)
        clients.append((draws.normal(size=(n, FEATURES)) + y[:, None], y))
    return unskew.Federation.from_arrays(clients, test=clients[1], classes=CLASSES, holdout=0)


def expected(v, b, client):
    """Sum of the losses, sum of the features by class and number of samples, in NumPy."""
    v, b = np.asarray(v), np.asarray(b)
    mean, var = b[:HIDDEN], b[HIDDEN : 2 * HIDDEN]
    edges = np.cumsum([FEATURES * HIDDEN, HIDDEN, HIDDEN, HIDDEN, HIDDEN * CLASSES])
    parts = np.split(v, edges)  # weight and bias of the first layer, scale, shift, weight and bias of the last layer
    loss, features = 0.0, np.zeros((CLASSES, HIDDEN))
    for x, y in zip(client.x.double().numpy(), client.y.tolist(), strict=True):
        a = parts[0].reshape(HIDDEN, FEATURES) @ x + parts[1]
        a = (a - mean) / np.sqrt(var + 1e-5) * parts[2] + parts[3]
        a = np.maximum(a, 0)
        z = parts[4].reshape(CLASSES, HIDDEN) @ a + parts[5]
        loss += np.log(np.exp(z - z.max()).sum()) + z.max() - z[y]
        features[y] += a
    return {"loss": loss, "features": features, "count": client.num_samples}


class Surveyor(unskew.ClientRule):
    """Uploads its survey, and shows the updates to the test."""

    name, summary, paper = "surveyor", "for tests", "none"
    uploads = True
    needs = ("individual",)

    def __init__(self, when):
        self.survey_at, self.seen = when, []

    def survey(self, ctx, v, forward, batch):
        output = forward(v, batch.x)
        sums = torch.zeros(CLASSES, HIDDEN, dtype=v.dtype, device=v.device)
        return {
            "loss": ctx.task.losses(output.logits, batch.y).sum(),
            "features": sums.index_add(0, batch.y, output.features),
            "count": torch.tensor(float(len(batch.y)), dtype=v.dtype),
        }

    def begin(self, ctx):
        return {} if self.survey_at == "trained" else {"early": ctx.survey["loss"]}

    def end(self, ctx, carry, v):
        ctx.upload.update(ctx.survey, early=carry.get("early", ctx.survey["loss"]))

    def server_update(self, state, updates):
        self.seen += [
            (updates.v_global, updates.b_global, update.client, update.delta, update.buffers, update.upload[self.name])
            for update in updates
        ]
        return state


def train(rule, engine="inline", **options):
    filled = {"rounds": ROUNDS, "lr": 0.1, "batch_size": 16, "local_steps": 3, "precision": "fp64", **options}
    return unskew.run(federation(), model=Small(), method=rule, engine=engine, workers=2, **filled)


ENGINES = [("inline", 1), ("inline", 3), ("processes", 1), ("processes", 2), ("vectorized", "auto")]


@pytest.mark.parametrize(("engine", "together"), ENGINES)
@pytest.mark.parametrize("when", ["received", "trained"])
def test_sums_are_those_of_a_loop_over_all_samples_in_eval_mode(when, engine, together, monkeypatch):
    rule, clients = Surveyor(when), federation().clients
    if together != 1:
        monkeypatch.setattr(GroupTrainer, "train", GroupTrainer.mapped)
    train(rule, engine, clients_per_group=together)
    assert len(rule.seen) == ROUNDS * len(SIZES)
    for v, b, k, delta, buffers, sums in rule.seen:
        model = (v, b) if when == "received" else (v + delta, buffers)
        for name, value in expected(*model, clients[k]).items():
            assert_close(sums[name].numpy(), value, TRAINING)
        assert torch.equal(sums["early"], sums["loss"])


@pytest.mark.parametrize("when", ["received", "trained"])
def test_a_resumed_run_is_the_same_bit_for_bit(when, tmp_path):
    whole, parts = Surveyor(when), Surveyor(when)
    train(whole, rounds=3)
    with pytest.raises(Stop):
        train(parts, rounds=3, out=tmp_path / "run", callbacks=[StopAfter(2)], checkpoint_every=1)
    parts.seen.clear()
    unskew.resume(tmp_path / "run", federation=federation(), model=Small(), method=parts)
    for old, new in zip(whole.seen[len(SIZES) :], parts.seen, strict=True):
        assert all(torch.equal(old[-1][name], new[-1][name]) for name in old[-1])


@pytest.mark.parametrize(("engine", "together"), ENGINES)
def test_a_rule_may_survey_the_received_and_the_trained_model(engine, together, monkeypatch):
    """The second survey sees the sums of the first, and the carry has those that ``begin`` keeps for ``end``."""

    class Both(Surveyor):
        def survey(self, ctx, v, forward, batch):
            first = ctx.survey["loss"] if ctx.survey else torch.zeros((), dtype=v.dtype)
            return {**super().survey(ctx, v, forward, batch), "product": len(batch.y) * first}

        def end(self, ctx, carry, v):
            ctx.upload.update(ctx.survey, early=carry["early"])

    rule, clients = Both(("received", "trained")), federation().clients
    if together != 1:
        monkeypatch.setattr(GroupTrainer, "train", GroupTrainer.mapped)
    train(rule, engine, clients_per_group=together)
    for v, b, k, delta, buffers, sums in rule.seen:
        for name, value in expected(v + delta, buffers, clients[k]).items():
            assert_close(sums[name].numpy(), value, TRAINING)
        received = expected(v, b, clients[k])["loss"]
        assert_close(sums["early"].numpy(), received, TRAINING)
        assert_close(sums["product"].numpy(), SIZES[k] * received, TRAINING)


def test_surveys_of_two_rules_at_different_times_stay_apart(monkeypatch):
    class Other(Surveyor):
        name = "other"

    monkeypatch.setattr(GroupTrainer, "train", GroupTrainer.mapped)
    first, second = Surveyor("received"), Other("trained")
    train([first, second], clients_per_group=3)
    for v, b, k, _, _, sums in first.seen:
        assert_close(sums["loss"].numpy(), expected(v, b, federation().clients[k])["loss"], TRAINING)


def test_a_survey_does_not_change_training():
    plain = train("fedavg")
    for when in ("received", "trained"):
        result = train(Surveyor(when))
        assert torch.equal(result.vector, plain.vector)


def test_other_sums_for_other_batches_are_refused():
    class Odd(Surveyor):
        def survey(self, ctx, v, forward, batch):
            return {"count": torch.zeros(len(batch.y))}

    with pytest.raises(ConfigError, match="same names and shapes"):
        train(Odd("received"))


def test_a_survey_returns_tensors():
    class Odd(Surveyor):
        def survey(self, ctx, v, forward, batch):
            return {"count": len(batch.y)}

    with pytest.raises(ConfigError, match="survey must return a dictionary of tensors"):
        train(Odd("received"))


def test_dpsgd_refuses_a_survey():
    class Plain(unskew.ClientRule):
        name, summary, paper = "plain", "for tests", "none"
        survey_at = "received"

        def survey(self, ctx, v, forward, batch):
            return {}

    with pytest.raises(MethodConflictError, match="sums values over all data"):
        unskew.method([Plain(), "dpsgd:noise=1"])


# ---- another initial model -----------------------------------------------------------------------------------------------


class Halved(unskew.ClientRule):
    """Training starts from half of the received model."""

    name, summary, paper = "halved", "for tests", "none"

    def begin(self, ctx):
        return {START: ctx.v_global / 2, "received": ctx.v_global}

    def end(self, ctx, carry, v):
        ctx.state["start"], ctx.upload["received"] = ctx.v_global, carry["received"]


class Later(unskew.ClientRule):
    """Uploads what later rules know as the initial model."""

    name, summary, paper = "later", "for tests", "none"
    needs = ("individual",)

    def __init__(self):
        self.seen = []

    def begin(self, ctx):
        return {"start": ctx.v_global}

    def end(self, ctx, carry, v):
        ctx.upload["start"] = carry["start"]

    def server_update(self, state, updates):
        self.seen += [(updates.v_global, u.client, u.delta, u.upload["later"]["start"]) for u in updates]
        return state


@pytest.mark.parametrize(("engine", "together"), ENGINES)
def test_training_starts_from_the_model_that_begin_returns(engine, together, monkeypatch):
    """One full-batch step of a linear model: the update is ``-lr grad f(theta / 2)``, without the half itself."""
    if together != 1:
        monkeypatch.setattr(GroupTrainer, "train", GroupTrainer.mapped)
    fed, later = federation(), Later()
    torch.manual_seed(0)
    unskew.run(
        fed, model=nn.Linear(FEATURES, CLASSES), method=[Halved(), later], engine=engine, clients_per_group=together,
        workers=2, rounds=ROUNDS, lr=0.1, batch_size=2000, local_steps=1, precision="fp64",
    )  # fmt: skip
    assert len(later.seen) == ROUNDS * len(SIZES)
    for v, k, delta, start in later.seen:
        assert torch.equal(start, v / 2)
        x, y = fed.clients[k].x.double(), fed.clients[k].y

        def loss(u, x=x, y=y):
            weights = FEATURES * CLASSES
            return nn.functional.cross_entropy(x @ u[:weights].view(CLASSES, FEATURES).T + u[weights:], y)

        assert_close(delta.numpy(), (-0.1 * torch.func.grad(loss)(v / 2)).numpy(), TRAINING)


@pytest.mark.parametrize("entry", [START, SHIFT])
@pytest.mark.parametrize(("engine", "together"), ENGINES)
def test_an_initial_model_or_a_shift_of_another_shape_is_refused(engine, together, entry):
    class Short(Halved):
        def begin(self, ctx):
            return {entry: ctx.v_global[1:]}

    with pytest.raises(ConfigError, match=rf'halved\.begin must return an entry "{entry}" like the model'):
        train(Short(), engine, clients_per_group=together)


def test_the_context_tells_the_final_training():
    class Final(unskew.ClientRule):
        name, summary, paper = "final", "for tests", "none"
        needs = ("final_training",)
        seen: list = []  # noqa: RUF012

        def begin(self, ctx):
            self.seen.append(ctx.final)
            return {}

    train(Final())
    assert Final.seen[: ROUNDS * len(SIZES)] == [False] * ROUNDS * len(SIZES)
    assert Final.seen[ROUNDS * len(SIZES) :]
    assert all(Final.seen[ROUNDS * len(SIZES) :])


class FullGradient(unskew.ClientRule):
    """Stores the full gradient of each client."""

    name, summary, paper, needs = "full-gradient", "", "", ("full_gradient",)

    def __init__(self):
        self.gradients = []

    def begin(self, ctx):
        self.gradients.append(ctx.full_gradient.clone())
        return {}


@pytest.mark.filterwarnings("ignore:With power-of-choice")
def test_gradients_and_losses_of_texts_are_means_over_tokens_whatever_the_batches(monkeypatch):
    draws = np.random.default_rng(0)
    x = draws.integers(0, 9, (7, 6))
    y = np.where(np.arange(6) < draws.integers(1, 7, (7, 1)), draws.integers(0, 9, (7, 6)), -1)
    fed = unskew.Federation.from_arrays([(x, y)], test=(x, y), task="language", classes=9, holdout=0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    # Independent of unskew: all texts in one batch, divided by the number of their tokens.
    logits = net.double()(torch.from_numpy(x)).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, torch.from_numpy(y).flatten(), ignore_index=-1)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])
    loss = float(loss.detach())

    settings = {"model": net, "rounds": 1, "local_steps": 1, "lr": 0.1, "precision": "fp64", "engine": "inline"}
    rule = FullGradient()
    for size in (2, 7):
        unskew.run(fed, method=rule, batch_size=size, **settings)
    for gradient in rule.gradients:
        assert_close(gradient, expected)

    losses = []
    begin, report = QFedAvg.begin, LocalTrainer.report_loss
    monkeypatch.setattr(QFedAvg, "begin", lambda *args: losses.append(begin(*args)["loss"]) or begin(*args))
    monkeypatch.setattr(
        LocalTrainer, "report_loss", lambda *args: losses.append(report(*args).metrics["loss"]) or report(*args)
    )
    unskew.run(fed, method="qfedavg", sampling="power-of-choice:1", **settings)
    assert len(losses) == 2
    assert [float(value) for value in losses] == pytest.approx([loss] * 2)
