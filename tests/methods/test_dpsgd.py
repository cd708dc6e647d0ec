"""Differential privacy of samples: clipped sums, noise, Poisson batches and accounting against their definitions."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from support.federations import SmallBatchNorm, blobs
from support.protocol import broadcast, facts, holdings
from support.running import Stop, StopAfter

import unskew
from unskew.engines.base import EngineConfig
from unskew.engines.batches import draw_poisson_batch
from unskew.engines.local_trainer import LocalTrainer
from unskew.engines.vmap_trainer import GroupTrainer
from unskew.errors import ConfigError, MethodConflictError, UnskewError
from unskew.methods.dpsgd import DPSGD, clipped_sum
from unskew.methods.fedavg import server_rule
from unskew.methods.registry import METHODS, method, rule_class
from unskew.models.execution import Batch
from unskew.models.spec import ModelSpec
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.training_config import Training
from unskew.secret_draws import SecretKey, SystemEntropy
from unskew.seeding import generator
from unskew.tasks.registry import TASKS
from unskew.testing import assert_engines_agree

SIZES = [9, 14, 9, 14, 9, 9, 14, 9]
FEW = {"rounds": 3, "local_steps": 2, "batch_size": 4, "lr": 0.05, "engine": "inline", "precision": "fp64"}
TASK = TASKS["classification"]
KEY, STEP = torch.tensor(7), torch.tensor(0)
LINEAR = ModelSpec(torch.nn.Linear(4, 3), (4,), 3, dtype=torch.float64)


class SmallDropout(SmallBatchNorm):
    """A convolution and dropout, without BatchNorm."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.Identity()


def run(expression, sizes=SIZES, **options):
    return unskew.run(blobs(sizes), **{"model": "logistic", "method": expression, **FEW, **options})


def a_batch(n, seed=0, scale=1.0):
    draws = np.random.default_rng(seed)
    x, y = torch.from_numpy(draws.normal(size=(n, 4)) * scale), torch.from_numpy(draws.integers(0, 3, n))
    return Batch(x, y, KEY, STEP)


def by_hand(v, batch, clip):
    """The clipped gradients of a linear layer with softmax, ``[n, d]``."""
    weight, bias = v[:12].reshape(3, 4).numpy(), v[12:].numpy()
    x, y = batch.x.numpy(), batch.y.numpy()
    logits = x @ weight.T + bias
    p = np.exp(logits - logits.max(1, keepdims=True))
    slope = p / p.sum(1, keepdims=True) - np.eye(3)[y]
    g = np.concatenate([(slope[:, :, None] * x[:, None, :]).reshape(len(x), 12), slope], axis=1)
    return g * np.minimum(1, clip / np.linalg.norm(g, axis=1))[:, None]


@pytest.mark.parametrize("portion", [1 << 26, 64 * 15])
def test_the_clipped_sum_is_the_one_by_hand(portion, monkeypatch):
    monkeypatch.setattr("unskew.methods.dpsgd.AT_ONCE", portion)
    v, batch = LINEAR.flatten(), a_batch(150)
    total, loss = clipped_sum(LINEAR, TASK, v, batch, 1.5)
    clipped = by_hand(v, batch, 1.5)
    assert np.abs(total.numpy() - clipped.sum(0)).max() < 1e-12
    assert 0.1 < float(np.mean(np.linalg.norm(clipped, axis=1) < 1.49)) < 0.9  # some are clipped, some are not
    assert float(loss) == pytest.approx(float(TASK.loss(LINEAR.forward(v, {}, batch.x).logits, batch.y)), rel=1e-12)


