"""A deployed run gives the simulator's numbers, bit for bit, with every method."""

import json
from collections import Counter
from itertools import pairwise

import pytest
import torch
from support.federations import QUICK as KNOWN
from support.sites import TINY, deployed
from support.slow import slow_but

import unskew
from unskew.errors import ConfigError
from unskew.methods.registry import METHODS

QUICK = {
    **KNOWN,
    "fedcog": "fedcog:start_round=1",
    "fedcog-authors": "fedcog-authors:start_round=1",
    "fedssyn": "fedssyn:generator=vae-small,epochs=1,n_syn=10",
    "dp": "dp:noise=0,clip=0.05",  # the noise of a deployed run is not that of the simulator
    "dpsgd": "dpsgd:noise=0,clip=0.5",  # nor are its Poisson batches, unless all samples are in them
}
FULL_BATCHES = {"dpsgd": {"batch_size": 200}}
BODY = {"fedals", "fedrep", "fedper", "lgfedavg", "fedbabu", "heterofl", "fedrolex"}
"""Methods that need a model with a body."""
SERVER_DATA = {"feddle", "feddf", "fedft", "hfcl", "center", "fltrust"}


def compare(tmp_path, place=None, **options):
    if "fedals" in str(options.get("method")):  # over sites it is evaluated when the whole model is known
        options["eval_every"] = options.get("rounds", TINY["rounds"])
    values = {**TINY, **options}
    simulated = unskew.run(out=tmp_path / "simulated", **values)
    result, place = deployed(tmp_path, place, **options)
    assert torch.equal(result.vector, simulated.vector)
    for mine, theirs in zip(result.history, simulated.history, strict=True):
        for name in theirs:
            if "seconds" not in name and theirs[name] == theirs[name]:
                assert mine[name] == theirs[name], name
    for name, value in simulated.summary.items():
        if name == "report_bytes_up" and name not in result.summary:  # updates alone tell the models that are evaluated
            assert sends_whole_model(place, values["rounds"] - 1, len(result.vector))
        # The server of real sites does not know their targets, so it compares with no constant.
        elif "seconds" not in name and name != "engine" and not name.startswith(("synthetic", "constant_")):
            assert result.summary[name] == pytest.approx(value, abs=1e-12) or value is None, name
    sent, sums, counted = bytes_sent(place), bytes_of_sums(place), result.summary
    assert sent["down"] + sums["down"] == counted["bytes_down"]
    assert sent["up"] + sums["up"] == counted["bytes_up"] + counted.get("report_bytes_up", 0)
    return result, place


def sends_whole_model(place, round, size):
    """Return whether all sites send all parameters of the model in a round."""
    frames = [frame for _, frame in place.link.received if frame.kind == "update" and frame.config["round"] == round]
    return all(frame.arrays["update/delta"].shape == (size,) for frame in frames)


def bytes_of_sums(place):
    """Bytes by which tables and balanced weights are settled before round 1: sums, categories, and what follows from them.

    Numbers in JSON count as 8 bytes each and categories as compact JSON.
    """
    config = next(iter(place.sites[0].experiments.configs.values()))
    balanced = config.class_weights == "balanced"
    up, settled = 0, {}
    for _, frame in place.link.received:
        if frame.kind == "squares" or "values" in frame.config:
            up += sum(len(blob.data) for blob in frame.arrays.values())
            up += sum(compact(values) for values in json.loads(frame.config.get("values", "[]")))
    down = sum(len(b.data) for _, frame in place.link.sent if frame.kind == "squares" for b in frame.arrays.values())
    for client, frame in place.link.received:
        if balanced and "client_info/class_counts" in frame.arrays and client not in settled:
            up += len(frame.arrays["client_info/class_counts"].data)
            settled[client] = 0
    for client, frame in place.link.sent:
        if frame.kind == "train":
            columns, scale, weights = (json.loads(frame.config[name]) for name in ("columns", "targets", "weights"))
            sizes = [compact(one["values"]) if one["kind"] == "category" else 16 for one in columns]
            settled[client] = sum(sizes) + 8 * len(weights) * balanced + 16 * len(scale[0] if scale else ())
    return {"up": up, "down": down + sum(settled.values())}


def compact(values):
    """Bytes of a list as JSON without spaces."""
    return len(json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode())


def bytes_sent(place):
    """Bytes of arrays in the messages that make up the method, as they crossed the link."""
    ways = {"down": (place.link.sent, ("train", "receive")), "up": (place.link.received, ("update", "contribution"))}
    return {
        way: sum(len(blob.data) for _, frame in messages if frame.kind in kinds for blob in frame.arrays.values())
        for way, (messages, kinds) in ways.items()
    }


SUMS = {
    "fedprox:mu=0.1+scaffold": {},
    "fedals+feddyn": {"rounds": 3, "model": "mlp"},
    "median:bucket=2+fedavgm": {},
    "scaffold+dp:noise=0,clip=0.05+fedadam": {},
    "scaffold+topk:share=0.1": {},
    "fedals+powersgd": {"rounds": 3, "model": "mlp"},
    "scaffold+ccvr": {"model": "mlp"},
    "fedrep+ft": {"participation": 0.7, "rounds": 3, "model": "mlp"},
}
SLOW_SUMS = {
    "fedcog:start_round=1,g_steps=2+scaffold+fedals": {"model": "mlp"},
    "vhl:per_class=4+fedssyn:generator=vae-small,epochs=1,n_syn=2": {
        "local_steps": None,
        "local_epochs": 1,
        "rounds": 1,
    },
    "fedavg": {"model": "resnet20", "buffers": "local", "holdout": 0.2, "rounds": 1},
    "fedgen:gen_steps=5+fedbn": {"model": "resnet20", "rounds": 1},
}


