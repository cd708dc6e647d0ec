"""Differential privacy of clients: sensitivity, noise, adaptive clipping and accounting against their definitions."""

import math

import numpy as np
import pytest
import torch
from support.federations import blobs
from support.protocol import an_update, facts, some_updates
from support.running import Stop, StopAfter

import unskew
from unskew.errors import ConfigError, MethodConflictError, UnskewError
from unskew.methods.dp import DP
from unskew.models.spec import ModelSpec
from unskew.privacy.accounting import GaussianRounds, epsilon, exact_epsilon
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.messages import Update
from unskew.protocol.payload import UploadContext
from unskew.protocol.round_plan import RoundPlan
from unskew.secret_draws import NoiseSource, SecretKey, SystemEntropy

SIZES = [9, 14, 11, 8, 12, 10, 9, 13]
FEW = {"rounds": 3, "local_steps": 2, "batch_size": 4, "lr": 0.05, "engine": "inline", "precision": "fp64"}
SPEC = ModelSpec(torch.nn.Linear(4, 3), (4,), 3, dtype=torch.float64)
SIZE = SPEC.size


def run(method, **options):
    return unskew.run(blobs(SIZES), model="mlp", method=method, **{**FEW, **options})


def clip(rule, streams, clip_norm, scales=None):
    plan = RoundPlan(clients=8, cohort=4, scales=scales or {})
    limits = torch.full((1 if rule.streams == "joint" else len(streams),), clip_norm, dtype=torch.float64)
    ctx = UploadContext(0, 0, 0, SPEC, None, plan, {"clip": limits})
    return rule.encode(streams, {}, ctx)[0]


def vector(length, seed=0):
    direction = torch.from_numpy(np.random.default_rng(seed).normal(size=SIZE))
    return direction * (length / direction.norm())


@pytest.mark.parametrize("per_layer", [False, True])
def test_an_update_whose_squares_overflow_contributes_nothing(per_layer):
    clipped = clip(DP(noise=1.0, per_layer=per_layer), {"update": vector(1e160)}, 1.0)
    assert float(clipped["update"].abs().max()) == 0.0
    assert float(clipped["dp/bits"]) == -0.5


@pytest.mark.parametrize("length", [0.0, 1e-30, 0.3, 1.0, 1.5, 1e30])
def test_no_update_is_longer_than_the_clipping_norm(length):
    rule = DP(noise=1.0)
    clipped = clip(rule, {"update": vector(length)}, 1.0)
    norm = float(clipped["update"].norm())
    assert norm <= 1.0
    assert norm == pytest.approx(min(length, 1.0), rel=1e-12)
    assert float(clipped["dp/bits"]) == (0.5 if length <= 1.0 else -0.5)
    single = clip(DP(noise=1.0), {"update": vector(1e-3 + length).float()}, 0.1)["update"]
    assert float(single.double().norm()) <= 0.1


def test_streams_are_clipped_as_one_vector_in_the_unit_of_the_update():
    streams = {"update": vector(3.0), "scaffold/change": vector(40.0, seed=1)}
    clipped = clip(DP(noise=1.0, adaptive=False), streams, 1.0, {"scaffold/change": 0.1})
    factor = 1 / math.hypot(3.0, 4.0)
    assert torch.allclose(clipped["update"], streams["update"] * factor, rtol=1e-12)
    assert torch.allclose(clipped["scaffold/change"], streams["scaffold/change"] * factor, rtol=1e-12)
    apart = clip(DP(noise=1.0, adaptive=False, streams="apart"), streams, 1.0, {"scaffold/change": 0.1})
    assert float(apart["update"].norm()) == pytest.approx(1.0)
    assert float(apart["scaffold/change"].norm()) == pytest.approx(10.0)


def test_layers_are_clipped_to_equal_shares():
    update = vector(5.0)
    clipped = clip(DP(noise=1.0, adaptive=False, per_layer=True), {"update": update}, 1.0)["update"]
    for before, after in zip(torch.split(update, SPEC.sizes), torch.split(clipped, SPEC.sizes), strict=True):
        limit = 1 / math.sqrt(2)
        assert float(after.norm()) == pytest.approx(min(float(before.norm()), limit), rel=1e-12)