@pytest.mark.parametrize("engine", ["inline", "vectorized"])
def test_frozen_parameters_take_no_part_of_the_clipping_norm(engine):
    """One step of clipped gradients of whole batches of equal samples: its length is the clipping norm."""
    x, y = np.ones((10, 3), np.float32), np.zeros(10, int)
    fed = unskew.Federation.from_arrays([(x, y), (x, y)], test=(x, y), classes=2, normalize=False)
    options = {"rounds": 1, "local_steps": 1, "batch_size": 9, "lr": 1.0, "precision": "fp64", "engine": engine}
    for name in ("dpsgd:noise=0,clip=0.05", "dpsgd:noise=0,clip=0.05+fedbabu"):
        start = unskew.run(fed, model="mlp", method=name, **{**options, "lr": 1e-300}).vector
        moved = unskew.run(fed, model="mlp", method=name, **options).vector - start
        assert float(moved.norm()) == pytest.approx(0.05, rel=1e-9)


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_the_gradients_of_samples_are_those_of_opacus():
    opacus = pytest.importorskip("opacus")
    module, batch = torch.nn.Linear(4, 3, dtype=torch.float64), a_batch(9)
    spec = ModelSpec(module, (4,), 3, dtype=torch.float64)
    sampled = opacus.GradSampleModule(module, loss_reduction="sum")
    torch.nn.functional.cross_entropy(sampled(batch.x), batch.y, reduction="sum").backward()
    g = torch.cat([p.grad_sample.flatten(1) for p in sampled.parameters()], dim=1)
    expected = (g * (0.5 / g.norm(dim=1)).clamp(max=1)[:, None]).sum(0)
    total, _ = clipped_sum(spec, TASK, spec.flatten(), batch, 0.5)
    assert torch.allclose(total, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3, math.nan, math.inf])
def test_one_more_sample_changes_the_sum_by_at_most_the_clipping_norm(scale):
    v, batch = LINEAR.flatten(), a_batch(6)
    extra = a_batch(1, seed=9, scale=scale)
    extra = extra._replace(y=LINEAR.forward(v, {}, extra.x).logits.argmin(1))  # of a wrong class, so it is not 0
    more = batch._replace(x=torch.cat([batch.x, extra.x]), y=torch.cat([batch.y, extra.y]))
    change = clipped_sum(LINEAR, TASK, v, more, 0.7)[0] - clipped_sum(LINEAR, TASK, v, batch, 0.7)[0]
    norm = float(change.norm())
    assert norm <= 0.7 * (1 + 1e-12)
    assert norm == pytest.approx(0.7 if scale == 1e3 else norm)
    assert (norm > 0) is math.isfinite(scale)


def test_rows_of_weight_0_do_not_count():
    v, batch = LINEAR.flatten(), a_batch(8)
    weight = torch.tensor([1.0] * 5 + [0.0] * 3)
    filled = batch._replace(weight=weight, x=batch.x.clone().index_fill_(0, torch.tensor([6]), math.nan))
    first = batch._replace(x=batch.x[:5], y=batch.y[:5])
    for got, expected in zip(
        clipped_sum(LINEAR, TASK, v, filled, 1.0), clipped_sum(LINEAR, TASK, v, first, 1.0), strict=True
    ):
        assert torch.allclose(got, expected, rtol=1e-12, atol=1e-14)
    empty = batch._replace(weight=torch.zeros(8))
    assert all(not bool(value.any()) for value in clipped_sum(LINEAR, TASK, v, empty, 1.0))


def test_dropout_has_another_mask_for_each_sample():
    spec = ModelSpec(torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(64, 3)), (64,), 3, dtype=torch.float64)
    x = torch.ones(2, 64, dtype=torch.float64)
    total = clipped_sum(spec, TASK, spec.flatten() * 0, Batch(x, torch.tensor([0, 0]), KEY, STEP), 1e9)[0]
    kept = total[:64] / total[:64].min()  # by both samples, by one, or by none
    assert set(kept.round(decimals=6).abs().tolist()) == {0.0, 0.5, 1.0}


