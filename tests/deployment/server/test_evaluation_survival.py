"""Survival models at sites: metrics with intervals per site, and of all sites together with masks."""

import numpy as np
import pytest
from support.sites import TINY, LoopPlace, deployed
from support.survival_rows import survival_experiment, survival_table

from unskew.config.loader import experiment
from unskew.data.load import load_partitioned
from unskew.deployment.server.evaluation import EvaluationPlan, evaluate_run
from unskew.serving.load import load_predictor


@pytest.fixture(params=["off", "required"])
def place(request, tmp_path):
    survival_table(tmp_path / "patients.csv")
    more = {
        "holdout": 0.4,
        "max_train_samples": None,
        "local_steps": 30,
        "lr": 0.2,
        "secure_aggregation": request.param,
    }
    values = {**TINY, **survival_experiment(tmp_path / "patients.csv", **more)}
    deployed(tmp_path, **values)
    place = LoopPlace(tmp_path, values)
    place.values = values
    return place


def held_out(values):
    """Inputs and targets of the held-out rows of each site, and the task."""
    config = experiment(values)
    drawn = load_partitioned(config.data_spec, config.seed)
    clients = drawn.federation(drawn.known()).clients
    return [[np.asarray(part) for part in (client.x_test, client.y_test)] for client in clients]


def test_metrics_are_those_of_the_held_out_rows(place):
    rows = evaluate_run(place.folder / "run", EvaluationPlan(("global",)), place, lambda text: None)
    predictor, sites = load_predictor(place.folder / "run"), held_out(place.values)
    if place.values["secure_aggregation"] == "required":
        sites = [[np.concatenate(parts) for parts in zip(*sites, strict=True)]]
    for k, (x, y) in enumerate(sites):
        outputs = predictor.outputs(x)
        task = (
            predictor.inputs.objective
        )  # masked sums are those of all sites; a single site uses its own censoring curve
        task = task if place.values["secure_aggregation"] == "required" else task.of_other_rows
        exact = task.metrics_of_outputs(y, outputs, predictor.inputs.metrics)
        found = {row["metric"]: row for row in rows if row["client"] in (None, k)}
        assert {*exact} == {*found}
        for name, value in exact.items():
            assert found[name]["value"] == pytest.approx(value, abs=5e-3), name
            assert found[name]["n"] == len(y)
            if len(sites) > 1 and name not in ("loss",):
                assert found[name]["low"] < found[name]["value"] < found[name]["high"], name


def test_sites_without_comparable_pairs_report_null_and_stay_in_the_run(tmp_path):
    survival_table(tmp_path / "patients.csv", n=60)
    more = {"holdout": 0.1, "max_train_samples": None, "survival": {"until": 500, "bins": 2}}
    result, _ = deployed(tmp_path, **survival_experiment(tmp_path / "patients.csv", **more))
    assert len(result.clients) == 3
    assert None in [row["concordance"] for row in result.clients]
