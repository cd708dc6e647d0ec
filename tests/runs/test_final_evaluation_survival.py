"""Survival in the files of a run: metrics with intervals, curves, events of clients and warnings; and in the report."""

import json

import pytest
from support.running import call
from support.survival_rows import survival_experiment, survival_table

import unskew
from unskew.errors import CheckpointError
from unskew.reporting.run_reader import read_curves


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run over three clinics with all metrics, and its folder."""
    folder = tmp_path_factory.mktemp("survival")
    survival_table(folder / "patients.csv")
    values = survival_experiment(folder / "patients.csv", holdout=0.3, metrics=["uno", "ibs", "brier", "risk_gap"])
    return unskew.run(**values, out=folder / "run"), folder / "run"


def test_the_summary_has_the_metrics_and_an_interval_of_the_concordance(finished):
    result, folder = finished
    horizons = [*json.loads((folder / "curves.json").read_text())["risk_calibration"]]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["concordance_low"] < summary["concordance"] < summary["concordance_high"]
    for name in ("uno", "ibs", *(f"{kind}/{time}" for kind in ("brier", "risk_gap") for time in horizons)):
        assert isinstance(summary[name], float)
        assert result.history[-1][name] == summary[name]
    assert summary["client_concordance_mean"] == pytest.approx(
        sum(row["concordance"] for row in result.clients) / 3, abs=1e-12
    )


def test_clients_have_events_pairs_and_the_same_metrics(finished):
    result, _ = finished
    for row in result.clients:
        assert 0 < row["events"] <= row["num_held_out"]
        assert row["comparable_pairs"] >= row["events"]
        assert row["concordance_low"] < row["concordance"] < row["concordance_high"]
        assert isinstance(row["ibs"], float)


def test_curves_are_those_of_the_test_set_and_of_each_client(finished):
    _, folder = finished
    curves = read_curves(folder / "curves.json")
    assert [entry["name"] for entry in curves["km"]] == ["test set", "0", "1", "2"]
    for entry in curves["km"]:
        assert all(a >= b for a, b in zip(entry["y"], entry["y"][1:], strict=False))
        assert all(a >= b for a, b in zip(entry["predicted"], entry["predicted"][1:], strict=False))
    assert len(curves["risk_calibration"]) == 3


@pytest.mark.parametrize(
    "broken",
    [{"km": 3}, {"km": [{"name": "a", "x": [1], "y": [1]}]}, {"risk_calibration": {"3": {"x": [1, 2], "y": ["a", 1]}}}],
)
def test_a_report_rejects_damaged_curves(broken, tmp_path):
    (tmp_path / "curves.json").write_text(json.dumps(broken))
    with pytest.raises(CheckpointError, match="corrupted"):
        read_curves(tmp_path / "curves.json")


def test_the_report_draws_survival(finished, tmp_path):
    pytest.importorskip("plotly", reason="plotly is not installed")
    page = unskew.report([finished[1]], tmp_path / "report.html").read_text()
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])["parts"][0]["survival"]
    assert [*data["observed"]] == ["test set", "0", "1", "2"]
    assert len(data["calibration"]) == 3
    assert "<h3>Survival</h3>" in page


def test_clients_with_few_held_out_events_have_a_warning_and_null(tmp_path):
    survival_table(tmp_path / "patients.csv", n=45)
    values = survival_experiment(tmp_path / "patients.csv", holdout=0.1, survival={"until": 500, "bins": 2})
    with pytest.warns(UserWarning, match="3 of 3 clients have fewer than 5 events in their held-out samples"):
        result = unskew.run(**values, out=tmp_path / "run")
    for row in result.clients:
        assert (row["concordance"] is None) == (row["comparable_pairs"] == 0)


def test_an_objective_at_a_horizon_judges_the_run(tmp_path):
    survival_table(tmp_path / "patients.csv")
    values = survival_experiment(tmp_path / "patients.csv", survival={"until": 500, "horizons": [200]})
    result = unskew.run(**values, objective="brier/200", out=tmp_path / "run")
    assert result.summary["objective"] == "brier/200"
    assert result.summary["best_brier/200"] == min(row["brier/200"] for row in result.history)


def test_partition_shows_events_survival_and_the_log_rank_test(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    survival_table(tmp_path / "patients.csv")
    args = ("--data", f"table:{tmp_path / 'patients.csv'}", "--label", "days,dead", "--set", "task=survival")
    args += ("--set", "survival.horizons=[200]", "--partition", "natural:clinic")
    shown = call(capsys, "partition", *args)
    assert shown.code == 0, shown.err
    assert "S(200)" in shown.out
    assert "Log-rank test between all: chi-square" in " ".join(shown.out.split())
    found = call(capsys, "partition", *args, "--json").json()
    assert found["log_rank"]["df"] == 2
    assert [row["events"] > 0 for row in found["sites"]] == [True] * 3