def combine(rule, vectors, plan, round=0, state=None, seed=0, secret=None):
    v = torch.zeros(len(vectors[0]) if vectors else SIZE, dtype=torch.float64)
    info = FederationInfo(**{**facts(plan.clients).__dict__, "plan": plan})
    state = rule.server_init(v, info) if state is None else state
    sent = [an_update(k, delta) for k, delta in enumerate(vectors)]
    updates = some_updates(sent, round, v, plan=plan, noise=NoiseSource(seed, secret))
    return rule.combine(state, updates)


def test_one_client_changes_the_sum_by_at_most_the_clipping_norm():
    """The divisor is fixed: it does not depend on who replied."""
    plan = RoundPlan(clients=8, cohort=4, participation=0.5)
    rule = DP(noise=1.0, clip=0.7, adaptive=False)
    others = [clip(rule, {"update": vector(2.0, seed)}, 0.7)["update"] for seed in range(3)]
    last = clip(rule, {"update": vector(1e20, 9)}, 0.7)["update"]
    with_it, without = (combine(rule, updates, plan)[1].delta for updates in ([*others, last], others))
    assert 4 * float((with_it - without).norm()) == pytest.approx(0.7, rel=1e-12)
    assert 4 * float((with_it - without).norm()) <= 0.7 * (1 + 1e-12)
    poisson = RoundPlan(clients=8, cohort=4, participation=0.3, sampling="poisson")
    mean = combine(DP(noise=0.0, clip=0.7, adaptive=False), others, poisson)[1].delta
    assert torch.allclose(mean, sum(others) / (0.3 * 8), rtol=1e-12)


@pytest.mark.parametrize("secret", [None, SecretKey(bytes(32))])
def test_the_noise_has_the_stated_deviation_also_in_an_empty_round(secret):
    plan = RoundPlan(clients=100, cohort=10, participation=0.1, sampling="poisson")
    rule, d = DP(noise=1.3, clip=0.5, adaptive=False), 100_000
    zeros = [torch.zeros(d, dtype=torch.float64)] * 3
    first = combine(rule, zeros, plan, secret=secret)[1].delta * 10
    again = combine(rule, zeros, plan, secret=secret)[1].delta * 10
    later = combine(rule, zeros, plan, round=1, secret=secret)[1].delta * 10
    assert torch.equal(first, again)
    for noise in (first, later):
        assert abs(float(noise.mean())) < 5 * 0.65 / math.sqrt(d)
        assert abs(float(noise.std()) / 0.65 - 1) < 5 / math.sqrt(2 * d)
    assert abs(float(np.corrcoef(first, later)[0, 1])) < 5 / math.sqrt(d)
    assert float(combine(rule, [], plan, secret=secret)[1].delta.norm()) > 0
    fresh = [combine(rule, zeros, plan, secret=SystemEntropy())[1].delta for _ in range(2)]
    assert not torch.equal(*fresh)


@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("start", [0.1, 10.0])
def test_the_clipping_norm_reaches_the_quantile(quantile, start):
    """With the opposite sign it would run away."""
    plan = RoundPlan(clients=50, cohort=50)
    rule = DP(noise=0.0, clip=start, quantile=quantile)
    norms = np.linspace(0.5, 1.5, 50)
    state = rule.server_init(
        torch.zeros(SIZE, dtype=torch.float64), FederationInfo(**{**facts(50).__dict__, "plan": plan})
    )
    for round in range(120):
        limit = float(state["clip"])
        bits = [{"dp": {"bits": torch.tensor([0.5 if norm <= limit else -0.5])}} for norm in norms]
        sent = [an_update(k, torch.zeros(SIZE, dtype=torch.float64), upload=bit) for k, bit in enumerate(bits)]
        updates = some_updates(sent, round, torch.zeros(SIZE, dtype=torch.float64), plan=plan)
        state, _ = rule.combine(state, updates)
    assert float(state["clip"]) == pytest.approx(0.5 + quantile, rel=0.05)


