"""The reference rows: what they train is what one would train by hand, and they are shown without being ranked."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.html_page import Page
from support.running import TINY, call
from torch import nn

import unskew
from unskew.cli.comparison_tables import comparison_tables
from unskew.comparison.comparison_result import Comparison, weighting_notes
from unskew.comparison.references import trains_global_model
from unskew.errors import CheckpointError, ConfigError, MethodConflictError
from unskew.methods.fedproto import FedProto
from unskew.methods.references import steps_per_round
from unskew.protocol.training_config import Training

pytestmark = pytest.mark.usefixtures("undrawn")
QUICK = {"model": "logistic", "rounds": 3, "local_epochs": 1, "batch_size": 16, "lr": 0.2, "engine": "inline"}


def digits(**options):
    return unskew.load_federation("digits", partition="dirichlet:0.3", clients=4, max_train_samples=300, **options)


def test_pooled_is_fedavg_of_one_client_with_all_training_data():
    fed = digits()
    pooled = unskew.run(fed, method="pooled", **QUICK)
    x, y = (np.concatenate([getattr(client, name).numpy() for client in fed.clients]) for name in "xy")
    test = tuple(t.numpy() for t in fed.test)
    union = unskew.Federation.from_arrays([(x, y, x[:9], y[:9])], test=test, classes=10, normalize=fed.normalization)
    by_hand = unskew.run(union, method="fedavg", **QUICK)
    assert [row["accuracy"] for row in pooled.history] == [row["accuracy"] for row in by_hand.history]
    assert np.array_equal(pooled.vector, by_hand.vector)
    held_out = sum(len(client.y_test) for client in fed.clients)
    assert len(y) + held_out == 300, "what the clients hold out is not trained on"


def test_local_trains_each_client_alone():
    """Ditto without its pull trains personal models alone, next to FedAvg, by another code."""
    fed = digits()
    local, ditto = (unskew.run(fed, method=name, **QUICK) for name in ("local", "ditto:lam=0"))
    assert [row["personal_accuracy"] for row in local.clients] == [row["personal_accuracy"] for row in ditto.clients]
    assert local.summary["bytes_up"] == local.summary["bytes_down"] == 0


@pytest.mark.parametrize(
    ("training", "sizes", "participation", "steps"),
    [
        (Training(local_epochs=2, batch_size=8), [8, 24], 1.0, 8),  # 64 samples, 8 a step
        (Training(local_epochs=2, batch_size=8), [8, 24], 0.5, 4),
        (Training(local_steps=3, local_epochs=None, batch_size=8), [8, 8, 8, 8], 0.5, 6),
        (
            Training(local_steps=4, local_epochs=None, batch_size=8),
            [4, 12],
            1.0,
            6,
        ),  # 16 + 24 samples, 16 in 2 steps: 5
        (Training(local_epochs=1, batch_size=8, drop_last=True), [12, 12], 1.0, 2),
    ],
)
def test_pooled_processes_as_many_samples_as_a_cohort(training, sizes, participation, steps):
    expected = {6: 5} if sizes == [4, 12] else {}
    assert steps_per_round(training, sizes, participation) == expected.get(steps, steps)


def test_references_are_shown_below_the_methods_and_never_ranked(tmp_path, light_page, monkeypatch):
    result = unskew.compare(
        methods=["scaffold", "fedavg"],
        seeds=2,
        out=tmp_path / "c",
        clients=4,
        max_train_samples=300,
        references=True,
        **QUICK,
    )
    rows = {row["method"]: row for row in result.rows()}
    assert list(rows) == ["scaffold", "fedavg", "pooled", "local"]
    assert [row["reference"] for row in rows.values()] == [False, False, True, True]
    best = max(rows[name]["best_accuracy"] for name in ("scaffold", "fedavg"))
    assert rows["pooled"]["accuracy"] > best
    assert result.target == pytest.approx(0.9 * best, abs=5.1e-4)
    assert (rows["local"]["accuracy"], rows["local"]["rounds_to_target"], rows["pooled"]["bytes_up"]) == (
        None,
        None,
        None,
    )
    drawn = []
    monkeypatch.setattr("unskew.plots.figure.save_figure", lambda figure, path: drawn.append(figure))
    result.plot(tmp_path / "curves.png")
    names = [[line.get_label() for line in axis.get_lines()] for axis in drawn[0].axes]
    assert names == [["scaffold", "fedavg", "pooled"], ["scaffold", "fedavg"]], "pooled sends nothing"
    own = [
        np.mean([json.loads(line)["personal_accuracy"] for line in path.read_text().splitlines()])
        for path in (tmp_path / "c" / "local").glob("*/clients.jsonl")
    ]
    assert rows["local"]["client_accuracy_mean"] == pytest.approx(np.mean(own))
    page = Page(unskew.report(result).read_text())
    assert page.column("comparison", "method") == ["scaffold", "fedavg"]
    assert page.column("references", "method") == ["pooled", "local"]
    assert page.column("references", "last round, %")[1] == "-"
    assert {*page.column("differences", "method"), *page.column("differences", "minus")} == {"scaffold", "fedavg"}
    assert any(" is the best of 2 methods" in text for text in page.texts)
    assert any(text.startswith("2 methods, with references, seeds 0, 1") for text in page.texts)
    assert page.column("costs", "MB up")[2:] == ["-", "-"]
    assert page.column("fairness", "model") == ["global", "global", "global", "own"]
    again = next(text for text in page.texts if text.startswith("unskew compare"))
    assert again.startswith("unskew compare scaffold fedavg --seeds 0,1 --config")


OWN_MODELS = ["fedproto", "fedtgp:epochs=1", "fedgh:epochs=1", "fedamp", "fedfomo"]


@pytest.mark.filterwarnings("ignore:With fed")
def test_methods_without_a_global_model_are_judged_by_personal_models(tmp_path, light_page):
    result = unskew.compare(
        digits(), methods=["fedavg", *OWN_MODELS], seeds=1, out=tmp_path / "c", references=True, **QUICK
    )
    rows = {row["method"]: row for row in result.rows()}
    for name in OWN_MODELS:
        assert [rows[name][key] for key in ("accuracy", "best_accuracy", "loss", "rounds_to_target")] == [None] * 4
        assert rows[name]["client_accuracy_mean"] is None
        assert rows[name]["personal_accuracy_mean"] > 0
    assert result.benefit.labels["federated"] == "fedavg"
    assert result.benefit.candidates == {"federated": 1, "personal": 5}
    assert f"No global model is trained by {', '.join(OWN_MODELS)}" in result.notes()[0]
    assert len(result.notes()) == 1, "a method without an average has no weighting"
    page = Page(unskew.report(result).read_text())
    assert page.column("comparison", "last round, %")[1:] == ["-"] * 5
    assert page.column("fairness", "model") == ["global", *["personal"] * 5, "global", "own"]
    assert page.column("target", "method") == ["fedavg"]


@pytest.mark.filterwarnings("ignore:With fed")
def test_the_verdict_of_a_method_without_a_global_model_is_that_of_its_personal_models(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = ("compare", "fedfomo", *TINY, "--seeds", "0", "--rounds", 2, "--references", "--out", "c")
    out = " ".join(call(capsys, *args).out.split())
    for words in (
        "ederated training",
        "Test set:",
        "(federated)",
        "events",
        "last round best round clients, mean worst client MB",
    ):
        assert words not in out
    assert "A personal model of fedfomo is " in out
    shown = call(capsys, *args, "--resume", "--json").json()
    rows = [json.loads(line) for line in Path("c/fedfomo/seed-0/clients.jsonl").read_text().splitlines()]
    own = {f"client {row['client']}": pytest.approx(row["personal_accuracy"]) for row in rows}
    assert {row["client"]: row["personal"] for row in shown["clients"]} == own
    pooled = json.loads(Path("c/pooled/seed-0/summary.json").read_text())["best_accuracy"]
    assert shown["rows"][0]["target"] == pytest.approx(0.9 * pooled, abs=5.1e-4)


def test_whether_a_method_trains_a_global_model_is_known_for_compositions_labels_and_imported_classes():
    yes = ("fedavg", "feddm", "fedprox+ditto (lr=0.1)", "pooled:participation=0.5", "no-such-method", "no.such.Class")
    no = ("local", "fedprox:mu=1+fedfomo (lr=0.1)", "FedAMP", "unskew.methods.fedproto.FedProto:ld=3")
    assert [trains_global_model(name) for name in (*yes, *no)] == [True] * len(yes) + [False] * len(no)


class KeepsModels(FedProto):
    name = "keeps"


@pytest.mark.filterwarnings("ignore:With keeps")
def test_a_custom_method_without_a_global_model_is_recognized():
    result = unskew.compare(digits(), methods=[KeepsModels()], seeds=1, references=False, **QUICK)
    assert list(result.benefit.labels) == ["personal", "constant"]
    assert result.rows()[0]["client_weighting"] == "none"


def test_weightings_of_methods_are_named_if_they_average():
    def compared(**weightings):
        runs = {name: [{"client_weighting": which}] for name, which in weightings.items()}
        return Comparison({}, runs, 0.0, None, unequal=True)

    assert weighting_notes(compared(fedavg="samples", fedfomo="none")) == []
    (note,) = weighting_notes(compared(fedavg="samples", fedfomo="none", hetlora="computed"))
    assert "fedavg by samples, hetlora with computed weights. They" in note
    assert note.endswith("averages."), "no option gives both methods the same weights"
    (note,) = weighting_notes(compared(fedavg="samples", scaffold="uniform", feddisco="computed"))
    assert "fedavg by samples, scaffold equally, feddisco with computed weights." in note
    assert note.endswith("for those without computed weights.")


@pytest.fixture
def light_page(monkeypatch):
    for module in ("page", "report"):
        monkeypatch.setattr(f"unskew.reporting.{module}.plotly_script", lambda: "var drawn = 1;")


def test_the_terminal_has_them_in_a_table_of_their_own_and_they_are_resumed(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("unskew.comparison.references.BY_DEFAULT", True)
    args = ("compare", "fedavg", *TINY, "--seeds", "0", "--rounds", 2, "--out", "c")
    first, second = call(capsys, *args), call(capsys, *args, "--resume")
    for outcome in (first, second):
        methods, references = outcome.out.split("References, not ranked")
        assert ("pooled" in methods.split("worst client")[-1], "pooled" in references, "local" in references) == (
            False,
            True,
            True,
        )
    assert (
        first.out.split("Test accuracy")[1].split("Everything")[0].split(" run")[0]
        == (second.out.split("Test accuracy")[1].split("Everything")[0].split(" run")[0])
    )
    assert sorted(path.name for path in Path("c").iterdir() if path.is_dir()) == ["fedavg", "local", "pooled"]
    call(capsys, *args[:-1], "d", "--no-references")
    assert [path.name for path in Path("d").iterdir() if path.is_dir()] == ["fedavg"]


def test_the_title_says_that_references_are_not_tuned_only_if_they_are_not():
    result = unskew.compare(digits(), methods=["fedavg"], seeds=1, references=True, **QUICK)
    for tuned in (False, True):
        _, references = comparison_tables(result.rows(), tuned)
        assert ("not an upper bound" in str(references.title)) is not tuned


@pytest.mark.slow
def test_they_run_side_by_side_and_are_resumed_with_more_rounds_but_not_with_fewer(tmp_path):
    fed, options = digits(), {"methods": ["fedavg"], "seeds": 2, "references": True, **QUICK}
    whole = unskew.compare(fed, out=tmp_path / "whole", **options)
    options |= {"out": tmp_path / "parts", "parallel": 2}
    unskew.compare(fed, **{**options, "rounds": 2})
    rest = unskew.compare(fed, **options, resume=True)
    figures = ("method", "accuracy", "loss", "client_accuracy_mean", "client_accuracy_worst")
    rows = [[{name: row[name] for name in figures} for row in found.rows()] for found in (whole, rest)]
    assert rows[0] == rows[1]
    assert [row["method"] for row in rows[0]] == ["fedavg", "pooled", "local"]
    for name in ("pooled", "local"):
        shutil.rmtree(tmp_path / "parts" / "fedavg", ignore_errors=True)
        with pytest.raises(CheckpointError, match=rf"{name}.*3 rounds"):
            unskew.compare(fed, **{**options, "rounds": 1, "parallel": 1}, resume=True)
        shutil.rmtree(tmp_path / "parts" / name)


def first_share(y_true, scores):
    return float((scores.argmax(1) == 0).mean())


@pytest.mark.parametrize("objective", ["auroc", "worst_client", first_share, "recall/1"])
def test_local_shows_nothing_of_the_untrained_model_for_any_objective(tmp_path, light_page, objective):
    result = unskew.compare(
        methods=["fedavg"], seeds=1, out=tmp_path / "c", clients=3, max_train_samples=400, references=True,
        holdout=0.2, objective=objective, metrics=["balanced_accuracy"], keep="best", early_stopping=2, **QUICK,
    )  # fmt: skip
    name = result.objective.name
    _, pooled, local = result.rows()
    assert pooled[f"best_{name}"] is not None
    assert pooled[f"kept_{name}"] is not None
    assert [local.get(key) for key in (name, f"best_{name}", f"kept_{name}", "balanced_accuracy")] == [None] * 4
    assert local["client_accuracy_mean"] is not None
    text = Path(unskew.report(result)).read_text()
    lines = json.loads(text.partition('id="data">')[2].partition("</script>")[0])["parts"][0]
    assert not any(lines["curves"]["lines"]["local"].values())
    if name != "worst_client":
        rows = [json.loads(line) for line in (tmp_path / "c/local/seed-0/clients.jsonl").read_text().splitlines()]
        there = [row[f"personal_{name}"] for row in rows if row[f"personal_{name}"] is not None]
        assert local[f"client_{name}_mean"] == (pytest.approx(np.mean(there)) if there else None)
    assert set(lines["classifier"]["lines"]["calibration"]) == {"fedavg", "pooled"}


@pytest.mark.parametrize("task", ["regression", "language"])
def test_other_tasks_have_references_too(task):
    rng = np.random.default_rng(0)
    if task == "regression":
        x = rng.normal(size=(60, 3)).astype("float32")
        data, model = (x, x.sum(1)), "logistic"
    else:
        tokens = rng.integers(1, 9, size=(60, 5))
        data, model = (tokens[:, :-1], tokens[:, 1:]), lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    parts = [tuple(part[k::3] for part in data) for k in range(3)]
    fed = unskew.Federation.from_arrays(
        parts, test=parts[0], task=task, **({"classes": 9} if task == "language" else {})
    )
    result = unskew.compare(fed, methods=["fedavg"], seeds=1, references=True, **{**QUICK, "model": model})
    scored = "r2" if task == "regression" else "accuracy"
    assert [row["method"] for row in result.rows()] == ["fedavg", "pooled", "local"]
    assert result.rows()[2][scored] is None
    assert result.rows()[2][f"client_{scored}_mean"] is not None


def test_what_does_not_fit_is_left_out_with_a_sentence():
    class Lazy(list):
        """Clients that are loaded one by one."""

    fed = digits()
    lazy = unskew.data.federation.replace(fed, clients=Lazy(fed.clients))
    result = unskew.compare(lazy, methods=["fedavg"], seeds=1, references=True, **QUICK)
    assert list(result.summaries) == ["fedavg", "local"]
    assert any(note.startswith("pooled is left out: ") for note in result.notes())
    with pytest.raises(ConfigError, match=r"Name at least one method\. pooled and local are only references"):
        unskew.compare(methods=["pooled", "local"])
    with pytest.raises(MethodConflictError, match="pooled is a reference and cannot be combined"):
        unskew.method("pooled+fedprox")