def noise_only(secret=None, steps=1):
    """A function that trains a client whose gradients are tiny compared with the noise, and returns that noise."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(72, 500), torch.nn.Linear(500, 3))
    fed, spec = blobs([50, 50]), ModelSpec(model, (2, 6, 6), 3, dtype=torch.float64)
    budget = Training(local_steps=steps, local_epochs=None, batch_size=10, lr=1.0)
    rules = (DPSGD(noise=1e6, clip=0.5),)
    setup = EngineConfig(spec, fed, rules, fed.objective, budget, 3, torch.device("cpu"), secret=secret)
    trainer, b = LocalTrainer(setup), spec.flatten_buffers()

    def train(round=0, client=0):
        return -10 * trainer.train(broadcast(round, client, v=spec.flatten(), b=b)).delta

    return train


@pytest.mark.parametrize("secret", [None, SecretKey(bytes(32)), SystemEntropy()], ids=["seed", "key", "system"])
def test_the_noise_has_the_stated_deviation(secret):
    train = noise_only(secret)
    first, again, later, other = (train(*where) for where in ((0, 0), (0, 0), (1, 0), (0, 1)))
    d = len(first)
    assert torch.equal(first, again) is not isinstance(secret, SystemEntropy)
    for noise in (first, later, other):
        assert abs(float(noise.mean())) < 5 * 5e5 / math.sqrt(d)
        assert abs(float(noise.std()) / 5e5 - 1) < 5 / math.sqrt(2 * d)
    for noise in (later, other):
        assert abs(float(np.corrcoef(first, noise)[0, 1])) < 5 / math.sqrt(d)
    both = noise_only(secret, steps=2)()  # each step has its own noise
    assert abs(float(both.std()) / (5e5 * math.sqrt(2)) - 1) < 5 / math.sqrt(2 * d)


def test_batches_are_poisson_samples():
    n, size, steps = 40, 9, 4000
    rng = generator(0, "batches")
    counts, rows, together = np.zeros(n), set(), 0
    sizes = []
    for _ in range(steps):
        index, weight = draw_poisson_batch(torch.rand(n, generator=rng, dtype=torch.float64), size)
        chosen = index[weight > 0]
        assert len(set(chosen.tolist())) == len(chosen)
        assert set(index[weight == 0].tolist()) <= {0}
        counts[chosen] += 1
        sizes.append(len(chosen))
        rows.add(len(index))
        together += {0, 1} <= set(chosen.tolist())
    q = size / n
    assert np.abs(counts / steps - q).max() < 5 * math.sqrt(q * (1 - q) / steps)
    assert np.mean(sizes) == pytest.approx(size, abs=5 * math.sqrt(n * q * (1 - q) / steps))
    assert np.var(sizes) == pytest.approx(n * q * (1 - q), rel=0.15)
    assert together / steps == pytest.approx(q * q, abs=5 * q / math.sqrt(steps))
    assert rows <= {6, 12, 18, 24, 30}
    index, weight = draw_poisson_batch(torch.rand(5), 9)
    assert index.tolist() == [0, 1, 2, 3, 4]
    assert bool(weight.all())
    empty = [draw_poisson_batch(torch.rand(1000, generator=rng, dtype=torch.float64), 1) for _ in range(20)]
    assert min(float(weight.sum()) for _, weight in empty) == 0
    assert all(len(index) for index, _ in empty)


def test_without_noise_and_clipping_full_batches_are_gradient_descent():
    full = {"batch_size": 14, "local_steps": 3, "weight_decay": 0.01, "momentum": 0.5}
    for expression in ("fedavg", "fedprox:mu=0.5", "scaffold"):
        with pytest.warns(UserWarning, match="there is no privacy"):
            private = run(f"{expression}+dpsgd:noise=0,clip=1e6,reveal=true", **full)
        plain = run(expression, **full)
        assert torch.allclose(private.vector, plain.vector, rtol=1e-9, atol=1e-12), expression
        for mine, theirs in zip(private.history, plain.history, strict=True):
            assert mine["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-9)
        assert private.summary["epsilon"] is None
        assert private.summary["privacy"].startswith("None")


@pytest.mark.usefixtures("one_key")
def test_dpsgd_acts_first_in_any_order(monkeypatch):
    monkeypatch.setattr(SecretKey, "within", lambda key, _: key)  # the key also follows from the spelling
    expressions = ("dpsgd:noise=0.5+fedprox:mu=1+scaffold", "fedprox:mu=1+scaffold+dpsgd:noise=0.5")
    assert [rule.name for rule in method(expressions[1]).client] == ["dpsgd", "fedprox", "scaffold"]
    first, last = (run(expression, rounds=2) for expression in expressions)
    assert torch.equal(first.vector, last.vector)
    assert not torch.allclose(first.vector, run("dpsgd:noise=0.5+scaffold", rounds=2).vector)


EXPRESSION = "fedprox+dpsgd:noise=0.7+scaffold"


@pytest.mark.usefixtures("one_key")
@pytest.mark.parametrize("engine", ["vectorized", "processes", "grouped"])
def test_engines_agree(engine, monkeypatch):
    given = {"model": SmallDropout(), "local_steps": None, "local_epochs": 1, "participation": 0.7, "momentum": 0.5}
    torch.manual_seed(0)
    reference = run(EXPRESSION, **given)
    if engine == "grouped":
        monkeypatch.setattr(GroupTrainer, "train", GroupTrainer.mapped)  # together or not at all
        engine, given["clients_per_group"] = "inline", 4
    other = run(EXPRESSION, **{**given, "engine": engine, "workers": 2})
    assert_engines_agree(other.vector, reference.vector)
    assert other.summary["epsilon"] == reference.summary["epsilon"]
    assert [row.get("epsilon") for row in other.clients] == [row.get("epsilon") for row in reference.clients]


@pytest.mark.usefixtures("one_key")
def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path):
    given = {"participation": 0.5, "checkpoint_every": 1}
    whole = run(EXPRESSION, rounds=4, **given)
    with pytest.raises(Stop):
        run(EXPRESSION, rounds=4, out=tmp_path / "a", callbacks=[StopAfter(2)], **given)
    resumed = unskew.resume(tmp_path / "a", federation=blobs(SIZES))
    assert torch.equal(resumed.vector, whole.vector)
    assert resumed.clients == whole.clients
    more = run("dpsgd:noise=0.9", rounds=5, start_from=str(tmp_path / "a"))
    before = {row["client"]: row["epsilon"] for row in whole.clients if "epsilon" in row}
    assert all(row["epsilon"] > before.get(row["client"], 0) for row in more.clients)
    run("fedavg", rounds=1, out=tmp_path / "b")
    with pytest.raises(ConfigError, match="trained without dpsgd"):
        run("dpsgd:noise=1", start_from=str(tmp_path / "b"))


def test_epsilon_is_that_of_opacus_for_the_steps_of_each_client():
    accountants = pytest.importorskip("opacus.accountants")

    @cache
    def by_opacus(n, steps):
        accountant = accountants.RDPAccountant()
        accountant.history = [(1.3, 4 / n, steps)]
        return accountant.get_epsilon(delta=n**-1.1)

    result = run("dpsgd:noise=1.3,clip=2", participation=0.5, rounds=2, local_steps=None, local_epochs=2)
    took_part = 0
    for row in result.clients:
        n = row["samples"]
        if "epsilon" not in row:
            continue
        took_part += 1
        known = [by_opacus(n, rounds * 2 * math.ceil(n / 4)) for rounds in (1, 2)]
        assert min(abs(row["epsilon"] - epsilon) for epsilon in known) < 1e-9
        assert row["delta"] == n**-1.1
    assert 4 <= took_part <= 8
    worst = max((row for row in result.clients if "epsilon" in row), key=lambda row: row["epsilon"])
    assert (result.summary["epsilon"], result.summary["delta"]) == (worst["epsilon"], worst["delta"])
    assert "one sample of one client" in result.summary["privacy"]
    assert all(row["train_loss"] is None for row in result.history)


def test_each_client_has_the_noise_for_epsilon():
    result = run("dpsgd:epsilon=6,delta=0.01", sizes=[8, 40])
    assert all(5.9 < row["epsilon"] <= 6 for row in result.clients)
    rule = DPSGD(epsilon=6, delta=0.01)
    noises = [rule.noise_of(n, 6, 4) for n in (8, 40)]
    assert noises == sorted(noises, reverse=True)
    plan = RoundPlan(rounds=3, training=Training(local_steps=2, batch_size=4))
    info = rule.client_info(replace(holdings(blobs([8, 40]), 1), plan=plan))
    assert {name: float(value) for name, value in info.items()} == {"noise": noises[1], "size": 4.0}
    with pytest.raises(ConfigError, match=r"above 0\.5"):
        run("dpsgd:noise=0.5,epsilon=0.5,delta=0.01", sizes=[8, 8])
    assert run("dpsgd:noise=20,epsilon=6,delta=0.01", sizes=[8, 8], rounds=1).summary["epsilon"] < 6


@pytest.mark.filterwarnings("ignore:The model did not change")
def test_all_updates_that_arrived_are_counted():
    rule = DPSGD(noise=1.0)
    state = rule.server_init(torch.zeros(3), facts(4))
    plan = RoundPlan(rounds=5, training=Training(local_steps=7, batch_size=2))
    for clients in ([0, 2], [2], [2, 2]):
        state = rule.record_clients(state, clients, plan)
    assert {int(row[0]): row[3] for row in state["spent"].tolist()} == {0: 7.0, 2: 28.0}
    with pytest.warns(UserWarning, match="not finite"):
        result = run("dpsgd:noise=1e35", lr=1e6, precision="fp32", rounds=1)
    assert result.summary["updates_skipped"] == 8
    assert all("epsilon" in row for row in result.clients)


def test_both_kinds_of_privacy_are_reported():
    result = run("dpsgd:noise=1+dp:noise=1,adaptive=false,delta=0.01")
    assert "all data of one client" in result.summary["privacy"]
    assert "one sample of one client" in result.summary["dpsgd_privacy"]
    assert result.summary["epsilon"] != result.summary["dpsgd_epsilon"] > 0


SUPPORTED = {
    *(
        "fedprox",
        "scaffold",
        "feddyn",
        "fednova",
        "fedpvr",
        "fedacg",
        "fedlesam",
        "fedals",
        "fedrep",
        "fedper",
        "fedsa",
        "lgfedavg",
        "fedbabu",
        "fedbn",
    ),
    *("fedexp", "ft", "dp", "smooth", "topk", "randk", "qsgd", "sign", "int8", "fp16", "bf16", "powersgd"),
}
"""Methods with a part at the clients that sees no samples, or only one gradient per step."""


def has_only_server_rules(name):
    """Return whether a method changes nothing at the clients, and trains with them."""
    own = method(name)
    return not (own.data or own.client or own.sync) and server_rule(own).steps_without != "clients"


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"dpsgd"}))
def test_methods_that_see_samples_in_another_way_are_rejected(name):
    if name in SUPPORTED or has_only_server_rules(name):
        method(f"{name}+dpsgd:noise=1")
        return
    with pytest.raises(MethodConflictError) as error:
        method(f"{name}+dpsgd:noise=1")
    assert method(name).rules[0].name in str(error.value)
    assert "dpsgd" in str(error.value)


def test_a_hook_that_sees_samples_is_rejected():
    class Own(unskew.ClientRule):
        name, summary, paper = "own", "", ""

        def gradient(self, grad_fn, ctx, carry):
            return grad_fn

    with pytest.raises(MethodConflictError, match="own may use a batch"):
        method([Own(), "dpsgd:noise=1"])
    with pytest.raises(ConfigError, match="Use option II"):
        method("scaffold:option=I+dpsgd:noise=1")
    assert rule_class("dpsgd").poisson_batches
    assert not rule_class("dp").poisson_batches


@pytest.mark.parametrize(
    ("expression", "options", "words"),
    [
        ("dpsgd", {}, "needs noise or epsilon"),
        ("dpsgd:noise=1,delta=0.2", {}, "must be below 1/"),
        ("dpsgd:noise=0,epsilon=8", {}, "dpsgd:epsilon has no effect with noise=0"),
        ("dpsgd:noise=1", {"model": "resnet20"}, "BatchNorm"),
        ("dpsgd:noise=1", {"diagnose": "updates"}, "reveal=true"),
        ("dpsgd:noise=1", {"class_weights": "balanced"}, "Statistics of the clients"),
    ],
)
def test_what_would_not_be_protected_is_reported_before_training(expression, options, words):
    with pytest.raises(UnskewError, match=words):
        unskew.run(blobs(SIZES, shape=(3, 8, 8)), **{"model": "mlp", "method": expression, **FEW, **options})


def test_an_accountant_that_does_not_matter_is_named():
    with pytest.warns(UserWarning, match="accountant=prv has no effect"):
        run("dpsgd:noise=1,accountant=prv", batch_size=max(SIZES), rounds=1)
