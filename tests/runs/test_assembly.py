"""A run that begins where another ended."""

import pytest
import torch
from support.federations import LORA, QUICK, SmallBatchNorm, blobs, small_budget, small_model
from support.slow import slow_but
from support.tolerance import TRAINING, assert_close

import unskew
from unskew.errors import ConfigError
from unskew.methods.registry import METHODS
from unskew.simulation.sampler import Sampler

SIZES = [12, 17, 9]


def train(out=None, method="fedavg", rounds=4, **options):
    torch.manual_seed(0)
    method = QUICK.get(method, method)
    given = {"lr": 0.05, "batch_size": 8, "local_epochs": 1, "precision": "fp64", "engine": "inline", **options}
    given |= small_budget(method)
    return unskew.run(blobs(SIZES), model=small_model(method), method=method, rounds=rounds, out=out, **given)


EVERY = [name for name in METHODS if name not in ("fedreg", "vhl", "ft", "fedcog", "fedcog-authors", "fedssyn", *LORA)]


ALL = [*EVERY, "fedals:alpha=3", "fedcog:start_round=1,n=6,g_steps=3+fedavgm:beta=0.9"]
# Variates, personal models, linear terms, previous models, a body that waits, a server's moments, its searches, waiting ones.
KEEPING = [
    "scaffold",
    "ditto",
    "feddyn",
    "moon",
    "fedrep",
    "fedbn",
    "fedadam",
    "feddle",
    "ca2fl",
    "fedals:alpha=3",
    ALL[-1],
]


@pytest.mark.parametrize("method", slow_but(KEEPING, ALL))
def test_the_same_method_goes_on_as_if_it_had_never_stopped(tmp_path, method):
    options = {"momentum": 0.9} if "fedals" in method else {}
    whole = train(method=method, rounds=3, **options)
    train(tmp_path / "a", method=method, rounds=2, **options)
    rest = train(tmp_path / "b", method=method, rounds=3, **options, start_from=str(tmp_path / "a"))
    assert torch.equal(rest.vector, whole.vector)
    assert rest.summary["bytes_up"] == whole.summary["bytes_up"]
    assert [r["accuracy"] for r in rest.history] == [r["accuracy"] for r in whole.history]


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": "oort", "participation": 0.34},
        {"attack": {"kind": "freeride", "mode": "last", "clients": [1]}},
        {"attack": {"kind": "mimic", "clients": [1], "warmup": 4}},
        {"diagnose": ["updates"]},
    ],
    ids=["sampling", "freeride", "mimic", "diagnose"],
)
def test_sampler_attack_and_diagnostics_continue_as_if_the_run_had_never_stopped(tmp_path, options):
    whole = train(rounds=6, **options)
    train(tmp_path / "a", rounds=3, **options)
    rest = train(tmp_path / "b", rounds=6, **options, start_from=str(tmp_path / "a"))
    assert torch.equal(rest.vector, whole.vector)
    assert [without_seconds(row) for row in rest.history] == [without_seconds(row) for row in whole.history]


def without_seconds(row):
    return {name: value for name, value in row.items() if "seconds" not in name and value == value}


def test_a_sampler_with_other_options_begins_anew(tmp_path, monkeypatch):
    draw = Sampler.draw
    known = []

    def drawn(sampler, round, in_flight=()):
        known.append((round, int((sampler.state["last"] > 0).sum())))
        return draw(sampler, round, in_flight)

    monkeypatch.setattr(Sampler, "draw", drawn)
    train(tmp_path / "a", rounds=3, participation=0.34, sampling="oort:explore=1,decay=1")
    train(rounds=4, participation=0.34, sampling="oort:explore=1,decay=1", start_from=str(tmp_path / "a"))
    train(rounds=4, participation=0.34, sampling="oort:explore=1", start_from=str(tmp_path / "a"))
    assert known == [(0, 0), (1, 1), (2, 2), (3, 3), (3, 0)]


def test_what_both_methods_keep_stays_and_the_rest_begins_anew(tmp_path):
    """FedCOG's previous models come from the common rounds; without them its first round would make other data."""
    fedcog = "fedcog:start_round={},n=6,g_steps=3,lambda_kd=1,lambda_dis=10"
    whole = train(method=fedcog.format(2))
    train(tmp_path / "with", method=fedcog.format(99), rounds=2, base_run=True)
    train(tmp_path / "without", rounds=2)
    rest = train(tmp_path / "c", method=fedcog.format(2), start_from=str(tmp_path / "with"))
    forgot = train(tmp_path / "d", method=fedcog.format(2), start_from=str(tmp_path / "without"))
    assert torch.equal(rest.vector, whole.vector)
    assert not torch.allclose(forgot.vector, whole.vector)


def test_a_server_rule_of_another_kind_begins_at_the_model(tmp_path):
    """FedExP evaluates the mean of its last two models: had it begun at the initial weights, it would mix those in."""
    parent = train(tmp_path / "a", rounds=2)
    child = train(tmp_path / "b", method="fedexp", rounds=3, start_from=str(tmp_path / "a"), lr=1e-12)
    torch.testing.assert_close(child.vector, parent.vector, rtol=0, atol=1e-9)


def test_an_interrupted_branch_resumes(tmp_path):
    train(tmp_path / "a", rounds=2)
    whole = train(tmp_path / "b", rounds=6, start_from=str(tmp_path / "a"))
    train(tmp_path / "c", rounds=4, start_from=str(tmp_path / "a"))
    torch.manual_seed(0)
    rest = unskew.resume(tmp_path / "c", federation=blobs(SIZES), model=SmallBatchNorm(), rounds=6)
    assert torch.equal(rest.vector, whole.vector)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"rounds": 2}, "needs more"), ({"start_from": "nowhere"}, "not a run folder"), ({"seed": 0}, None)],
)
def test_a_branch_that_cannot_be_is_refused_in_a_sentence(tmp_path, change, words):
    train(tmp_path / "a", rounds=2)
    given = {"rounds": 3, "start_from": str(tmp_path / "a"), **change}
    if words is None:
        torch.manual_seed(0)
        with pytest.raises(ConfigError, match="other data"):
            unskew.run(blobs([9, 9]), model=SmallBatchNorm(), out=tmp_path / "b", **given)
        return
    with pytest.raises(ConfigError, match=words):
        train(tmp_path / "b", **given)
    assert not (tmp_path / "b").exists()


def test_a_rule_with_other_options_begins_anew_at_server_and_clients(tmp_path):
    """Old variates of clients beside a new one at the server would be wrong."""
    train(tmp_path / "a", method="fedpvr:layers=1", rounds=2)
    start = {"rounds": 3, "start_from": str(tmp_path / "a")}
    child = train(tmp_path / "b", method="fedpvr", **start)
    # Without variates a round of FedPVR is one of FedAvg with uniform weights.
    plain = train(tmp_path / "c", client_weighting="uniform", **start)
    assert_close(child.vector, plain.vector, TRAINING)
