"""Under secure aggregation, ``deploy evaluate`` sees sums over all sites, and they give the metrics of all samples."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.sites import TINY, LoopPlace, deployed

from unskew.config.loader import experiment
from unskew.data.load import load_partitioned
from unskew.deployment.server.evaluation import EvaluationPlan, evaluate_run
from unskew.deployment.server.masked_evaluation import masked_rows
from unskew.errors import ConfigError, EngineError
from unskew.serving.load import load_predictor
from unskew.tasks.cells import count_cells
from unskew.tasks.classification import Classification
from unskew.tasks.metrics import METRICS, MetricSet

MASKED = {
    **TINY,
    "data": "breast_cancer",
    "partition": "iid",
    "max_train_samples": None,
    "holdout": 0.4,
    "rounds": 1,
    "secure_aggregation": "required",
}


def evaluated(place, *models, **plan):
    return evaluate_run(place.folder / "run", EvaluationPlan(models or ("global",), **plan), place, lambda text: None)


def held_out(options):
    config = experiment(options)
    drawn = load_partitioned(config.data_spec, config.seed)
    clients = drawn.federation(drawn.known()).clients
    return (np.concatenate([getattr(client, name).numpy() for client in clients]) for name in ("x_test", "y_test"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masked")
    deployed(folder, **MASKED)
    return LoopPlace(folder, MASKED)


def test_sums_give_the_metrics_on_the_held_out_samples_of_all_sites(place):
    rows = evaluated(place)
    x, y = held_out(MASKED)
    p = load_predictor(place.folder / "run").outputs(x).astype(np.float64)
    metrics = MetricSet(tuple(METRICS), class_names=("malignant", "benign"))
    exact = Classification().requested_metrics(metrics, y, p, "here")
    exact |= {"accuracy": np.mean(p.argmax(1) == y), "loss": -np.log(p[np.arange(len(y)), y]).mean()}
    near = {"auroc": 1e-3, "auprc": 1e-3, "ece": 1e-2, "calibration_slope": 2e-2}
    assert {row["metric"] for row in rows} == {*exact}
    for row in rows:
        assert row["value"] == pytest.approx(exact[row["metric"]], abs=near.get(row["metric"], 1e-6)), row["metric"]
        assert (row["site"], row["n"]) == ("all sites", len(y))
        assert row["support"] == {"malignant": int((y == 0).sum()), "benign": int((y == 1).sum())}
        if row["metric"] in ("accuracy", "auroc", "recall/benign"):
            assert row["low"] < row["value"] < row["high"]
    assert not any(frame.metrics or frame.kind in ("sums", "scored") for _, frame in place.link.received)
    assert evaluated(place, metrics=("loss",)) == [row for row in rows if row["metric"] == "loss"]


def test_the_recall_of_a_class_with_few_samples_is_left_out(place):
    """The interval of its recall, 2 of 3, would tell that there are 3 samples."""
    inputs, y = load_predictor(place.folder / "run").inputs, np.array([0] * 60 + [1] * 3)
    p = np.array([0.2] * 60 + [0.8, 0.3, 0.7])
    p, said = np.stack([1 - p, p], 1), (p > 0.5).astype(int)
    sums = {
        "sums": torch.tensor([63.0, float((said == y).sum()), 30.0]).double(),
        "cells": torch.from_numpy(count_cells(p, y)),
        "confusion": torch.from_numpy(np.bincount(y * 2 + said, minlength=4).reshape(2, 2)),
        "probabilities": torch.from_numpy(np.stack([p.sum(0), ((p - np.eye(2)[y]) ** 2).sum(0)], 1)),
    }
    rows = masked_rows(lambda _: [sums], torch.zeros(1), torch.zeros(0), inputs, 0.95)
    assert rows[0]["support"] == {"malignant": None, "benign": None}  # each number would follow from the other one
    assert not [row for row in rows if row["metric"].startswith("recall/")]


def test_metrics_of_single_sites_are_refused(place):
    with pytest.raises(ConfigError, match="only the global model is evaluated"):
        evaluated(place, "global", "local")
    with pytest.raises(ConfigError, match="Remove --cross"):
        evaluated(place, cross=True)
    evaluated(place)
    client, asked = next((client, frame) for client, frame in place.link.sent if frame.kind == "sums")
    model = {name.replace("args.0", "model"): blob for name, blob in asked.arrays.items()}
    scored = replace(asked, kind="score", config={**asked.config, "model": "global", "level": 0.95}, arrays=model)
    answer = place.sites[client].answer(scored)
    assert "only as masked sums over all sites" in answer.config["reason"]
    assert not answer.metrics


def test_a_site_that_allows_no_evaluation_stops_it(place):
    closed = LoopPlace(place.folder, MASKED, evaluate={"allow": []})
    with pytest.raises(EngineError, match=r"Its site\.yaml needs evaluate\.allow: \[global\]"):
        evaluated(closed)


def test_sums_over_predictions_are_refused_in_plain(tmp_path):
    options = {**MASKED, "secure_aggregation": "off"}
    _, place = deployed(tmp_path, **options)
    evaluated(place)
    client, asked = next((client, frame) for client, frame in place.link.sent if frame.kind == "score")
    arrays = {name.replace("model", "args.0"): blob for name, blob in asked.arrays.items()}
    config = {**asked.config, "requests": '[["scores", {"classes": 2, "tally": 0}]]'}
    answer = place.sites[client].answer(replace(asked, kind="sums", config=config, arrays=arrays))
    assert answer.kind == "refused"
    assert "only under secure aggregation" in answer.config["reason"]


def test_labels_and_numbers_have_tallies(tmp_path):
    options = {**MASKED, "data": "diabetes"}
    _, place = deployed(tmp_path, **options)
    rows = {row["metric"]: row for row in evaluated(place)}
    x, _ = held_out(options)
    predictor = load_predictor(tmp_path / "run")
    config = experiment(options)
    drawn = load_partitioned(config.data_spec, config.seed)
    federation = drawn.federation(drawn.known())
    y = np.concatenate([federation.objective.truth(client.y_test).numpy() for client in federation.clients])
    errors = predictor.outputs(x).reshape(-1) - y
    assert rows["mae"]["value"] == pytest.approx(np.abs(errors).mean(), rel=1e-6)
    assert rows["rmse"]["value"] == pytest.approx(np.sqrt((errors**2).mean()), rel=1e-6)
    assert rows["r2"]["value"] == pytest.approx(1 - (errors**2).sum() / ((y - y.mean()) ** 2).sum(), rel=1e-6)
    assert rows["r2"]["n"] == len(y)
