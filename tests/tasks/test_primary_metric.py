"""One metric that judges a run: what it drives, the user's own metrics, and the model of the best round."""

import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from support.pages import DOCS
from support.running import Stop, StopAfter, assert_same_run, call
from support.slow import as_slow
from support.tolerance import near

import unskew
from unskew.cli.comparison_tables import comparison_table
from unskew.comparison.cost_to_target import target_costs
from unskew.errors import CheckpointError, ConfigError
from unskew.records.recorder import first_reaching
from unskew.tasks.curves import classifier_curves
from unskew.tasks.metrics import MetricSet
from unskew.tasks.primary_metric import KNOWN_METRICS, metric_info

pytestmark = pytest.mark.usefixtures("undrawn")
TINY = {"model": "logistic", "rounds": 6, "local_steps": 4, "lr": 2.0, "batch_size": 8, "engine": "inline"}


def cost(y_true, scores):
    """Ten for a positive that is missed, one for a false alarm, per sample."""
    said = scores[:, 1] > 0.5
    return float(np.mean(10 * ((y_true == 1) & ~said) + ((y_true == 0) & said)))


cost.lower_is_better = True


def error(y_true, scores):
    return float(np.abs(y_true - scores).max())


error.lower_is_better = True


def broken(y_true, scores):
    return "many"


def undefined(y_true, scores):
    return float("nan")


def quitting(y_true, scores):
    raise SystemExit(0)


def as_text(y_true, scores):
    return "0.5"


def enormous(y_true, scores):
    return 10**400


def client(y_true, scores):
    return 0.5


def epsilon(y_true, scores):
    return 0.5


def cost_std(y_true, scores):
    return 0.5


def accuracy_low(y_true, scores):
    return 0.5


def all_accuracy(y_true, scores):
    return 0.5


def failing(y_true, scores):
    raise KeyError("x")


@pytest.fixture(scope="module")
def fed():
    draws = np.random.default_rng(3)

    def rows(n, only=None):
        y = (draws.random(n) < 0.2).astype(int) if only is None else np.full(n, only)
        return draws.normal(size=(n, 3)).astype("float32") + 0.7 * y[:, None], y

    clients = [(*rows(60), *rows(40)), (*rows(50), *rows(30)), (*rows(30), *rows(20, only=0))]
    return unskew.Federation.from_arrays(clients, test=rows(120), class_names=["no", "yes"])


def test_the_default_is_the_tasks_own(fed):
    auto, named = unskew.run(fed, **TINY), unskew.run(fed, objective="accuracy", **TINY)
    assert auto.summary["objective"] == "accuracy"
    seconds = ("seconds", "client_seconds", "setup_seconds", "train_seconds")
    assert {k: v for k, v in auto.summary.items() if k not in seconds} == {
        k: v for k, v in named.summary.items() if k not in seconds
    }


@pytest.mark.parametrize("name", ["auroc", "ece", "loss", "worst_client", "recall/yes", "cost"])
def test_it_decides_the_best_round_early_stopping_and_the_target(fed, name):
    asked = {"metrics": [cost]} if name == "cost" else {}
    result = unskew.run(fed, objective=name, early_stopping=2, **{**TINY, "rounds": 12}, **asked)
    lower = name in ("ece", "loss", "cost")
    better = min if lower else max
    values = [row[name] for row in result.history]
    assert result.summary["objective"] == name
    assert result.summary[f"best_{name}"] == better(values)
    assert result.summary["best_round"] == 1 + values.index(better(values))
    held = [row["worst_client" if name == "worst_client" else f"validation_{name}"] for row in result.history]
    best = held.index(better(held))
    assert result.summary["validation_round"] == best + 1
    assert result.summary[f"{name}_at_validation_round"] == values[best]
    assert len(held) == 12 or len(held) - 1 - best == 2
    goal = values[2]
    first = next(i for i, value in enumerate(values) if (value <= goal if lower else value >= goal))
    assert first_reaching(result.history, goal, metric_info(name, {"cost": "lower"}))["round"] == first + 1


