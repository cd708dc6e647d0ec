"""Summaries of runs whose primary metric is undefined."""

import json

import pytest
import yaml
from support.running import call
from support.survival_rows import survival_experiment, survival_table

import unskew


def one_event(path, n=60):
    """Patients of three clinics; the only event is in the training rows, so no pair of test rows is comparable."""
    lines = [f"{k % 3},{20 + k % 17},{100 + k},{int(k == 1)}" for k in range(n)]
    path.write_text("\n".join(["clinic,age,days,dead", *lines]))
    return {**survival_experiment(path), "holdout": 0.2, "checkpoint_every": 1}


@pytest.mark.parametrize("judged", [{}, {"objective": "loss"}])
def test_a_run_without_a_defined_primary_metric_is_kept_resumed_and_used(capsys, tmp_path, judged):
    table, run, config = tmp_path / "t.csv", tmp_path / "run", tmp_path / "c.yaml"
    values = {**one_event(table), **judged, "data": f"table:{tmp_path / 'd'}"}
    head, *rows = table.read_text().splitlines()
    (tmp_path / "d").mkdir()
    for part, own in (("train", rows[:40]), ("test", rows[40:])):
        (tmp_path / "d" / f"{part}.csv").write_text("\n".join([head, *own]))
    config.write_text(yaml.safe_dump(values))
    assert call(capsys, "run", config, "--out", run).code == 0
    assert call(capsys, "run", config, "--out", run, "--rounds", "3", "--resume").code == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["rounds"] == 3
    assert [summary[name] for name in ("concordance", "best_concordance", "best_last_5")] == [None] * 3
    assert summary["best_loss"] is not None
    assert call(capsys, "predict", run, table, "--out", tmp_path / "p.csv").code == 0
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 61
    assert call(capsys, "report", run).code == 0
    compared = tmp_path / "compared"
    assert call(capsys, "compare", "fedavg", "fedprox", "--config", config, "--seeds", "2", "--out", compared).code == 0
    rows = json.loads((compared / "comparison.json").read_text())
    assert {row["concordance"] for row in rows} == {None}
    assert all(row["loss"] is not None for row in rows if row["method"] in ("fedavg", "fedprox"))
    summary.pop("best_concordance")
    (run / "summary.json").write_text(json.dumps(summary))
    assert "best_concordance is missing" in call(capsys, "report", run).err


def test_ends_of_intervals_are_no_metrics_of_a_comparison(tmp_path):
    config = survival_experiment(tmp_path / "t.csv", objective="brier/200", metrics=["brier"])
    config["survival"] = {"until": 500.0, "horizons": [200.0]}
    survival_table(tmp_path / "t.csv")
    result = unskew.compare(methods=["fedavg"], seeds=[0], references=False, **config)
    assert "brier/200_low" in result.summaries["fedavg"][0]
    (row,) = result.rows()
    assert row["brier/200"] is not None
    assert [key for key in row if key.startswith("brier/")] == ["brier/200"]
