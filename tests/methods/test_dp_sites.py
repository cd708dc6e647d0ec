"""``dp`` with noise at the sites, in a simulation: clipping, the decoded sum, its noise, and what is rejected."""

import math

import numpy as np
import pytest
import torch
from support.federations import blobs
from support.protocol import an_update, facts, some_updates
from support.running import Stop, StopAfter

import unskew
from unskew.errors import ConfigError, UnskewError
from unskew.methods.registry import method as method_of
from unskew.models.spec import ModelSpec
from unskew.privacy.skellam import skellam_epsilon
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.payload import UploadContext, pack_streams, unpack_streams
from unskew.protocol.round_plan import RoundPlan

SIZES = [9, 14, 11, 8, 12, 10, 9, 13]
FEW = {"rounds": 3, "local_steps": 2, "batch_size": 4, "lr": 0.05, "engine": "inline", "precision": "fp64"}
SITES = "noise_at=sites,adaptive=false"
PLAN = RoundPlan(clients=8, cohort=6)


def run(method, **options):
    return unskew.run(blobs(SIZES), model="mlp", method=method, **{**FEW, **options})


def spec_of(size):
    return ModelSpec(torch.nn.Linear(size - 1, 1), (size - 1,), 1, dtype=torch.float64)


def rule_of(options):
    return method_of(f"dp:{SITES},{options}").aggregate


def sent_by(rule, client, delta, spec, plan=PLAN, upload=None, up=None):
    """The update that arrives at the server."""
    ctx = UploadContext(0, client, 5, spec, up, plan)
    encoded, _ = rule.encode(pack_streams(delta, upload or {}, up), {}, ctx)
    decoded, uploads = unpack_streams(rule.decode(encoded, ctx), ctx)
    return an_update(client, decoded, upload=uploads)


def mean_of(rule, updates, spec, plan=PLAN):
    v = spec.flatten()
    state = rule.server_init(v, FederationInfo(**{**facts(plan.clients).__dict__, "plan": plan}))
    return rule.combine(state, some_updates(updates, 0, v, plan=plan))


def vector(size, length, seed):
    direction = torch.from_numpy(np.random.default_rng(seed).normal(size=size))
    return direction * (length / direction.norm())


@pytest.mark.parametrize("up", [None, (slice(10, 3000), slice(3500, 5000))])
def test_the_opened_sum_is_that_of_the_clipped_updates(up):
    """Without noise, an entry of the sum differs by less than one grid step per site."""
    rule, spec = rule_of("noise=0,clip=0.5,honest=3"), spec_of(5000)
    deltas = [vector(5000, length, k) for k, length in enumerate([0.1, 0.5, 3.0, 1e9, 0.0])]
    deltas.append(torch.full((5000,), math.nan, dtype=torch.float64))  # counts as zero
    if up is not None:
        mask = torch.zeros(5000, dtype=torch.bool)
        for span in up:
            mask[span] = True
        deltas = [torch.where(mask, delta, 0.0) for delta in deltas]
    updates = [sent_by(rule, k, delta, spec, up=up) for k, delta in enumerate(deltas)]
    assert all(float(update.delta.abs().max()) == 0 for update in updates)  # nothing is sent but integers
    _, combined = mean_of(rule, updates, spec)
    expected = sum(delta * min(1.0, 0.5 / max(float(delta.norm()), 1e-300)) for delta in deltas[:-1]) / 6
    step = rule.grid(PLAN, 5000).step
    assert float((combined.delta - expected).abs().max()) < 6 * step / 6
    assert torch.linalg.vector_norm(expected) > 100 * step


def test_streams_are_clipped_and_rounded_as_one_vector():
    plan = RoundPlan(clients=8, cohort=6, scales={"scaffold/change": 0.1})
    rule, spec = rule_of("noise=0,clip=1,honest=3"), spec_of(500)
    deltas, changes = ([vector(500, 3.0, k) for k in range(6)], [vector(500, 40.0, 10 + k) for k in range(6)])
    updates = [
        sent_by(rule, k, delta, spec, plan, {"scaffold": {"change": change}})
        for k, (delta, change) in enumerate(zip(deltas, changes, strict=True))
    ]
    _, combined = mean_of(rule, updates, spec, plan)
    factor, step = 1 / math.hypot(3.0, 4.0), rule.grid(plan, 500).step
    assert float((combined.delta - sum(deltas) * factor / 6).abs().max()) < step
    assert float((combined.upload["scaffold"]["change"] - sum(changes) * factor).abs().max()) < 6 * step / 0.1


@pytest.mark.parametrize("sites", [3, 6])
def test_the_noise_of_a_sum_is_that_of_its_sites(sites):
    """With ``honest`` sites it has the standard deviation z C; with more of them, more."""
    size = 50_000
    rule, spec = rule_of("noise=1.5,clip=0.5,honest=3"), spec_of(size)
    zeros = torch.zeros(size, dtype=torch.float64)
    state, combined = mean_of(rule, [sent_by(rule, k, zeros, spec) for k in range(sites)], spec)
    noise, expected = combined.delta * 6, 0.75 * math.sqrt(sites / 3)
    assert float(noise.std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * size))
    assert float(noise.mean()) == pytest.approx(0, abs=5 * expected / math.sqrt(size))
    assert len(state["spent"]) == 1


def test_a_sum_of_too_few_sites_is_not_opened():
    rule, spec = rule_of("noise=1,clip=0.5,honest=3"), spec_of(50)
    updates = [sent_by(rule, k, vector(50, 1.0, k), spec) for k in range(2)]
    state, combined = mean_of(rule, updates, spec)
    assert float(combined.delta.abs().max()) == 0
    assert rule.spent(state) == 0


