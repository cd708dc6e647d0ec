"""A deployed run gives the simulator's numbers, bit for bit, with every method."""

from collections import Counter
from itertools import pairwise

import pytest
import torch
from support.deployed_runs import BODY, FULL_BATCHES, QUICK, SERVER_DATA, SLOW_SUMS, SUMS, compare
from support.federations import LORA
from support.sites import TINY, LoopPlace, deployed
from support.slow import slow_but

import unskew
from unskew.errors import ConfigError
from unskew.methods.registry import METHODS


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


@pytest.mark.parametrize("name", slow_but(["fedssyn", "vhl"], sorted(set(METHODS) - {"mime", *LORA})))
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


@pytest.mark.parametrize(("method", "options"), [("fedbabu", {"local_steps": None, "local_epochs": 1}), ("ccvr", {})])
def test_sites_that_have_agreed_to_more_rounds_compute_what_the_run_ends_with(method, options, tmp_path):
    """Such as personal models that are tuned after the last round, and the statistics of a survey after it."""
    values = {"method": method, "model": "mlp", "holdout": 0.3, **options}
    place = LoopPlace(tmp_path, {**TINY, **values, "rounds": 12})
    result, _ = deployed(tmp_path, place, **values)
    simulated = unskew.run(**{**TINY, **values})
    assert torch.equal(result.vector, simulated.vector)
    for name in ("accuracy", "client_accuracy_mean", "personal_accuracy_mean"):
        assert result.summary.get(name) == simulated.summary.get(name)


def test_noise_for_an_epsilon_needs_the_same_rounds_at_the_sites(tmp_path):
    values = {"method": "dpsgd:epsilon=8"}
    place = LoopPlace(tmp_path, {**TINY, **values, "rounds": 12})
    with pytest.raises(ConfigError, match="has not agreed to this experiment"):
        deployed(tmp_path, place, **values)


@pytest.mark.fuzz
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


@pytest.mark.fuzz
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


@pytest.mark.parametrize("buffers", ["average", "local"])
@pytest.mark.parametrize(
    "method", slow_but(["fedgh:epochs=2"], ["fedproto", "fedtgp:epochs=2", "fedgh:epochs=2", "local"])
)
def test_each_site_trains_its_own_architecture(method, buffers, tmp_path):
    models = [{"name": "mlp", "hidden": [8]}, {"name": "mlp", "hidden": [6, 8], "norm": "batch"}]
    options = {"method": method, "model": models, "buffers": buffers, "holdout": 0.2, "participation": 0.7}
    result, _ = compare(tmp_path, **options)
    simulated = unskew.run(**{**TINY, **options})
    for mine, theirs in zip(result.clients, simulated.clients, strict=True):
        for name in ("accuracy", "loss", "personal_accuracy", "personal_loss"):
            assert mine[name] == pytest.approx(theirs[name], abs=1e-12)


def test_masked_sums_of_different_architectures_are_rejected(tmp_path):
    options = {"method": "fedproto", "model": "mlp,mlp", "secure_aggregation": "required"}
    with pytest.raises(ConfigError, match="secure_aggregation=required sums updates of one model"):
        deployed(tmp_path, **options)


@pytest.mark.parametrize(
    "options", [{"method": "topk:down=true"}, {"method": "mime"}, {"sampling": "power-of-choice:3"}]
)
def test_what_only_simulations_have_is_rejected_over_sites(tmp_path, options):
    with pytest.raises(ConfigError, match="simulations only"):
        deployed(tmp_path, **options)
