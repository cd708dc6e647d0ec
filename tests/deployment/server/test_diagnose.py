"""Diagnosis of sites next to ``unskew.diagnose``, with and without masks; permissions; what is stored; the command."""

import json
import stat

import pytest
import torch
from support.running import call
from support.sites import TINY, LoopPlace

import unskew
from unskew.config.loader import experiment
from unskew.deployment.flower.superlinks import RunLocation
from unskew.deployment.server.config import Deployment
from unskew.deployment.server.diagnose import choose_statistics, diagnose_sites
from unskew.diagnosis.traffic_estimate import estimate_traffic
from unskew.errors import ConfigError, EngineError
from unskew.methods.registry import method
from unskew.sums.registry import PERMISSIONS

ALL = {"allow": [*PERMISSIONS], "min_count": 1}
SITES = {**TINY, "holdout": 0.0, "precision": "fp64"}
UNKNOWN = {"label_distance_max", "sigma2_max"}
"""Values that are not functions of sums."""


def diagnosed(folder, values, statistics=(), rules=ALL, place=None):
    place = place or LoopPlace(folder, values, statistics=rules)
    told = []
    found = diagnose_sites(
        experiment(values), Deployment(startup_timeout=0.5), folder / "out", statistics, told.append, told.append, place
    )
    return found, place


def table(folder):
    """Patients of three clinics, whose numbers and outcomes differ; with missing values and a category."""
    rows = ["clinic,age,dose,drug,ill"]
    draws = torch.Generator().manual_seed(0)
    for n in range(240):
        clinic = n % 3
        age, dose = (60 + 10 * torch.randn(2, generator=draws) + 4 * clinic).tolist()
        drug = "ABC"[int(torch.randint(3, (1,), generator=draws))]
        ill = torch.rand(1, generator=draws) < 0.2 + 0.2 * clinic
        rows.append(f"{clinic},{age:.0f},{'' if n % 17 == 0 else f'{dose:.1f}'},{drug},{'yes' if ill else 'no'}")
    (folder / "patients.csv").write_text("\n".join(rows))
    return {
        **SITES, "data": f"table:{folder / 'patients.csv'}", "label": "ill", "partition": "natural:clinic",
        "max_train_samples": None, "missing": "mean", "categories": {"drug": ["A", "B", "C"]},
        "ranges": {"age": [0, 120]}, "model": "table-mlp",
    }  # fmt: skip


def assert_equal_numbers(found, simulated):
    """The label skew, feature skew, gradients and advice are those of the simulation."""
    mine, theirs = found.report.as_json(), simulated.as_json()
    for name in simulated.labels:
        assert mine[name] == (None if name in UNKNOWN else pytest.approx(theirs[name], rel=1e-12, abs=1e-14)), name
    for name in ("zeta2", "gradient2", "sigma2_mean", "sigma2_avg"):
        assert mine["models"][0][name] == pytest.approx(theirs["models"][0][name], rel=1e-12), name
    assert mine["tau"] == theirs["tau"]
    assert found.report.summary() == simulated.summary()
    advice, expected = found.report.advice(), simulated.advice()
    assert [entry.method for entry in advice.suggestions] == [entry.method for entry in expected.suggestions]
    assert advice.excluded == expected.excluded
    assert advice.notes == expected.notes


def test_sites_have_the_numbers_of_a_simulation(tmp_path):
    found, place = diagnosed(tmp_path, SITES)
    simulated = unskew.diagnose(curvature=False, **SITES)
    assert_equal_numbers(found, simulated)
    for mine, theirs in zip(found.report.sites.rows, simulated.sites.rows, strict=True):
        assert mine["shifts"] == [(name, pytest.approx(value)) for name, value in theirs["shifts"]]
        assert {**mine, "shifts": 0} == {**theirs, "shifts": 0}
    sent = [estimate_traffic(report.setting, method("fedavg")) for report in (found.report, simulated)]
    assert sent[0] == sent[1]
    assert sum(found.classes.values()) == 200
    assert sum(frame.kind == "sums" for _, frame in place.link.sent) == 2 * 3  # two exchanges


