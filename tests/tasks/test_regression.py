"""Regression: figures as scikit-learn's, methods that have a meaning for it, and everything that shows a score."""

import json

import numpy as np
import pytest
import torch
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error
from support.federations import LORA, SMALL_COHORT
from support.running import call
from support.tolerance import FEW, near

import unskew
from unskew.errors import ConfigError, DataError
from unskew.methods.descriptions import describe_method
from unskew.methods.registry import METHODS
from unskew.reporting.run_groups import group_runs
from unskew.reporting.run_reader import read_runs
from unskew.reporting.tables import comparison_table, fairness_table
from unskew.tasks.metrics import MetricSet
from unskew.tasks.regression import LEAST, Regression, regression_metrics, regression_sums

TINY = {"model": "logistic", "rounds": 3, "local_steps": 5, "lr": 0.1, "engine": "inline", "precision": "fp64"}


def rows(n, draws, targets=2):
    x = draws.normal(size=(n, 4)).astype("float32")
    return x, x @ draws.normal(size=(4, targets)) * 30 + 200


@pytest.fixture(scope="module")
def fed():
    draws = np.random.default_rng(0)
    sizes = (40, 60, 30)
    names = ["systolic", "diastolic"]
    clients, test, server = [rows(n, draws) for n in sizes], rows(50, draws), rows(20, draws)
    return unskew.Federation.from_arrays(clients, test, server, task="regression", class_names=names)


@pytest.fixture(scope="module")
def raw():
    draws = np.random.default_rng(0)
    return [rows(n, draws) for n in (40, 60, 30, 50)]


@pytest.mark.parametrize("loss", ["auto", "mae", "huber:0.5"])
def test_the_figures_are_scikit_learns_in_the_targets_own_units(fed, raw, loss):
    result = unskew.run(fed, loss=loss, early_stopping=5, target=0.01, **TINY)
    x, y = raw[-1]
    said = np.array(result.predict(x))
    last = result.history[-1]
    assert last["r2"] == near(r2_score(y, said), dtype=torch.float32)
    assert last["mae"] == near(mean_absolute_error(y, said), dtype=torch.float32)
    assert last["rmse"] == near(root_mean_squared_error(y, said), dtype=torch.float32)
    std, mean = (np.array(values) for values in (fed.objective.std, fed.objective.mean))
    ours, true = (torch.from_numpy((values - mean) / std) for values in (said, y))
    functions = {"auto": torch.nn.MSELoss(), "mae": torch.nn.L1Loss(), "huber:0.5": torch.nn.HuberLoss(delta=0.5)}
    assert last["loss"] == near(float(functions[loss](ours, true)), dtype=torch.float32)
    summary = result.summary
    assert summary["best_r2"] == max(row["r2"] for row in result.history)
    assert summary["best_mae"] == min(row["mae"] for row in result.history)
    assert summary["validation_r2"] == max(row["validation_r2"] for row in result.history)
    reached = next((row["round"] for row in result.history if row["r2"] >= 0.01), None)
    assert summary["rounds_to_target"] == reached
    assert "accuracy" not in last
    assert not any("accuracy" in name for name in summary)
    assert {"r2", "loss"} <= set(result.clients[0])


def test_targets_are_scaled_by_sums_of_what_clients_train_on(fed, raw):
    held = [len(fed.clients[k].y_test) for k in range(3)]
    y = torch.cat([fed.clients[k].y for k in range(3)]).double()
    assert y.mean(0).abs().max() < FEW * 1e3
    assert (y.std(0, correction=0) - 1).abs().max() < 1e-6
    assert held == [4, 6, 3]
    assert fed.stats_traffic.tolist() == [[48, 48]] * 3
    result = unskew.run(fed, **TINY)
    assert result.history[0]["bytes_up"] == 3 * (48 + 8 * result.summary["parameters"])
    assert fed.label_distribution()[1] == ("samples",)


def test_a_model_that_diverges_has_a_score():
    y = torch.tensor([[1.0], [2.0]])
    assert regression_metrics(regression_sums(y * float("nan"), y))["r2"] == LEAST
    assert regression_metrics(regression_sums(torch.ones(2, 1), torch.ones(2, 1)))["r2"] == 1
    assert Regression().correct(torch.tensor([[float("inf")]]), y[:1]).tolist() == [LEAST]


@pytest.mark.parametrize("mean", [0.0, 1e8, -1.7e9])
def test_metrics_and_predictions_have_their_digits_far_from_zero(mean):
    draws = np.random.default_rng(0)
    y = mean + draws.normal(size=(200, 2))
    logits = torch.from_numpy((y - mean + draws.normal(size=(200, 2)) / 2).astype("float32")) / 3
    task = Regression(mean=(mean, mean), std=(3.0, 3.0))
    predicted = task.outputs(logits).numpy()
    np.testing.assert_array_equal(predicted, logits.numpy().astype("float64") * 3 + mean)
    oracles = {"r2": r2_score, "mae": mean_absolute_error, "rmse": root_mean_squared_error}
    expected = {name: pytest.approx(oracle(y, predicted), abs=1e-6) for name, oracle in oracles.items()}
    assert task.metrics_of_outputs(y, predicted, MetricSet()) == expected
    assert task.measure(task.tally(logits, task.standardize(torch.from_numpy(y))), 0.0) == expected
    same = np.full((7, 2), mean + 0.1)
    for guess in (same, same + 0.3):  # scikit-learn returns 1 and 0, unless the rounded mean differs from the targets
        assert task.metrics_of_outputs(same, guess, MetricSet())["r2"] == float(guess is same)
        logits = (task.standardize(torch.from_numpy(values)) for values in (guess, same))
        assert task.measure(task.tally(*logits), 0.0)["r2"] == float(guess is same)


