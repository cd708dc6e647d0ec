"""Unseen clients: training equals that of the federation that never had them, and their metrics are those of the model."""

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
import torch
from support.federations import blobs

import unskew
from unskew.cli.comparison_tables import clients_table
from unskew.config.experiment import Experiment
from unskew.data.clients import joined_clients
from unskew.data.load import load_partitioned
from unskew.data.spec import DataSpec
from unskew.deployment.server.site_clients import check_deployable
from unskew.errors import ConfigError
from unskew.seeding import numpy_generator

DATA = {"data": "digits", "partition": "dirichlet:0.5", "clients": 6, "holdout": 0.2}
RUN = {"model": "mlp", "rounds": 2, "local_steps": 2, "batch_size": 8, "participation": 0.5, "engine": "inline"}


def unseen_ids(clients, count, seed=0):
    return sorted(numpy_generator(seed, "unseen clients").choice(clients, count, replace=False).tolist())


def direct_scores(result, spec, seed=0):
    """Accuracy of the final model per unseen client, from the partition and a plain forward pass."""
    drawn = load_partitioned(spec, seed)
    ids = unseen_ids(drawn.parts.clients, round(0.34 * drawn.parts.clients), seed)
    train = [k for k in range(drawn.parts.clients) if k not in ids]
    pixels = torch.cat([part.x for k in train for part in drawn.client(k)]).double() / 255
    mean, std = pixels.mean((0, 2, 3)).float(), pixels.std((0, 2, 3), correction=0).float()
    scores = []
    for k in ids:
        held_out = drawn.client(k)[1]
        x = (held_out.x.float() / 255 - mean[:, None, None]) / std[:, None, None]
        scores.append((result.model.eval()(x).argmax(1) == held_out.y).double().mean().item())
    return scores


@pytest.mark.parametrize("engine", ["inline", "vectorized", "processes"])
def test_training_equals_that_without_the_unseen_clients(engine):
    options = RUN | {"engine": engine}
    drawn = load_partitioned(DataSpec(**DATA), 0)
    ids = unseen_ids(6, 2)
    rest = [drawn.client(k) for k in range(6) if k not in ids]
    arrays = [(first.x, first.y, last.x, last.y) for first, last in rest]
    never = unskew.Federation.from_arrays(arrays, test=(drawn.test.x, drawn.test.y), classes=10)
    a = unskew.run(never, **options)
    b = unskew.run(**DATA, **options, unseen=0.34)
    assert a.vector.equal(b.vector)
    assert [row["accuracy"] for row in a.history] == [row["accuracy"] for row in b.history]
    assert b.summary["clients"] == 4
    assert a.summary["client_accuracy_mean"] == b.summary["client_accuracy_mean"]
    assert not any(key.startswith("unseen") for key in a.summary)


def test_the_metrics_are_those_of_the_model_on_the_held_out_samples(tmp_path):
    result = unskew.run(**DATA, **RUN, unseen=0.34, out=tmp_path / "run")
    scores = direct_scores(result, DataSpec(**DATA))
    assert result.summary["unseen_accuracy_mean"] == pytest.approx(np.mean(scores), abs=1e-9)
    assert result.summary["unseen_accuracy_worst_decile"] == pytest.approx(min(scores), abs=1e-9)
    assert result.summary["unseen_evaluated"] == 2
    rows = [json.loads(line) for line in (tmp_path / "run/clients.jsonl").read_text().splitlines()]
    assert [row["client"] for row in rows] == list(range(6))
    assert [row.get("unseen", False) for row in rows] == [False] * 4 + [True] * 2
    assert [row["accuracy"] for row in rows[4:]] == pytest.approx(scores, abs=1e-9)


def test_all_samples_of_an_unseen_client_are_those_of_patients_on_whom_nobody_trains(tmp_path):
    draws = np.random.default_rng(3)
    n = 300
    patient, site = draws.integers(0, 60, n), draws.choice(["a", "b", "c"], n)
    age = np.round(draws.normal(50, 9, n), 3)
    ill = (draws.random(60) < 0.5)[patient].astype(int)
    frame = pd.DataFrame({"patient": patient, "site": site, "age": age, "ill": ill})
    frame.to_csv(tmp_path / "v.csv", index=False)
    data = {"data": f"table:{tmp_path / 'v.csv'}", "label": "ill", "partition": "natural:site", "features": ["age"]}
    data |= {"split_by": "patient", "holdout": 0.5}
    result = unskew.run(**data, **RUN | {"model": "logistic", "participation": 1.0}, unseen="c")
    drawn = load_partitioned(DataSpec(**data), 0)
    ages = {k: drawn.client(k)[0].x[:, 0].double().numpy() for k in (0, 1, 2)}
    trained = {*patient[(site != "c") & np.isin(age.astype("float32"), np.concatenate([ages[0], ages[1]]))].tolist()}
    held_out = drawn.client(2)[1].x[:, 0].double().numpy()
    tested = {*np.round(drawn.test.x[:, 0].double().numpy(), 3).tolist()}
    own = frame[(site == "c") & ~np.isin(age, [*tested])]
    left = own[~own["patient"].isin(trained)]
    assert len(held_out) < len(left) < len(own)
    row = result.clients[-1]
    assert (row["name"], row["num_all"]) == ("c", len(left))
    everyone = np.concatenate([part.x[:, 0].double().numpy() for k in (0, 1) for part in drawn.client(k)])
    x = torch.from_numpy((left["age"].to_numpy() - everyone.mean()) / everyone.std()).float()[:, None]
    right = result.model.eval()(x).argmax(1).numpy() == left["ill"]
    assert row["all_accuracy"] == pytest.approx(right.mean(), abs=1e-9)

    with pytest.warns(UserWarning, match="held-out samples only.*the same patient"):
        passed = unskew.run(unskew.load_federation(**data), **RUN | {"model": "logistic"}, unseen="c")
    assert not any(key.startswith("all_") or key == "num_all" for key in passed.clients[-1])
    assert passed.clients[-1]["num_held_out"] == len(held_out)


