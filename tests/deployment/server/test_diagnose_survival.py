"""Sites with survival times: their curves and the log-rank test in ``unskew deploy diagnose``, and what sites refuse."""

import pytest
from support.sites import LoopPlace
from support.survival_rows import survival_experiment, survival_table

import unskew
from unskew.config.loader import experiment
from unskew.deployment.server.config import Deployment
from unskew.deployment.server.diagnose import diagnose_sites
from unskew.errors import EngineError
from unskew.measurements.site_differences import site_differences


def diagnosed(folder, values, statistics=("survival",), **rules):
    place = LoopPlace(folder, values, statistics={"allow": ["counts", "survival"], **rules})
    tell = [].append
    return diagnose_sites(
        experiment(values), Deployment(startup_timeout=0.5), folder / "out", statistics, tell, tell, place
    )


@pytest.mark.parametrize("masks", ["off", "required"])
def test_sites_have_the_survival_of_a_simulation(tmp_path, masks):
    survival_table(tmp_path / "patients.csv")
    values = survival_experiment(tmp_path / "patients.csv", secure_aggregation=masks)
    found = diagnosed(tmp_path, values, min_count=1).report.sites
    data = ("data", "task", "label", "partition", "survival", "holdout")
    expected = site_differences(unskew.load_federation(**{name: values[name] for name in data}))
    assert found.pooled["events"] == expected.pooled["events"]
    assert found.pooled["survival"] == pytest.approx(expected.pooled["survival"], abs=0.01)
    assert len(found.rows) == (0 if masks == "required" else 3)
    for mine, theirs in zip(found.rows, expected.rows, strict=False):
        assert mine["events"] == theirs["events"]
        assert mine["survival"] == pytest.approx(theirs["survival"], abs=0.02)
    assert found.test["conservative"] == (masks == "required")
    assert found.test["statistic"] == pytest.approx(expected.test["statistic"], rel=0.25)


def test_small_cells_are_hidden_with_a_note(tmp_path):
    survival_table(tmp_path / "patients.csv")
    found = diagnosed(tmp_path, survival_experiment(tmp_path / "patients.csv"), min_count=10)
    assert found.report.sites.rows[0]["survival"] is None
    assert found.report.sites.test is None
    assert any("survival times (3)" in note for note in found.notes)


def test_a_site_that_does_not_allow_survival_ends_the_diagnosis(tmp_path):
    survival_table(tmp_path / "patients.csv")
    with pytest.raises(EngineError, match="permission survival"):
        diagnosed(tmp_path, survival_experiment(tmp_path / "patients.csv"), allow=["counts"])