def test_without_noise_and_clipping_it_is_the_method_alone():
    for method in ("fedavg", "scaffold", "fedadam", "fedprox+fedavgm"):
        alone = run(method, client_weighting="uniform", participation=0.5)
        private = run(f"{method}+dp:noise=0,clip=inf,adaptive=false", participation=0.5)
        assert torch.equal(alone.vector, private.vector), method
        assert private.summary["epsilon"] is None


@pytest.mark.parametrize("method", ["dp:noise=1,bit_noise=2", "scaffold+dp:noise=0.7,adaptive=false,streams=apart"])
@pytest.mark.usefixtures("one_key")
def test_resumed_runs_and_other_engines_have_the_same_noise(method, tmp_path):
    given = {"sampling": "poisson", "participation": 0.4, "checkpoint_every": 1}
    whole = run(method, rounds=4, **given)
    with pytest.raises(Stop):
        run(method, rounds=4, out=tmp_path / "a", callbacks=[StopAfter(2)], **given)
    resumed = unskew.resume(tmp_path / "a", federation=blobs(SIZES))
    assert torch.equal(resumed.vector, whole.vector)
    assert resumed.summary["epsilon"] == whole.summary["epsilon"]
    vectorized = run(method, rounds=4, **given, engine="vectorized")
    assert torch.allclose(vectorized.vector, whole.vector, rtol=1e-9, atol=1e-12)
    counts = [row["cohort"] for row in whole.history]
    assert len(set(counts)) > 1


def test_epsilon_is_that_of_the_finished_rounds():
    result = run("dp:noise=1.1,adaptive=false,delta=0.01", participation=0.5)
    expected = [epsilon([GaussianRounds(1.1, 1.0, t)], 0.01) for t in (1, 2, 3)]
    assert [row["epsilon"] for row in result.history] == pytest.approx(expected)
    assert result.summary["epsilon"] == pytest.approx(expected[-1])
    assert "one client" in result.summary["privacy"]
    assert all(row["train_loss"] is None for row in result.history)
    # Cohorts of 4 of 8 clients: another client takes the place of one that is removed.
    replaced = exact_epsilon(2 * math.sqrt(3) / 1.1, 0.01)
    assert result.summary["epsilon_replaced"] == pytest.approx(replaced)
    assert result.summary["gaussian_mu"] == pytest.approx(math.sqrt(3) / 1.1)
    assert "one client, replaced by none" in result.summary["privacy"]
    assert f"(epsilon={replaced:.4g} if the client is added, removed or replaced" in result.summary["privacy"]
    assert "the models of all 3 rounds" in result.summary["privacy"]
    everybody = run("dp:noise=1.1,adaptive=false,delta=0.01").summary
    assert "one client, added or removed" in everybody["privacy"]
    assert everybody["epsilon_replaced"] == pytest.approx(replaced)
    shown = run("dp:noise=1.1,adaptive=false,delta=0.01,reveal=true", participation=0.5)
    assert all(row["train_loss"] > 0 for row in shown.history)


def test_a_round_whose_server_step_overflows_is_counted():
    method = "fedavg:eta=3e38+dp:noise=1.1,clip=1000,adaptive=false,delta=0.01"
    with pytest.warns(UserWarning, match="overflow|not finite"):
        result = run(method, precision="fp32")
    assert [row["updates"] for row in result.history] == [0, 0, 0]
    expected = [epsilon([GaussianRounds(1.1, 1.0, t)], 0.01) for t in (1, 2, 3)]
    assert [row["epsilon"] for row in result.history] == pytest.approx(expected)
    with pytest.warns(UserWarning, match="The privacy budget is spent"):
        short = run(method.replace("delta", "epsilon=4,delta"), precision="fp32")
    assert len(short.history) < 3


def test_the_noise_for_an_epsilon_lasts_all_rounds_and_a_budget_ends_a_run(tmp_path):
    result = run("dp:epsilon=6,adaptive=false,delta=0.01", out=tmp_path / "a")
    assert 5.9 < result.summary["epsilon"] <= 6.0
    z = result.summary["noise_multiplier"]
    with pytest.warns(UserWarning, match="The privacy budget is spent"):
        short = run(f"dp:noise={z / 1.3},epsilon=6,adaptive=false,delta=0.01")
    assert 0 < len(short.history) < 3
    assert short.summary["epsilon"] <= 6.0
    with pytest.warns(UserWarning, match="The privacy budget is spent"):
        more = unskew.resume(tmp_path / "a", federation=blobs(SIZES), rounds=5)
    assert len(more.history) == 3