def test_fine_tuning_trains_unseen_clients_from_the_global_model():
    # With a tiny learning rate the fine-tuned model is the global one; with a usual rate it learns the client's classes.
    data = DATA | {"partition": "dirichlet:0.1"}
    still = unskew.run(**data, **RUN, lr=1e-12, method="ft", unseen=0.34).summary
    assert still["unseen_personal_accuracy_mean"] == still["unseen_accuracy_mean"]
    options = RUN | {"rounds": 4, "local_steps": 20, "lr": 0.1}
    tuned = unskew.run(**data, **options, method="ft", unseen=0.34).summary
    assert tuned["unseen_personal_accuracy_mean"] > tuned["unseen_accuracy_mean"]


@pytest.mark.parametrize("method", ["scaffold+ft", "fedrep+ft", "feddyn+ft", "fedbn+ft", "fedpvr+ft"])
def test_fine_tuning_works_with_methods_that_store_client_states(method):
    summary = unskew.run(**DATA, **RUN, method=method, unseen=0.34).summary
    assert 0 <= summary["unseen_personal_accuracy_mean"] <= 1


@pytest.mark.parametrize("method", ["fedavg+ft", "fedbabu", "ifca:groups=2"])
def test_personal_models_of_named_unseen_clients(method, tmp_path):
    data = {"data": "synthetic:1,1", "partition": "natural:client", "clients": 6}
    options = RUN | {"model": "mlp"}
    result = unskew.run(**data, **options, method=method, unseen=0.34, out=tmp_path / "run")
    assert "unseen_personal_accuracy_mean" in result.summary
    rows = [json.loads(line) for line in (tmp_path / "run/clients.jsonl").read_text().splitlines()]
    assert len({row["name"] for row in rows}) == 6


def test_methods_with_models_from_training_report_the_global_model_only():
    summary = unskew.run(**DATA, **RUN, method="ditto", unseen=0.34).summary
    assert "unseen_accuracy_mean" in summary
    assert "unseen_personal_accuracy_mean" not in summary


def test_a_federation_that_is_passed_is_split_by_the_seed():
    fed = blobs([12, 9, 15, 11, 14])
    ids = unseen_ids(5, 2)
    rest = [k for k in range(5) if k not in ids]
    never = dataclasses.replace(fed, clients=joined_clients([fed.clients[k] for k in rest]))
    options = RUN | {"model": "logistic"}
    assert unskew.run(never, **options).vector.equal(unskew.run(fed, **options, unseen=0.4).vector)


def test_a_resumed_run_is_identical(tmp_path):
    options = RUN | {"rounds": 3, "method": "ft", "unseen": 0.34, "checkpoint_every": 1}
    once = unskew.run(**DATA, **options)
    unskew.run(**DATA, **(options | {"rounds": 2}), out=tmp_path / "run")
    again = unskew.resume(tmp_path / "run", rounds=3)
    assert again.vector.equal(once.vector)
    keys = [key for key in once.summary if key.startswith("unseen")]
    assert keys
    assert [again.summary[key] for key in keys] == [once.summary[key] for key in keys]


@pytest.mark.parametrize(("share", "words"), [(0.01, "no client unseen"), (0.9, "fewer than two clients to train")])
def test_shares_that_leave_too_few_clients_raise(share, words):
    with pytest.raises(ConfigError, match=words):
        unskew.load_federation("digits", clients=6, partition="iid", unseen=share)


@pytest.mark.parametrize("share", [1.0, -0.1])
def test_shares_outside_the_range_raise(share):
    with pytest.raises(ConfigError):
        unskew.run(data="digits", unseen=share)
    with pytest.raises(ConfigError, match="at least 0 and below 1"):
        unskew.load_federation("digits", unseen=share)


def test_a_comparison_has_columns_of_the_unseen_clients():
    compared = unskew.compare(**DATA, **RUN, methods=["ft", "ifca"], seeds=1, unseen=0.34)
    row = next(row for row in compared.rows() if row["method"] == "ft")
    assert row["unseen_accuracy_mean"] == compared.summaries["ft"][0]["unseen_accuracy_mean"]
    assert row["unseen_personal_accuracy_mean"] is not None
    labels = list(clients_table(compared.rows()).columns[1].cells)  # ifca fine-tunes no model
    assert labels.count("personal, unseen clients") == labels.count("global, unseen clients") == 2


def test_clients_that_train_alone_have_no_model_for_unseen_clients():
    compared = unskew.compare(**DATA, **RUN, methods=["fedavg"], seeds=1, unseen=0.34, references=True)
    row = next(row for row in compared.rows() if row["method"] == "local")
    assert row["unseen_accuracy_mean"] is None


@pytest.mark.parametrize("option", [{"unseen": 0.2}, {"shift": "rotate:30"}])
def test_real_sites_reject_unseen_clients_and_shifts(option):
    with pytest.raises(ConfigError, match=f"{next(iter(option))} .*not supported over real sites"):
        check_deployable(Experiment(**option))


@pytest.mark.parametrize("name", [False, None, 1.5])
def test_names_of_unseen_clients_that_yaml_reads_otherwise_are_rejected(name):
    from unskew.data.spec import parse_unseen

    with pytest.raises(ConfigError, match="in quotes"):
        parse_unseen([name, "SE"])
