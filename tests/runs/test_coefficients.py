"""Coefficients of a run, against weighted least squares on the rows of the file."""

import csv
import json
from statistics import NormalDist

import numpy as np
import pytest
import torch
from support.running import call

import unskew
from unskew.errors import ConfigError
from unskew.reporting.report import report
from unskew.runs.coefficients import MOST_INPUTS

RUN = {"model": "logistic", "rounds": 2, "local_steps": 5, "lr": 0.05, "engine": "inline"}
NORMAL = NormalDist()


@pytest.fixture(scope="module")
def patients(tmp_path_factory):
    """A table of three hospitals with a number that float32 would round, a gap, a date, and two categories."""
    path, draws = tmp_path_factory.mktemp("coefficients") / "patients.csv", np.random.default_rng(0)
    rows = []
    for k in range(400):
        age, lot, sex, stage = draws.integers(20, 90), 500_000 + draws.integers(200), draws.choice(["f", "m"]), k % 3
        risk = 0.05 * (age - 55) + 0.01 * (lot - 500_100) + (sex == "m") - 0.4 * stage
        rows.append({
            "hospital": "NES"[draws.choice(3, p=[0.6, 0.3, 0.1])],
            "age": age,
            "lot": lot,
            "weight": "" if k % 17 == 0 else draws.integers(50, 110),
            "sex": sex,
            "stage": "" if k % 29 == 0 else ("I", "II", "III")[stage],
            "seen": str(np.datetime64("2020-01-01") + draws.integers(1000)),
            "sick": "yes" if draws.random() < 1 / (1 + np.exp(-risk)) else "no",
            "use": "train" if k % 4 else "test",
        })  # fmt: skip
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    return path, [row for row in rows if row["use"] == "train"]


def options(path, **changes):
    return {
        **RUN, "data": str(path), "label": "sick", "partition": "natural:hospital", "split_by": "column:use", "holdout": 0.0,
        "categories": ("sex", "stage"), "dates": ("seen",), "missing": "indicator", "exclude": ("lot",),
        "coefficients": True, **changes,
    }  # fmt: skip


@pytest.fixture(scope="module")
def coefficients(patients, tmp_path_factory):
    folder = tmp_path_factory.mktemp("coefficients") / "run"
    return unskew.run(**options(patients[0]), out=folder), json.loads((folder / "coefficients.json").read_text())


def weighted_least_squares(x, y):
    """Coefficients, standard errors and log likelihood of a logistic regression; columns are centered for accuracy."""
    center = np.append(0, x[:, 1:].mean(0))
    z, beta = (x - center) / np.append(1, x[:, 1:].std(0)), np.zeros(x.shape[1])
    for _ in range(30):
        p = 1 / (1 + np.exp(-z @ beta))
        w = np.sqrt(p * (1 - p))
        beta = np.linalg.lstsq(z * w[:, None], w * (z @ beta) + (y - p) / w, rcond=None)[0]
    back = np.diag(1 / np.append(1, x[:, 1:].std(0)))
    back[0, 1:] = -center[1:] / x[:, 1:].std(0)
    r = np.linalg.inv(np.linalg.qr(z * w[:, None])[1])
    return back @ beta, np.sqrt(np.square(back @ r).sum(1)), np.log(np.where(y, p, 1 - p)).sum()


@pytest.mark.parametrize("lot", [False, True])
def test_coefficients_are_pooled_maximum_likelihood_in_the_units_of_the_file(patients, coefficients, tmp_path, lot):
    rows, (_, content) = patients[1], coefficients
    if lot:  # inputs are float32, so that the differences of its values to their mean are rounded
        unskew.run(**options(patients[0], exclude=()), out=tmp_path / "run")
        content = json.loads((tmp_path / "run/coefficients.json").read_text())
    column = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    known = column["weight"] != ""
    weight = np.where(known, column["weight"], "0").astype(float)
    weight[~known] = np.float32(weight[known].mean())
    x = {
        ("(intercept)", None): np.ones(len(rows)),
        ("age", None): column["age"].astype(float),
        **({("lot", None): column["lot"].astype(float)} if lot else {}),
        ("weight", None): weight,
        ("sex", "m"): column["sex"] == "m",
        ("stage", "(missing)"): column["stage"] == "",
        ("stage", "II"): column["stage"] == "II",
        ("stage", "III"): column["stage"] == "III",
        ("seen", None): column["seen"].astype("datetime64[D]").astype(float),
        ("weight missing", None): ~known,
    }
    y = column["sick"] == "yes"
    beta, error, likelihood = weighted_least_squares(np.column_stack([*x.values()]).astype(float), y)
    assert [(row["column"], row["category"]) for row in content["coefficients"]] == list(x)
    for (name, category), row, b, s in zip(x, content["coefficients"], beta, error, strict=True):
        low, high = b - NORMAL.inv_cdf(0.975) * s, b + NORMAL.inv_cdf(0.975) * s
        expected = {"column": name, "category": category}
        expected |= {"coefficient": b, "standard_error": s, "z": b / s, "p_value": 2 * NORMAL.cdf(-abs(b / s))}
        expected |= {"coefficient_low": low, "coefficient_high": high}
        expected |= {"odds_ratio": np.exp(b), "odds_ratio_low": np.exp(low), "odds_ratio_high": np.exp(high)}
        assert row == pytest.approx(expected, rel=1e-6 if lot else 1e-9)
    assert content["log_likelihood"] == pytest.approx(likelihood, rel=1e-7 if lot else 1e-12)
    assert (content["event"], content["rows"], content["events"]) == ("yes", len(rows), y.sum())
    assert content["references"] == {"sex": "f", "stage": "I"}