def test_a_run_that_starts_from_another_adds_its_privacy(tmp_path):
    method = "dp:noise=1.2,adaptive=false,delta=0.01"
    run(method, out=tmp_path / "a", rounds=2)
    rest = run(method, rounds=4, start_from=str(tmp_path / "a"))
    assert rest.summary["epsilon"] == pytest.approx(epsilon([GaussianRounds(1.2, 1.0, 4)], 0.01))
    with pytest.warns(UserWarning, match="The privacy budget is spent"):  # with the noise of the new rounds
        spent = run("dp:noise=0.9,epsilon=6,adaptive=false,delta=0.01", rounds=6, start_from=str(tmp_path / "a"))
    assert spent.summary["epsilon"] <= 6.0
    other = run(method.replace("1.2", "2.4"), rounds=3, start_from=str(tmp_path / "a"))
    both = [GaussianRounds(1.2, 1.0, 2), GaussianRounds(2.4, 1.0, 1)]
    assert other.summary["epsilon"] == pytest.approx(epsilon(both, 0.01))
    # The budget counts rounds as they are sampled now, not as those of the first run.
    poisson = {"sampling": "poisson", "participation": 0.2}
    method = "dp:noise=1,epsilon=6,adaptive=false,delta=0.01"
    run(method, out=tmp_path / "c", rounds=2, **poisson)
    with pytest.warns(UserWarning, match="The privacy budget is spent"):
        more = run(method, rounds=20, start_from=str(tmp_path / "c"), **{**poisson, "participation": 0.9})
    assert more.summary["epsilon"] <= 6.0
    run("fedavg", out=tmp_path / "b", rounds=2)
    with pytest.raises(ConfigError, match="trained without dp"):
        run(method, rounds=4, start_from=str(tmp_path / "b"))


@pytest.mark.usefixtures("one_key")
@pytest.mark.filterwarnings("ignore:delta=0.1 is large")
def test_an_update_that_is_not_finite_contributes_nothing(monkeypatch):
    monkeypatch.setattr(SecretKey, "within", lambda key, _: key)  # another method would draw other noise
    fed = blobs(SIZES)

    class Broken(unskew.ClientRule):
        name, summary, paper = "broken", "", ""

        def client_info(self, data):
            return {"bad": torch.tensor(float(data.client.num_samples == 14))}

        def transform_update(self, ctx, carry, delta):
            return torch.where(ctx.client_info["bad"] > 0, delta * torch.nan, delta)

    noise = "dp:noise=1,adaptive=false,clip=0.1"
    with pytest.warns(UserWarning, match="not finite"):
        broken = unskew.run(fed, model="mlp", method=[Broken(), noise], **{**FEW, "rounds": 1})
    assert bool(torch.isfinite(broken.vector).all())
    whole = unskew.run(fed, model="mlp", method=noise, **{**FEW, "rounds": 1})
    # The noise and the divisor are those of the whole cohort.
    assert float((broken.vector - whole.vector).norm()) <= 0.1 / 8 * (1 + 1e-9)