@pytest.mark.parametrize("masks", ["off", "required"])
def test_a_table_over_sites_has_the_numbers_of_a_simulation_also_under_masks(tmp_path, masks):
    values = {**table(tmp_path), "secure_aggregation": masks}
    found, _ = diagnosed(tmp_path, values)
    simulated = unskew.diagnose(curvature=False, **values)
    assert_equal_numbers(found, simulated)
    columns = {row["column"]: row for row in found.columns}
    assert [row["missing"] for row in found.columns] == simulated.setting.federation.missing.sum(0).tolist()
    assert columns["age"]["q25"] < columns["age"]["median"] < columns["age"]["q75"]
    assert {**columns["drug"], "missing": 0} == {"column": "drug", "missing": 0}
    record = json.loads((tmp_path / "out" / "statistics.json").read_text())
    assert all(bool(part["sites"]) == (masks == "off") for part in record["exchanges"])
    assert bool(found.report.sites.rows) == (masks == "off")


def test_the_summary_says_that_neither_labels_nor_gradients_were_requested(tmp_path):
    found, _ = diagnosed(tmp_path, SITES, ["features"], {"allow": ["features"], "min_count": 1})
    expected = "The skew was not measured, because counts and gradients were not requested (--statistics)."
    assert found.report.summary() == expected


def test_only_the_statistics_that_are_named_are_asked_for(tmp_path):
    found, place = diagnosed(tmp_path, SITES, ["counts"], {"allow": ["counts"], "min_count": 1})
    asked = {kind for _, frame in place.link.sent for kind in str(frame.config.get("requests", "")).split('"')}
    assert not asked & {"class_means", "label_products", "gradient"}
    assert found.report.labels["label_distance_mean"] is not None
    assert found.report.labels["label_between"] is not None
    assert found.report.labels["feature_skew"] is None
    assert found.report.advice().situation.dissimilarity is None  # it is not a similarity of 0
    assert found.notes[-1].startswith("Not requested: feature skew (features), differences of gradients (gradients).")


@pytest.mark.parametrize("masks", ["off", "required"])
def test_a_statistic_that_a_site_does_not_allow_ends_the_diagnosis_with_both_names(tmp_path, masks):
    values = {**SITES, "secure_aggregation": masks}
    with pytest.raises(EngineError, match=r"site-0.*permission features"):
        diagnosed(tmp_path, values, ["counts", "features"], {"allow": ["counts"]})
    assert not (tmp_path / "out").exists()