def test_the_run_is_unchanged_and_the_sums_are_counted(patients, coefficients):
    result, content = coefficients
    plain = unskew.run(**options(patients[0], coefficients=False))
    assert torch.equal(plain.vector, result.vector)
    assert [row["loss"] for row in plain.history] == [row["loss"] for row in result.history]
    p, numbers = len(content["coefficients"]) + 1, content["exchanges"] * 3 * 8  # the category sex=(missing) has no row
    assert result.summary["bytes_down"] - plain.summary["bytes_down"] == numbers * (p + 6)  # six inputs
    assert result.summary["bytes_up"] - plain.summary["bytes_up"] == numbers * (p * p + p + 1 + 2)
    assert "coefficients_omitted" not in result.summary


def test_coefficients_depend_neither_on_the_method_nor_on_class_weights(patients, coefficients, tmp_path):
    changes = {"method": "fedprox:mu=1+scaffold", "class_weights": "balanced", "participation": 0.4}
    unskew.run(**options(patients[0], **changes), out=tmp_path / "run")
    other = json.loads((tmp_path / "run/coefficients.json").read_text())
    unskew.run(**options(patients[0], positive="no"), out=tmp_path / "no")
    negative = json.loads((tmp_path / "no/coefficients.json").read_text())
    mine = [row["coefficient"] for row in other["coefficients"]]
    assert other["log_likelihood"] == coefficients[1]["log_likelihood"]
    assert negative["event"] == "no"
    assert [-row["coefficient"] for row in negative["coefficients"]] == pytest.approx(mine, rel=1e-9)


def arrays(n=40, inputs=3, classes=2):
    draws = np.random.default_rng(0)
    part = draws.integers(0, 5, (n, inputs)).astype("float32"), np.arange(n) % classes
    return unskew.Federation.from_arrays([part] * 6, test=part, holdout=0.0)


def test_arrays_have_numbered_inputs_and_constant_ones_have_no_coefficient(tmp_path):
    fed = arrays()
    for client in fed.clients:
        client.x[:, 1] = 0
    unskew.run(fed, **RUN, coefficients=True, out=tmp_path / "run")
    rows = json.loads((tmp_path / "run/coefficients.json").read_text())["coefficients"]
    assert [row["column"] for row in rows] == ["(intercept)", "input 0", "input 1", "input 2"]
    assert [row["odds_ratio"] is None for row in rows] == [False, False, True, False]


def test_separated_classes_give_the_reason_and_no_file(tmp_path):
    fed = arrays()
    for client in fed.clients:
        client.x[:, 1] = client.y
    with pytest.warns(UserWarning, match="Coefficients have no intervals: .*'input 1'.* separates the classes"):
        result = unskew.run(fed, **RUN, coefficients=True, out=tmp_path / "run")
    assert "'input 1'" in result.summary["coefficients_omitted"]
    assert not (tmp_path / "run/coefficients.json").exists()


@pytest.mark.parametrize("method", ["dp:epsilon=8", "dpsgd:epsilon=8", "dp:epsilon=8,reproducible=true"])
def test_differential_privacy_excludes_coefficients_and_sends_no_sums(tmp_path, method):
    with pytest.warns(UserWarning, match="differential privacy"):
        result = unskew.run(arrays(), **RUN, method=method, coefficients=True, out=tmp_path / "run")
    plain = unskew.run(arrays(), **RUN, method=method)
    assert "differential privacy" in result.summary["coefficients_omitted"]
    assert not (tmp_path / "run/coefficients.json").exists()
    assert result.summary["bytes_up"] == plain.summary["bytes_up"]


@pytest.mark.parametrize(
    ("changes", "fed", "problem"),
    [
        ({"model": "mlp"}, {}, "the model is mlp"),
        ({"model": torch.nn.Linear(3, 2)}, {}, "the model is an object"),
        ({}, {"classes": 3}, "there are 3 classes"),
        ({}, {"inputs": MOST_INPUTS + 1}, "and 201 inputs"),
    ],
)
def test_other_models_and_data_are_rejected_before_training(tmp_path, changes, fed, problem):
    with pytest.raises(ConfigError, match=problem):
        unskew.run(arrays(**fed), **{**RUN, **changes}, coefficients=True, out=tmp_path / "run")


def test_coefficients_need_a_folder():
    with pytest.raises(ConfigError, match="written to the run folder"):
        unskew.run(arrays(), **RUN, coefficients=True)


def test_the_command_line_names_the_file_and_the_report_shows_it(patients, tmp_path, capsys):
    words = ["--data", patients[0], "--label", "sick", "--partition", "natural:hospital", "--exclude", "use,seen"]
    words += ["--categories", "sex,stage", "--missing", "mean", "--model", "logistic", "--rounds", 1, "--coefficients"]
    shown = call(capsys, "run", *words, "--engine", "inline", "--out", tmp_path / "run")
    assert "coefficients.json" in shown.out
    pytest.importorskip("plotly", reason="plotly is not installed")
    page = report(tmp_path / "run").read_text()
    assert "stage: II (against I)" in page
    assert "Odds ratios of yes" in page
