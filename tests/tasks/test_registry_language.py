"""The loss judges language models by default, and another objective where it is set: the same everywhere."""

import math

import numpy as np
import pytest
from support.html_page import Page
from torch import nn

import unskew
from unskew.cli.comparison_tables import comparison_tables
from unskew.cli.tables import summary_table
from unskew.errors import ConfigError
from unskew.reporting.live_runs import LiveRun
from unskew.tasks.registry import TASKS, client_metric
from unskew.tuning.trial_runner import TuningPlan

ROUNDS = 6
OPTIONS = {"rounds": ROUNDS, "lr": 2.0, "local_steps": 3, "batch_size": 8, "engine": "inline"}
OBJECTIVES = pytest.mark.parametrize("objective", ["auto", "accuracy"])


def model():
    return nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))


@pytest.fixture(scope="module")
def fed():
    rng = np.random.default_rng(0)
    parts = []
    for k in range(3):
        tokens = rng.integers(1, 9, size=(30, 6))
        follows = tokens[:, :-1] * (2 + k) % 8 + 1
        tokens[:, 1:] = np.where(rng.random(follows.shape) < 0.6, follows, tokens[:, 1:])
        parts.append((tokens[:, :-1], tokens[:, 1:]))
    return unskew.Federation.from_arrays(parts, test=parts[0], task="language", classes=9, holdout=0.2)


def best_by(rows, objective, prefix=""):
    """Return the first round with the lowest loss, or with the highest accuracy."""
    if objective == "auto":
        values = [row[f"{prefix}loss"] for row in rows]
        return 1 + values.index(min(values))
    values = [row[f"{prefix}accuracy"] for row in rows]
    return 1 + values.index(max(values))


class Started(unskew.Callback):
    """Stores the objective of which a run tells its callbacks."""

    def start(self, config, rounds_done):
        self.objective = config["objective"]


@OBJECTIVES
def test_best_round_kept_model_target_and_displays_follow_the_objective(fed, objective, tmp_path):
    name, started = {"auto": "loss"}.get(objective, objective), Started()
    target = 2.05 if name == "loss" else 0.25  # a loss above 1, as few shares are
    run = unskew.run(
        fed, model=model, keep="best", objective=objective, target=target, out=tmp_path / "run", callbacks=[started],
        **OPTIONS,
    )  # fmt: skip
    rows, summary = run.history, run.summary
    assert best_by(rows, "auto") != best_by(rows, "accuracy"), "the case decides something"
    assert best_by(rows, "auto", "validation_") != best_by(rows, "accuracy", "validation_")
    assert (summary["objective"], started.objective) == (name, name)
    assert summary["best_round"] == best_by(rows, objective)
    assert summary[f"best_{name}"] == rows[summary["best_round"] - 1][name]
    assert summary["kept_round"] == summary["validation_round"] == best_by(rows, objective, "validation_")
    assert summary[f"kept_{name}"] == rows[summary["kept_round"] - 1][name]
    reached = [row["round"] for row in rows if (row["loss"] <= target if name == "loss" else row["accuracy"] >= target)]
    assert summary["rounds_to_target"] == reached[0] > 1
    assert f"best_{name}={summary[f'best_{name}']!r}" in repr(run)
    unit = " (%)" if name == "accuracy" else ""
    assert run.plot().axes[0].get_ylabel() == f"test {name}{unit}"
    (label, shown), *_ = zip(*(column.cells for column in summary_table(summary).columns), strict=True)
    assert label == f"test {name}, last round"
    assert f"perplexity {summary['perplexity']:.4f}, exact match " in shown
    (tmp_path / "run" / "summary.json").unlink()  # as during the run, when only the configuration is known
    live = LiveRun(tmp_path / "run", "run", 0)
    live.update(math.inf)
    assert live.row()[4] == name
    assert f"(round {summary['best_round']})" in live.row()[6]
    assert live.client_table()[0][3] == "accuracy"


def test_early_stopping_follows_the_loss(fed):
    run = unskew.run(fed, model=model, early_stopping=2, **{**OPTIONS, "rounds": 30, "lr": 8.0})
    losses = [row["validation_loss"] for row in run.history]
    assert len(losses) - 1 - losses.index(min(losses)) == 2
    assert len(losses) < 30