def test_held_out_values_are_of_all_held_out_samples_together(fed):
    result = unskew.run(fed, objective="auroc", early_stopping=50, **TINY)
    x, y = (torch.cat([getattr(client, name) for client in fed.clients]) for name in ("x_test", "y_test"))
    p = result.predictor().predict_proba(x)
    assert result.history[-1]["validation_auroc"] == near(roc_auc_score(y, p[:, 1]), dtype=torch.float32)
    worst = unskew.run(fed, objective="worst_client", **TINY)
    scores = [(worst.predictor().predict_proba(c.x_test).argmax(1) == c.y_test.numpy()).mean() for c in fed.clients]
    assert worst.history[-1]["worst_client"] == near(min(scores))
    assert "validation_loss" not in worst.history[-1]


def test_clients_have_every_metric_and_null_where_it_is_undefined(fed):
    result = unskew.run(fed, objective="auroc", metrics=["balanced_accuracy", cost], **TINY)
    predictor = result.predictor()
    for row, client in zip(result.clients, fed.clients, strict=True):
        y, p = client.y_test.numpy(), predictor.predict_proba(client.x_test)
        assert row["cost"] == near(cost(y, p))
        assert (row["auroc"] is None) == (row["client"] == 2)
        if row["client"] < 2:
            assert row["auroc"] == near(roc_auc_score(y, p[:, 1]), dtype=torch.float32)
    there = [row["auroc"] for row in result.clients[:2]]
    assert result.summary["client_auroc_mean"] == near(np.mean(there))
    assert result.summary["client_auroc_worst"] == min(there)
    own = unskew.run(fed, objective=cost, method="fedavg+ft", **TINY)
    costs = [row["personal_cost"] for row in own.clients]
    assert own.summary["personal_cost_worst"] == max(costs)


def test_regression_takes_functions_of_predictions_in_their_units():
    draws = np.random.default_rng(0)
    parts = [(draws.normal(size=(40, 2)).astype("float32"), 100 + 20 * draws.normal(size=40)) for _ in range(3)]
    fed = unskew.Federation.from_arrays(parts[:2], test=parts[2], task="regression", holdout=0.25)
    options = {**TINY, "lr": 0.05, "rounds": 2}
    result = unskew.run(fed, objective=error, **options)
    y = parts[2][1]
    assert result.summary["error"] == near(
        np.abs(y - result.predictor().predict(parts[2][0])).max(), dtype=torch.float32
    )
    assert {"mae", "rmse", "error"} <= set(result.clients[0])
    with pytest.raises(
        ConfigError, match=r"objective=auroc is not available: .* Available: r2, loss, worst_client, mae, rmse"
    ):
        unskew.run(fed, objective="auroc", **options)
    assert unskew.run(fed, objective="mae", target=5.0, **options).summary["target"] == 5.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"objective": "auroq"}, "Did you mean 'auroc'"),
        ({"objective": "recall"}, "no objective 'recall'"),
        ({"objective": "recall/maybe"}, "recall/CLASS"),
        ({"objective": "r2"}, "is not available"),
        ({"metrics": [broken]}, "metric broken must return a number, but returned 'many'"),
        ({"metrics": [quitting]}, "metric quitting failed on the test set .SystemExit: 0"),
        ({"metrics": [as_text]}, "metric as_text must return a number, but returned '0.5'"),
        ({"metrics": [enormous]}, "metric enormous must return a number"),
        ({"metrics": [client]}, "metric client has the name of an existing metric"),
        ({"metrics": [epsilon]}, "metric epsilon has the name of an existing metric"),
        ({"metrics": [cost_std]}, "metric cost_std has the name of an existing metric"),
        ({"metrics": [accuracy_low]}, "metric accuracy_low has the name of an existing metric"),
        ({"metrics": [all_accuracy]}, "metric all_accuracy has the name of an existing metric"),
        ({"metrics": [undefined]}, "metric undefined must return a finite number"),
        ({"objective": failing}, r"metric failing failed on the test set .*shapes \(120,\) and \(120, 2\)"),
        ({"metrics": [lambda y, s: 0.0]}, "is not a valid name"),
        ({"metrics": [len, len]}, "two metrics are named 'len'"),
        ({"metrics": ["no_such_module_here:f"]}, "cannot be imported"),
        ({"target": 1.5}, "at most 1"),
        ({"objective": "loss", "target": -1}, "in the unit of the objective"),
        ({"keep": "best", "method": "ditto"}, "keep=best cannot be combined with method=ditto"),
        ({"keep": "best", "eval_clients": 0}, "keep=best needs evaluated clients"),
    ],
)
def test_objective_rejects_unknown_and_impossible_metrics(fed, options, said):
    with pytest.raises(ConfigError, match=said):
        unskew.run(fed, **{**TINY, "rounds": 1}, **options)