@pytest.mark.parametrize("method", ["dp", "scaffold+dp", "fedrep+dp", "fedadam+dp"])
def test_without_noise_it_is_dp_with_noise_at_the_server_up_to_rounding(method):
    options = "noise=0,clip=0.01,adaptive=false"
    server, sites = run(f"{method}:{options}"), run(f"{method}:{options},noise_at=sites,honest=4")
    assert float((server.vector - sites.vector).abs().max()) < 1e-5
    assert sites.summary["epsilon"] is None
    assert sites.summary["bytes_up"] == server.summary["bytes_up"] // 2  # integers of 4 bytes instead of fp64


@pytest.mark.usefixtures("one_key")
def test_other_engines_and_resumed_runs_have_the_same_noise(tmp_path):
    method = f"scaffold+dp:noise=1,clip=0.1,honest=4,{SITES}"
    first = run(method)
    for engine in ("vectorized", "processes"):
        other = run(method, engine=engine, workers=2)
        # A different last bit before rounding changes an integer by one, which is a grid step of about 1e-5.
        assert float((other.vector - first.vector).abs().max()) < 1e-4
    assert float((first.vector - run(method, seed=1).vector).abs().max()) > 1e-2
    with pytest.raises(Stop):
        run(method, out=tmp_path / "a", checkpoint_every=1, callbacks=[StopAfter(2)])
    resumed = unskew.resume(tmp_path / "a", federation=blobs(SIZES))
    assert torch.equal(resumed.vector, first.vector)
    assert resumed.summary["epsilon"] == first.summary["epsilon"]


def test_epsilon_is_that_of_the_finished_rounds_and_a_budget_ends_a_run(tmp_path):
    method = f"dp:noise=2,clip=0.1,honest=4,delta=0.01,{SITES}"
    result = run(method, out=tmp_path / "a")
    grid = method_of(method).aggregate.grid(RoundPlan(clients=8, cohort=8), len(result.vector))
    expected = [skellam_epsilon([grid.rounds(t)], 0.01) for t in (1, 2, 3)]
    assert [row["epsilon"] for row in result.history] == pytest.approx(expected)
    assert "if at least 4 clients of every sum" in result.summary["privacy"]
    assert all(row["train_loss"] is None for row in result.history)
    rest = run(method, rounds=5, start_from=str(tmp_path / "a"))
    assert rest.summary["epsilon"] > expected[-1]
    # Noise that is computed for the number of rounds is that of the run which adds it.
    planned = f"dp:epsilon=6,clip=0.1,honest=4,delta=0.01,{SITES}"
    with pytest.raises(Stop):
        run(planned, out=tmp_path / "b", rounds=60, checkpoint_every=1, callbacks=[StopAfter(2)])
    more = run(planned, rounds=4, start_from=str(tmp_path / "b"))  # after one round
    rule = method_of(planned).aggregate
    plans = [RoundPlan(clients=8, cohort=8, rounds=rounds) for rounds in (60, 4)]
    used = [rule.grid(plan, len(result.vector)).rounds(t) for plan, t in zip(plans, (1, 3), strict=True)]
    assert more.summary["epsilon"] == pytest.approx(skellam_epsilon(used, 0.01))
    enough = run(f"dp:epsilon=6,clip=0.1,honest=4,delta=0.01,{SITES}")
    assert 5.9 < enough.summary["epsilon"] <= 6
    z = enough.summary["noise_multiplier"] / 1.3
    with pytest.warns(UserWarning, match="The privacy budget is spent"):
        short = run(f"dp:noise={z},epsilon=6,clip=0.1,honest=4,delta=0.01,{SITES}")
    assert 0 < len(short.history) < 3
    with pytest.raises(ConfigError, match="added its noise elsewhere"):
        run("dp:noise=2,clip=0.1,delta=0.01,adaptive=false", rounds=5, start_from=str(tmp_path / "a"))


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        (f"dp:noise=1,{SITES}", {}, "needs honest"),
        ("dp:noise=1,noise_at=sites,honest=3", {}, "adaptive clipping would have no noise"),
        ("dp:noise=1,adaptive=false,honest=3", {}, "applies to noise_at=sites only"),
        (f"dp:noise=0,clip=inf,honest=3,{SITES}", {}, "finite clip"),
        (f"dp:noise=1,honest=3,streams=apart,{SITES}", {}, "streams=apart is not supported"),
        (f"dp:noise=1,honest=3,public_sizes=true,{SITES}", {}, "public_sizes=true is not supported"),
        (f"dp:noise=1,honest=3,reveal=true,{SITES}", {}, "Remove reveal=true"),
        (f"dp:noise=1,honest=9,{SITES}", {}, "more than the 8 sites of a round"),
        (f"dp:noise=1,honest=5,{SITES}", {"participation": 0.5}, "more than the 4 sites of a round"),
        (f"dp:noise=1,honest=3,{SITES}", {"sampling": "poisson", "participation": 0.5}, "Use sampling=fixed"),
        (f"dp:noise=1,honest=3,{SITES}", {"network": "fixed:1"}, "network.delay"),
        (f"dp:noise=0.5,epsilon=3,honest=3,{SITES}", {}, "the first round alone"),
        (f"heterofl+dp:noise=1,honest=3,{SITES}", {}, "With heterofl, clients upload different slices"),
        (f"dp:noise=1,honest=3,accountant=prv,{SITES}", {}, "accountant has no effect with noise_at=sites"),
        (f"topk+dp:noise=1,honest=3,{SITES}", {}, "longer than the one that dp has clipped"),
    ],
)
def test_what_is_not_supported_is_reported_before_training(method, options, words):
    with pytest.raises(UnskewError, match=words):
        run(method, **options)