def test_what_was_requested_and_received_is_stored_for_its_owner(tmp_path):
    diagnosed(tmp_path, SITES, ["counts", "gradients"])
    out = tmp_path / "out"
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()} == {0o600}
    assert {path.name for path in out.iterdir()} >= {"statistics.json", "config.yaml", "deployment.json", "audit.jsonl"}
    record = json.loads((out / "statistics.json").read_text())
    (part,) = record["exchanges"]
    assert [request["kind"] for request in part["requests"]] == ["class_counts", "gradient"]
    fed = unskew.load_federation(
        **{k: SITES[k] for k in ("data", "max_train_samples", "partition", "clients", "holdout")}
    )
    counts = [own[0]["counts"] for own in part["sites"].values()]
    assert counts == [client.y.bincount(minlength=10).tolist() for client in fed.clients]
    events = [json.loads(line) for line in (out / "audit.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events if "statistics" in e["event"]] == [
        "statistics requested", *["statistics received"] * 3
    ]  # fmt: skip


def test_small_counts_under_masks_are_not_shown(tmp_path):
    values = {**SITES, "secure_aggregation": "required", "max_train_samples": 60}
    found, _ = diagnosed(tmp_path, values, ["counts"], {"allow": ["counts"]})
    totals = experiment(values)
    counts = unskew.load_federation(
        data="digits", partition=totals.partition, clients=3, max_train_samples=60, holdout=0.0
    ).class_counts().sum(0)  # fmt: skip
    assert [*found.classes.values()] == [None if 0 < n < 10 else n for n in counts.tolist()]


def test_sums_that_a_site_hides_are_left_out_with_their_number_of_rows(tmp_path):
    """At the third clinic, the few who do not smoke are a small group, so it sends neither their sums nor how many rows."""
    draws, rows = torch.Generator().manual_seed(0), ["clinic,sex,age,smoker,ill"]
    for clinic, smokers in enumerate((50, 50, 96)):
        ages = (60 + 10 * torch.randn(100, generator=draws)).tolist()
        rows += [
            f"{clinic},{'fm'[i % 4 < 2]},{age:.1f},{int(i < smokers)},{'yes' if i % 2 else 'no'}"
            for i, age in enumerate(ages)
        ]
    (tmp_path / "patients.csv").write_text("\n".join(rows))
    values = {
        **SITES, "data": f"table:{tmp_path / 'patients.csv'}", "label": "ill", "partition": "natural:clinic",
        "max_train_samples": None, "model": "logistic", "categories": {"sex": ["f", "m"]},
    }  # fmt: skip
    found, _ = diagnosed(tmp_path, values, ["moments", "features"], {"allow": [*PERMISSIONS], "min_count": 10})
    sizes = unskew.load_federation(values["data"], label="ill", partition=values["partition"], holdout=0.0).sizes
    smokers = next(row for row in found.columns if row["column"] == "smoker")
    assert smokers["values"] == sizes[:2].sum()
    assert smokers["mean"] == pytest.approx(0.5, abs=0.1)
    assert found.report.labels["feature_skew"] == pytest.approx(0.0, abs=0.05)
    assert "means (1), feature skew (1)" in found.notes[0]


def test_small_counts_that_sites_hide_are_noted(tmp_path):
    values = table(tmp_path)
    found, _ = diagnosed(tmp_path, values, (), {"allow": [*PERMISSIONS], "min_count": 14})
    hidden = "quartiles (3), missing values (3), feature skew (3), differences of labels (3), gradients (1)"
    assert found.notes[0].startswith(f"Sites hide some counts or sums (number of sites): {hidden}. Few rows ")
    assert found.notes[1].startswith("The class counts add up to ")
    assert found.report.labels["label_between"] is not None  # from the counts, if products of rows are hidden
    assert found.report.labels["label_unexplained"] is None
    ages = next(row for row in found.columns if row["column"] == "age")
    assert ages["values"] == 192
    assert ages["median"] is None


@pytest.mark.parametrize(
    ("statistics", "changes", "message"),
    [
        (["colors"], {}, "'colors' is not a statistic. Choose from counts, missing"),
        (["histograms"], {}, r"has no ranges. Add the ends .* ranges: \{age: \[0, 120\]\}"),
        (["missing"], {}, "not a table with mixed columns"),
        ([], {"ranges": {"age": [0, 9]}}, "ranges names 'age'"),
    ],
)
def test_statistics_that_the_experiment_cannot_use_are_errors(statistics, changes, message):
    fed = unskew.load_federation("digits", partition="iid", clients=3, max_train_samples=30)
    with pytest.raises(ConfigError, match=message):
        choose_statistics(statistics, experiment({**TINY, **changes}), fed)


def test_the_command_prints_and_writes_the_same_diagnosis(tmp_path, monkeypatch, capsys):
    values = table(tmp_path)
    (tmp_path / "experiment.yaml").write_text(experiment(values).to_yaml())
    place = LoopPlace(tmp_path, values, statistics=ALL)
    monkeypatch.setattr(RunLocation, "superlink", lambda *arguments: place)
    command = ["deploy", "diagnose", tmp_path / "experiment.yaml", "--local", 3, "--statistics", "counts,histograms"]
    printed = json.loads(call(capsys, *command, "--out", tmp_path / "json", "--json").out)
    assert printed == json.loads((tmp_path / "json" / "diagnosis.json").read_text())
    text = call(capsys, *command, "--out", tmp_path / "text").out
    assert printed["summary"].split(":")[0] in text
    for name in ("Classes, all sites", "Columns, all sites", "median", "Not requested: feature skew", "unskew compare"):
        assert name in text
