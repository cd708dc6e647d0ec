"""Hazard ratios of a run, against a Poisson regression on the rows of the file."""

import json

import numpy as np
import pytest
from support.sites import TINY, deployed
from support.survival_rows import UNTIL, survival_experiment, survival_table

import unskew
from unskew.errors import ConfigError
from unskew.reporting.report import report


def poisson_regression(x, time, event, cuts):
    """Coefficients and standard errors of columns with a constant log hazard in each bin, by weighted least squares."""
    low = np.append(0, cuts[:-1])
    spent = np.clip(time[:, None] - low, 0, cuts - low)
    occurred = ((time[:, None] > low) & (time[:, None] <= cuts) & event[:, None]).astype(float)
    row, bin_of = np.nonzero(spent > 0)
    z = np.column_stack([np.eye(len(cuts))[bin_of], (x - x.mean(0))[row]])
    exposure, y = spent[row, bin_of], occurred[row, bin_of]
    beta = np.append(np.log(occurred.sum(0) / spent.sum(0)), np.zeros(x.shape[1]))
    for _ in range(30):
        mean = exposure * np.exp(z @ beta)
        w = np.sqrt(mean)
        beta = np.linalg.lstsq(z * w[:, None], w * (z @ beta) + (y - mean) / w, rcond=None)[0]
    r = np.linalg.inv(np.linalg.qr(z * w[:, None])[1])
    return beta[len(cuts) :], np.sqrt(np.square(r).sum(1))[len(cuts) :]


def options(path, **more):
    """An experiment whose training rows are the rows of two parts of the file."""
    return survival_experiment(path, coefficients=True, survival={"until": UNTIL, "bins": [100, 300, UNTIL]}, **more)


@pytest.fixture
def path(tmp_path):
    survival_table(tmp_path / "patients.csv")
    return tmp_path / "patients.csv"


def training_rows(path, values):
    """Ages, times and events of the training rows."""
    names = ("data", "task", "label", "partition", "survival", "holdout")
    federation = unskew.load_federation(**{name: values[name] for name in names})
    clients = [federation.clients[k] for k in range(3)]
    x, y = (np.concatenate([getattr(c, name).double().numpy() for c in clients]) for name in ("x", "y"))
    scale = federation.normalization.scale if federation.normalization else 1.0
    return x * scale, *y.T


def test_hazard_ratios_are_those_of_a_poisson_regression_of_all_rows(path, tmp_path):
    values = options(path)
    unskew.run(**values, out=tmp_path / "run")
    content = json.loads((tmp_path / "run" / "coefficients.json").read_text())
    x, time, event = training_rows(path, values)
    event = (event > 0) & (time <= UNTIL)
    beta, error = poisson_regression(x, np.minimum(time, UNTIL), event, np.array([100.0, 300.0, UNTIL]))
    (row,) = content["coefficients"]
    assert (row["column"], content["rows"], content["events"]) == ("age", len(time), event.sum())
    assert row["coefficient"] == pytest.approx(beta[0], rel=1e-6)
    assert row["standard_error"] == pytest.approx(error[0], rel=1e-6)
    assert row["hazard_ratio"] == pytest.approx(np.exp(beta[0]), rel=1e-6)
    assert row["hazard_ratio_high"] == pytest.approx(np.exp(beta[0] + 1.959964 * error[0]), rel=1e-6)
    page = report([tmp_path / "run"], tmp_path / "report.html").read_text()
    assert "Hazard ratios of event" in page


def test_sites_have_the_coefficients_of_a_simulation(path, tmp_path):
    survival_table(path)
    values = {**TINY, **options(path, max_train_samples=None)}
    unskew.run(**values, out=tmp_path / "simulated")
    deployed(tmp_path, **{**values, "secure_aggregation": "required"})
    mine, theirs = (json.loads((tmp_path / name / "coefficients.json").read_text()) for name in ("run", "simulated"))
    for row, expected in zip(mine["coefficients"], theirs["coefficients"], strict=True):
        assert row == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "changes",
    [{"model": "mlp"}, {"model_options": {"hidden": [8]}}, {"loss": "discrete"}],
    ids=["model", "hidden", "loss"],
)
def test_models_without_hazard_ratios_are_rejected_before_training(path, tmp_path, changes):
    with pytest.raises(ConfigError, match="coefficients requires"):
        unskew.run(**{**options(path), **changes}, out=tmp_path / "run")