def test_r2_of_one_sample_is_undefined(fed, raw):
    x, y = raw[-1]
    assert np.isnan(Regression().metrics_of_outputs(y[:1], y[:1], MetricSet())["r2"])
    test = (x[:1], y[:1])
    options = {"task": "regression", "class_names": ["high", "low"], "holdout": 0.2}
    result = unskew.run(unskew.Federation.from_arrays(raw[:2], test, **options), **TINY)
    assert [row["r2"] for row in result.history] == [None] * 3
    assert result.summary["best_r2"] is None
    assert result.summary["rmse"] == near(np.abs(np.array(result.predict(x[:1])) - y[:1]).mean(), dtype=torch.float32)


def test_methods_for_classes_are_refused_before_the_start(fed):
    refusing = [name for name in METHODS if "regression" not in describe_method(name)["tasks"]]
    assert {"fedcog", "fedssyn", "fedgen", "feddf", "fedntd", "fedreg", "vhl", "dense", "feddm"} <= set(refusing)
    for name in refusing:
        with pytest.raises(ConfigError, match=r"'regression', because .*\. Supported tasks"):
            unskew.run(fed, method=name, **TINY)


PRIVATE = ("dp", "dpsgd")
"""Methods that reject the standardization of this federation's targets."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name for name in METHODS if "regression" in describe_method(name)["tasks"] and name not in (*PRIVATE, *LORA)],
)
def test_all_others_train(fed, name):
    name = SMALL_COHORT.get(name, name)
    options = {**TINY, "model": "mlp", "model_options": {"hidden": [8]}}
    start = unskew.run(fed, method=name, **options | {"rounds": 1}).summary["loss"]
    best = unskew.run(fed, method=name, **options | {"rounds": 12}).summary["best_loss"]
    assert best < max(start, 0.7)  # the mean has a loss of 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"class_weights": "balanced"}, "class_weights require classification or segmentation"),
        ({"metrics": "auroc"}, "metrics=auroc requires classification"),
        ({"loss": "huber:0"}, "above 0"),
    ],
)
def test_what_has_no_meaning_is_refused(fed, options, words):
    with pytest.raises(ConfigError, match=words):
        unskew.run(fed, **TINY, **options)


def test_targets_that_are_no_numbers_are_refused(raw):
    x, y = raw[0]
    with pytest.raises(DataError, match="NaN or infinite"):
        unskew.Federation.from_arrays([(x, y * np.nan)], (x, y), task="regression")
    digits = unskew.load_federation("digits", clients=2, partition="iid")
    with pytest.raises(ConfigError, match="loss=mae requires regression"):
        unskew.run(digits, loss="mae", **TINY)


def test_a_comparison_its_tables_and_its_report_show_r2(tmp_path, capsys):
    draws = np.random.default_rng(1)
    x, y = rows(90, draws)
    table = tmp_path / "t.csv"
    lines = [f"{'abc'[k % 3]},{','.join(map(str, x[k]))},{y[k, 0]},{y[k, 1]}" for k in range(90)]
    table.write_text("ward,a,b,c,d,high,low\n" + "\n".join(lines) + "\n")
    told = [f"{key}={value}" for key, value in TINY.items() if key not in ("model", "rounds", "local_steps", "lr")]
    command = [
        "compare",
        "fedavg",
        "ditto",
        "--data",
        f"table:{table}",
        "--label",
        "high,low",
        "--seeds",
        "1",
        "--lr",
        "0.1",
    ]
    sets = [piece for one in [*told, "task=regression"] for piece in ("--set", one)]
    shape = [
        "--model",
        "logistic",
        "--rounds",
        "3",
        "--local-steps",
        "5",
        "--partition",
        "natural:ward",
        "--target",
        "0.2",
    ]
    said = call(capsys, *command, *shape, *sets, "--out", str(tmp_path / "out")).out
    assert "Test R² in %" in said
    assert "MAE" in said
    assert "R² in % on the clients' own data" in said
    runs, _ = read_runs([tmp_path / "out"])
    (part,), _ = group_runs(runs)
    table = comparison_table(part)
    assert table.caption.startswith("Test R²")
    assert {"MAE", "RMSE"} <= set(table.columns)
    assert fairness_table(part).rows[0][2].value == near(100 * runs[0].summary["client_r2_mean"])
    assert json.dumps("test R² (%)")[1:-1] in (tmp_path / "out" / "report.html").read_text()

    run = tmp_path / "out" / "fedavg" / "seed-0"
    new = tmp_path / "new.csv"
    new.write_text("d,c,b,a\n1,2,3,4\n")
    (found,) = call(capsys, "predict", str(run), str(new), "--json").json()
    exact = unskew.load_predictor(run).predict([[4.0, 3.0, 2.0, 1.0]])[0]
    assert [found["predicted_high"], found["predicted_low"]] == exact
    assert found["predicted_high"] == np.array(unskew.load_predictor(run).predict_file(new))[0, 0]
    assert json.loads((run / "inputs.json").read_text())["class_names"] == ["high", "low"]
    with pytest.raises(ConfigError, match="no probabilities"):
        unskew.load_predictor(run).predict_proba([[4.0, 3.0, 2.0, 1.0]])