@pytest.mark.parametrize("name", [*SUMS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_SUMS)])
def test_sums_of_methods_give_the_numbers_of_the_simulator(name, tmp_path):
    """Slices, state at the sites, models of their own, shuffled images, newcomers: every part of the protocol."""
    compare(tmp_path, method=name, **{**SUMS, **SLOW_SUMS}[name])


ONE_STEP = {"model": "resnet20", "rounds": 1, "local_steps": 1, "max_train_samples": 60, "batch_size": 2}


@pytest.mark.parametrize(
    ("name", "options"),
    slow_but(
        [("fedbn+scaffold", {})],
        [
            ("fedbn+scaffold", {}),
            ("fedals:alpha=2", {"rounds": 2}),
            ("feddm:server_epochs=1,images=1", {}),
            ("fedrep", {"buffers": "reset"}),
            ("fedals", {"buffers": "local"}),
            ("scaffold+ft", {"buffers": "reset", "holdout": 0.3}),
            ("fedprox+ft", {"buffers": "local", "holdout": 0.3}),
        ],
    ),
)
def test_statistics_are_sent_over_sites_as_they_are_counted(name, options, tmp_path):
    compare(tmp_path, method=name, **{**ONE_STEP, **options})


@pytest.mark.parametrize("name", slow_but(["fedssyn", "vhl"], sorted(set(METHODS) - {"mime", "flora"})))
def test_every_method_gives_the_numbers_of_the_simulator(name, tmp_path):
    options = {"server_data": 60} if name in SERVER_DATA else {"model": "mlp"} if name in BODY else {}
    options = FULL_BATCHES.get(name, options)
    compare(tmp_path, method=QUICK.get(name, name), **options)


def test_fedals_sends_over_sites_what_it_counts(tmp_path):
    """The whole model leaves a site in the last round only, as the result is the mean of the whole models."""
    options = {"method": "fedals", "model": "mlp", "rounds": 4, "eval_clients": 0}
    result, place = deployed(tmp_path, **options)
    updates = [frame for _, frame in place.link.received if frame.kind == "update"]
    sent, reported = Counter(), Counter()
    for frame in updates:
        for name, blob in frame.arrays.items():
            (reported if name.startswith("report/") else sent)[frame.config["round"]] += len(blob.data)
    counted = [row["bytes_up"] for row in result.history]
    assert [sent[t] for t in range(4)] == [b - a for a, b in pairwise([0, *counted])]
    size = len(result.vector) * 4
    assert dict(reported) == {3: 3 * size}
    assert result.summary["report_bytes_up"] == 3 * size
    assert sum(sent.values()) < 4 * 3 * size / 5
    assert [row["accuracy"] is None for row in result.history] == [True, True, True, False]
    simulated = unskew.run(**{**TINY, **options})
    assert torch.equal(result.vector, simulated.vector)
    assert result.history[-1]["accuracy"] == simulated.history[-1]["accuracy"]


def test_fedals_is_evaluated_in_rounds_in_which_the_whole_model_is_averaged(tmp_path):
    options = {"method": "fedals:alpha=2", "model": "mlp", "rounds": 4, "eval_clients": 0}
    result, place = deployed(tmp_path, **options)
    simulated = unskew.run(**{**TINY, **options})
    assert [row["accuracy"] for row in result.history[1::2]] == [row["accuracy"] for row in simulated.history[1::2]]
    assert not [name for _, frame in place.link.received for name in frame.arrays if name.startswith("report/")]


def test_the_noise_and_the_cohorts_of_a_deployment_cannot_be_predicted_from_the_seed(tmp_path):
    options = {"method": "dp:noise=1,adaptive=false", "sampling": "poisson", "participation": 0.6, "rounds": 6}
    first, _ = deployed(tmp_path / "a", **options)
    second, _ = deployed(tmp_path / "b", **options)
    simulated = unskew.run(**{**TINY, **options})
    assert not torch.equal(first.vector, second.vector)
    assert not torch.equal(first.vector, simulated.vector)
    cohorts = [tuple(row["cohort"] for row in run.history) for run in (first, second, simulated)]
    assert len(set(cohorts)) > 1
    assert first.summary["epsilon"] == simulated.summary["epsilon"] > 0
    assert first.summary["privacy"] == simulated.summary["privacy"]


def test_the_batches_and_the_noise_of_sites_cannot_be_predicted_from_the_seed(tmp_path):
    """Not even the batches: without noise, sites train on others."""
    for noise in (0, 1):
        options = {"method": f"dpsgd:noise={noise}"}
        first, _ = deployed(tmp_path / f"a{noise}", **options)
        second, _ = deployed(tmp_path / f"b{noise}", **options)
        simulated = unskew.run(**{**TINY, **options})
        assert not torch.equal(first.vector, second.vector)
        assert not torch.equal(first.vector, simulated.vector)
        assert first.summary["epsilon"] == simulated.summary["epsilon"]
        assert [row["epsilon"] for row in first.clients] == [row["epsilon"] for row in simulated.clients]
        assert all(not row["train_loss"] for row in first.history)


@pytest.mark.parametrize(
    "options", [{"method": "topk:down=true"}, {"method": "mime"}, {"sampling": "power-of-choice:3"}]
)
def test_what_only_simulations_have_is_rejected_over_sites(tmp_path, options):
    with pytest.raises(ConfigError, match="simulations only"):
        deployed(tmp_path, **options)