def test_the_model_of_the_best_round_is_kept(fed, tmp_path):
    options = {**TINY, "objective": "auroc", "method": "fedavg+ft"}
    last = unskew.run(fed, early_stopping=100, **options)
    held = [row["validation_auroc"] for row in last.history]
    best = 1 + held.index(max(held))
    assert 1 < best < len(held), "the case decides something"
    kept = unskew.run(fed, keep="best", out=tmp_path / "run", **options)
    then = unskew.run(fed, **{**options, "rounds": best})
    assert torch.equal(kept.vector, then.vector)
    assert not torch.equal(kept.vector, last.vector)
    assert kept.summary["kept_round"] == best
    assert kept.summary["kept_auroc"] == then.summary["auroc"]
    assert kept.summary["auroc"] == last.summary["auroc"]
    assert kept.summary["client_auroc_mean"] == then.summary["client_auroc_mean"]
    served = unskew.load_predictor(tmp_path / "run").predict_proba(fed.test[0])
    assert np.array_equal(served, then.predictor().predict_proba(fed.test[0]))


@pytest.mark.parametrize("stop", [as_slow(2), 5])
def test_a_resumed_run_keeps_the_same_model(fed, tmp_path, stop):
    options = {**TINY, "objective": "auroc", "keep": "best", "checkpoint_every": 1}
    unskew.run(fed, out=tmp_path / "whole", **options)
    with pytest.raises(Stop):
        unskew.run(fed, out=tmp_path / "parts", callbacks=[StopAfter(stop)], **options)
    unskew.resume(tmp_path / "parts", federation=fed)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("engine", ["vectorized", as_slow("processes")])
def test_engines_keep_the_same_model(fed, tmp_path, engine):
    options = {**TINY, "rounds": 12, "objective": cost, "keep": "best", "early_stopping": 3, "method": "fedavg+ft"}
    inline = unskew.run(fed, **options)
    other = {**options, "engine": engine, "checkpoint_every": 1} | ({"workers": 2} if engine == "processes" else {})
    with pytest.raises(Stop):
        unskew.run(fed, out=tmp_path / "run", callbacks=[StopAfter(inline.summary["kept_round"])], **other)
    found = unskew.resume(tmp_path / "run", federation=fed, trust_code=True)
    assert len(found.history) == len(inline.history) < 12
    assert found.summary["kept_round"] == inline.summary["kept_round"] < len(found.history)
    assert found.summary["kept_cost"] == inline.summary["kept_cost"]
    assert torch.allclose(found.vector, inline.vector, atol=1e-5)
    assert [row["personal_cost"] for row in found.clients] == [row["personal_cost"] for row in inline.clients]