@OBJECTIVES
def test_comparison_and_report_follow_the_objective_and_clients_are_compared_by_accuracy(fed, objective, tmp_path):
    name = {"auto": "loss"}.get(objective, objective)
    compared = unskew.compare(
        fed,
        methods=["fedavg", "fedprox:mu=0.1"],
        seeds=1,
        model=model,
        objective=objective,
        out=tmp_path / "c",
        **OPTIONS,
    )
    summaries = {method: own for method, (own,) in compared.summaries.items()}
    best = {method: own[f"best_{name}"] for method, own in summaries.items() if method in ("fedavg", "fedprox:mu=0.1")}
    expected = min(best.values()) / 0.9 if name == "loss" else 0.9 * max(best.values())
    assert compared.target == pytest.approx(expected, abs=0.005)
    assert compared.benefit.metric.name == "accuracy"
    assert client_metric(summaries["fedavg"]).name == "accuracy"
    titles = [str(column.header) for column in comparison_tables(compared.rows())[0].columns]
    assert {"last round", "best round", "perplexity", "exact match %"} <= {*titles}
    assert titles[3] == ("clients, mean %" if name == "loss" else "clients, mean")
    page, sign = Page(unskew.report(compared).read_text()), "" if name == "loss" else ", %"
    factor = 1 if name == "loss" else 100
    for title, key in (("last round", name), ("best round", f"best_{name}")):
        shown = page.column("comparison", title + sign)
        assert shown == pytest.approx([factor * summaries[method][key] for method in ("fedavg", "fedprox:mu=0.1")])
    assert {"loss", "accuracy, %"} & {text for _, text in page.tables["comparison"][0]} == (
        {"accuracy, %"} if name == "loss" else {"loss"}
    )
    assert page.column("comparison", "perplexity") == [summaries[m]["perplexity"] for m in ("fedavg", "fedprox:mu=0.1")]
    curves = page.data["parts"][0]["curves"]
    assert next(iter(curves["metric_titles"])) == name
    assert curves["target"] == pytest.approx(factor * compared.target)
    (unskew_compare,) = [text for text in page.texts if "unskew compare" in text and "--target" in text]
    assert f"--target {compared.target:g}" in unskew_compare


@OBJECTIVES
def test_tuning_judges_personal_models_of_language_models_too(fed, objective):
    name = {"auto": "loss"}.get(objective, objective)
    run = unskew.run(fed, method="ditto", model=model, objective=objective, early_stopping=ROUNDS, **OPTIONS)
    plan = TuningPlan(["fedavg", "ditto"], {**OPTIONS, "objective": objective}, {}, 1, federation=fed, model=model)
    plan.check()
    assert (plan.objective.name, plan.personal) == (name, {"ditto"})
    mean = np.mean([row[f"personal_{name}"] for row in run.clients])
    assert plan.value_of(run.history, run.summary, personal=True) == pytest.approx(mean)
    assert plan.value_of(run.history, run.summary, personal=False) == run.history[-1][f"validation_{name}"]


def test_a_target_above_one_is_rejected_for_a_share_before_training(fed):
    for call in (unskew.run, lambda *args, **options: unskew.compare(*args, methods=["fedavg"], seeds=1, **options)):
        with pytest.raises(ConfigError, match=r"target=1\.5 is not valid: it must be at most 1, such as 0\.9 for 90 %"):
            call(fed, model=model, objective="accuracy", target=1.5, **OPTIONS)


def test_only_language_models_have_another_default_than_the_primary_metric():
    assert {name: task.judged_by for name, task in TASKS.items()} == {
        "classification": "accuracy", "multilabel": "accuracy", "language": "loss", "regression": "r2",
        "survival": "concordance", "segmentation": "dice",
    }  # fmt: skip
    assert TASKS["classification"].client_metric_name("loss") == "loss"
    assert TASKS["language"].client_metric_name("perplexity") == "perplexity"
    assert {task.client_metric_name("worst_client") for task in TASKS.values()} == {t.scored for t in TASKS.values()}