@pytest.mark.parametrize(
    "method",
    [
        "fedgen",
        "feddf",
        "dense",
        "feddle",
        "fedasync",
        "ca2fl",
        "fedbuff",
        "fednova",
        "fedexp",
        "median",
        "center",
        "feddm",
    ],
)
def test_methods_that_need_more_than_a_private_sum_are_rejected(method):
    with pytest.raises(MethodConflictError):
        unskew.method(f"{method}+dp:noise=1")


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("dp", {}, "needs noise or epsilon"),
        ("dp:noise=1", {}, "a cohort of 11 clients suffices"),
        ("dp:noise=1e6", {}, "a cohort of 10000001 clients suffices"),
        ("dp:noise=1e30", {}, "less than or equal to 1000000"),
        ("dp:noise=0.5,epsilon=3,adaptive=false", {}, "the first round alone"),
        ("dp:noise=1,adaptive=false,delta=0.2", {}, "delta"),
        ("dp:noise=1,adaptive=false", {"client_weighting": "samples"}, "public_sizes"),
        ("dp:noise=1,adaptive=false", {"diagnose": "updates"}, "reveal=true"),
        ("dp:noise=1,adaptive=false", {"network": "fixed:1"}, "network.delay"),
        ("dp:noise=1,adaptive=false", {"class_weights": "balanced"}, "Statistics of the clients"),
        ("dp:noise=1,adaptive=false", {"model": "resnet20"}, "normalization buffers"),
        ("dp:noise=1,clip=inf", {}, "clip=inf"),
        ("dp:noise=1,adaptive=false,clip_lr=0.3", {}, "dp:clip_lr has no effect with adaptive=false"),
        ("dp:noise=1,adaptive=false,quantile=0.9", {}, "dp:quantile has no effect"),
        ("dp:noise=1,adaptive=false,bit_noise=2", {}, "dp:bit_noise has no effect"),
        ("dp:noise=0,epsilon=8", {}, "dp:epsilon has no effect with noise=0"),
        ("scaffold+dp:noise=1,adaptive=false,public_sizes=true", {}, "nothing besides the model"),
        ("heterofl+dp:noise=1,adaptive=false", {}, "With heterofl, clients upload different slices"),
        ("fedrolex+dp:noise=1,adaptive=false", {}, "With fedrolex, clients upload different slices"),
        ("scaffold+dp:noise=1,adaptive=false", {"local_steps": None, "local_epochs": 1}, "needs local_steps"),
    ],
)
def test_what_would_not_be_protected_is_reported_before_training(method, options, words):
    fed = blobs(SIZES, shape=(3, 8, 8))
    with pytest.raises(UnskewError, match=words):
        unskew.run(fed, **{"model": "mlp", "method": method, **FEW, **options})


def test_slices_that_depend_on_the_client_are_an_error_whether_it_takes_part_or_not():
    """Entries of the model that change without noise, or not at all, would show who took part."""

    class Halves(unskew.SyncRule):
        name, summary, paper = "halves", "", ""

        def exchanged_slices(self, state, round, client, last, spec):
            part = slice(0, spec.size if round == 1 and client == self.wide else spec.size // 2)
            return (part,), (part,)

    for Halves.wide in range(8):  # one client takes part in a round
        with pytest.raises(ConfigError, match="With halves, clients upload different slices"):
            run([Halves(), "dp:noise=1,adaptive=false,delta=0.01"], rounds=2, participation=1 / 8)


def test_options_without_effect_are_named():
    with pytest.warns(UserWarning, match="streams=apart has no effect"):
        run("dp:noise=1,adaptive=false,delta=0.01,streams=apart", rounds=1)
    with pytest.warns(UserWarning, match="accountant=prv has no effect"):
        run("dp:noise=1,adaptive=false,delta=0.01,accountant=prv", rounds=1)


def test_public_sizes_weight_clients_by_samples():
    alone = run("fedavg", client_weighting="samples")
    private = run("dp:noise=0,clip=1e6,adaptive=false,public_sizes=true", client_weighting="samples")
    assert torch.allclose(alone.vector, private.vector, rtol=1e-12, atol=1e-14)


def test_a_codec_of_ones_own_that_compresses_is_rejected():
    class Blow(unskew.ClientRule):
        name, summary, paper, stage = "blow", "", "", "compress"

        def encode(self, payload, state, ctx):
            return payload, state

    with pytest.raises(MethodConflictError, match="longer than the one that dp has clipped"):
        unskew.method(["dp:noise=1", Blow()])


def test_an_upload_that_is_not_declared_is_an_error():
    ctx = UploadContext(0, 0, 0, SPEC, None, RoundPlan(clients=8), {"clip": torch.ones(1, dtype=torch.float64)})
    with pytest.raises(ConfigError, match="without declaring it as private"):
        DP(noise=1.0).encode({"update": vector(1.0), "other/x": vector(1.0)}, {}, ctx)
    assert Update.of(an_update().fields(), {}).sent_bytes is None