@pytest.mark.slow
def test_functions_work_in_runs_side_by_side(fed, tmp_path):
    options = {**TINY, "rounds": 2, "objective": cost, "keep": "best"}
    serial, parallel = (
        unskew.compare(fed, methods=["fedavg"], seeds=2, references=True, parallel=at_once, **options).rows()
        for at_once in (1, 2)
    )
    for row in (*serial, *parallel):
        row["seconds"] = None
    assert serial == parallel
    assert "kept_cost" in serial[1]
    digits = {**options, "data": "digits", "partition": "iid", "clients": 3, "max_train_samples": 200, "max_classes": 2}
    trials = {"methods": ["fedavg"], "trials": 3, "seeds": 1, "pruning": False, **digits}
    one, two = unskew.tune(**trials), unskew.tune(parallel=2, out=tmp_path / "t", **trials)
    assert one.tuned["fedavg"].value == two.tuned["fedavg"].value


def test_a_comparison_ranks_by_it(fed):
    options = {**TINY, "rounds": 3, "objective": cost}
    found = unskew.compare(fed, methods=["fedavg", "scaffold"], seeds=2, **options)
    rows = found.rows()
    means = {name: np.mean([s["best_cost"] for s in each]) for name, each in found.summaries.items()}
    assert found.objective == metric_info("cost", {"cost": "lower"})
    assert found.target == pytest.approx(min(means.values()) / 0.9, rel=0.01)
    assert [row["best_cost"] for row in rows] == pytest.approx(list(means.values()))
    assert all(
        one.rounds is None or one.rounds >= 1 for one in target_costs(found.histories, found.target, found.objective)
    )
    assert "best_cost" in found._repr_html_()
    assert "cost" in repr(found)
    table = comparison_table(rows)
    assert "Test cost (lower is better)" in table.title
    assert any(str(column.header).startswith("rounds to") and "%" not in str(column.header) for column in table.columns)
    with pytest.raises(ConfigError, match="must have the same objective"):
        unskew.compare(
            fed, methods=["fedavg", "scaffold"], seeds=1, overrides={"fedavg": {"objective": "loss"}}, **options
        )


def test_tuning_ranks_by_it(fed):
    options = {**TINY, "rounds": 2, "objective": "auprc", "keep": "best"}
    found = unskew.tune(fed, methods=["fedavg"], trials=3, seeds=1, pruning=False, **options)
    one = found.tuned["fedavg"]
    assert one.judged_by == "validation AUPRC of yes"
    assert {row["objective"] for row in found.trials} == {"auprc"}
    again = unskew.run(
        fed, seed=0, early_stopping=9, **{**options, **one.options, "local_steps": one.options["local_steps"]}
    )
    assert one.value == max(row["validation_auprc"] for row in again.history)
    lowest = unskew.tune(fed, methods=["fedavg"], trials=3, seeds=1, **{**options, "objective": cost})
    assert lowest.tuned["fedavg"].value == min(row["value"] for row in lowest.trials if row["value"] is not None)


def test_functions_of_files_need_trust_and_travel_to_other_processes(fed, tmp_path, monkeypatch, capsys):
    (tmp_path / "my_metrics.py").write_text(
        "def share(y_true, scores):\n    return float((scores[:, 1] > 0.5).mean())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = tmp_path / "c.yaml"
    config.write_text(
        "metrics: [my_metrics:share]\nobjective: share\ndata: digits\npartition: iid\nrounds: 1\nmax_classes: 2\n"
    )
    tiny = ("--clients", "2", "--model", "logistic", "--local-steps", "1", "--engine", "inline")
    code, _, err = call(capsys, "run", config, *tiny, "--out", tmp_path / "a")
    assert code == 2
    assert "--trust-code" in err
    code, out, err = call(capsys, "run", config, *tiny, "--out", tmp_path / "a", "--trust-code", "--json")
    assert code == 0, err
    summary = json.loads(out)
    assert summary["objective"] == "share"
    assert summary["best_share"] is not None
    assert "my_metrics:share" in (tmp_path / "a/config.yaml").read_text()
    own = unskew.Experiment(metrics=[cost], objective=cost)
    assert pickle.loads(pickle.dumps(own)).metrics == (cost,)
    assert own.model_dump(mode="json")["objective"].endswith("test_primary_metric:cost")


def test_every_metric_has_one_entry_with_its_direction():
    from unskew.tasks.metrics import METRICS, TWO_CLASSES
    from unskew.tasks.registry import TASKS

    named = {*METRICS, *(name for task in TASKS.values() for name in (task.scored, "loss", *task.extra_metrics))} - {
        "recall"
    }
    named |= {name for task in TASKS.values() for name in task.requestable} - {"recall"}
    assert named <= set(KNOWN_METRICS)
    concepts = (DOCS / "concepts.md").read_text()
    assert {name for name in named if name not in TWO_CLASSES} <= set(re.findall(r"`(\w+)`", concepts))
    lower = {name for name, one in KNOWN_METRICS.items() if one.lower_is_better}
    assert lower == set(re.findall(r"`(\w+)`", re.search(r"For (.*), lower is better", concepts)[1]))
    assert {name for task in TASKS.values() for name in task.lower_is_better} <= lower


def test_the_report_shows_it_first(fed, tmp_path):
    unskew.compare(
        fed, methods=["fedavg", "fedprox"], seeds=2, out=tmp_path / "c", objective="auprc", metrics=["auroc", cost],
        **{**TINY, "rounds": 2},
    )  # fmt: skip
    text = Path(unskew.report(tmp_path / "c")).read_text()
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])["parts"][0]
    assert next(iter(data["curves"]["metric_titles"])) == "auprc"
    assert data["curves"]["scored"] == "auprc"
    assert next(iter(data["boxes"])) == "auprc"
    assert {"auprc", "auroc", "cost", "accuracy", "loss"} <= set(data["boxes"])
    rows = [json.loads(line) for line in (tmp_path / "c/fedavg/seed-0/clients.jsonl").read_text().splitlines()]
    assert max(row["cost"] for row in rows) <= data["boxes"]["cost"]["fedavg"]["most"] + 1e-4
    assert "Test AUPRC" in text
    assert "last: AUPRC of yes, points" in text
    assert set(data["classifier"]["lines"]) == {"roc", "pr", "calibration"}
    assert "Confusion matrix of fedavg" in text
    curves = json.loads((tmp_path / "c/fedavg/seed-0/curves.json").read_text())
    summary = json.loads((tmp_path / "c/fedavg/seed-0/summary.json").read_text())
    assert np.trapezoid(curves["roc"]["y"], curves["roc"]["x"]) == pytest.approx(summary["auroc"], abs=0.01)
    counts = np.array(curves["confusion"]["counts"])
    assert counts.sum() == len(fed.test[1])
    assert counts.diagonal().sum() / counts.sum() == pytest.approx(summary["accuracy"])
    (tmp_path / "c/fedavg/seed-0/curves.json").write_text('{"roc": {"x": ["a"], "y": [1]}}')
    with pytest.raises(CheckpointError, match=r"curves.json is corrupted. Remove it"):
        unskew.report(tmp_path / "c")


def test_curves_of_many_classes_are_means_of_each_against_all_others():
    draws = np.random.default_rng(1)
    p, y = draws.dirichlet(np.ones(4), 300), draws.integers(0, 4, 300)
    found = classifier_curves(y, p, MetricSet(class_names=tuple("abcd")))
    area = np.trapezoid(found["roc"]["y"], found["roc"]["x"])
    assert area == pytest.approx(roc_auc_score(y, p, multi_class="ovr"), abs=0.01)
    assert {len(found[kind]["x"]) for kind in ("roc", "pr")} == {101}
    assert np.array(found["confusion"]["counts"]).sum(1).tolist() == np.bincount(y).tolist()
    assert set(classifier_curves(np.minimum(y, 2), p, MetricSet(class_names=tuple("abcd")))) == {
        "calibration",
        "confusion",
    }
    assert classifier_curves(y, np.full_like(p, np.nan), MetricSet(class_names=tuple("abcd"))) == {}
