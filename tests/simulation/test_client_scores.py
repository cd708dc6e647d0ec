"""What a run says of single clients: their names, their data, and what the model is worth to each."""

import json
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy import stats
from support.evaluation import evaluator, held_out, one_hot, shown
from support.federations import blobs
from support.running import call
from support.tolerance import FEW, assert_close

import unskew
from unskew.cli.tables import partition_table, summary_table
from unskew.data.federation import ClientData, Federation
from unskew.data.partition.partitioner import make_partition
from unskew.errors import DataError
from unskew.plots.curves import plot_clients_by_class
from unskew.plots.figure import literal_text
from unskew.runs import summary
from unskew.simulation.aggregator import SkippedUpdates
from unskew.simulation.client_scores import ClientScores
from unskew.simulation.run_warnings import nonfinite_update_warning
from unskew.tasks.primary_metric import metric_info

NAMES = ("North [x]", "St. Mary's", "$5", "East")
draws = np.random.default_rng(0)


def hospitals(names=NAMES, holdout=0.25):
    def sample(n):
        return draws.normal(size=(n, 3)).astype(np.float32), draws.integers(0, 3, n)

    clients = [sample(n) for n in (8, 12, 20, 9)]
    return Federation.from_arrays(clients, test=sample(30), classes=3, holdout=holdout, client_names=names)


def train(fed, **options):
    return unskew.run(fed, **{"model": "logistic", "rounds": 2, "lr": 0.1, "engine": "inline", **options})


# ---- names ------------------------------------------------------------------------------------------------------------

LABELS = np.array([0, 1, 0, 1, 0, 1, 0, 1])
WARDS = np.array(["b", "a", "b", "c", "c", "a", "a", "b"])


@pytest.mark.parametrize(
    ("spec", "clients", "names"),
    [
        ("natural:ward", None, ("a", "b", "c")),
        ("natural:ward,min=3", None, ("a", "b")),
        ("natural:day", None, ("1", "2")),
        ("sorted:unique", 2, ("0, 1, 2, 3", "4, 5, 6, 7")),
        ("sorted:unique", 1, ("0 … 7",)),
        ("classes:1,by=ward", 3, ("a", "b", "c")),
        ("classes:3,by=ward", 1, ("a, b, c",)),
        ("classes:3,by=ward", 2, ()),  # both hold some of each
        ("sorted:ward", 2, ()),
        ("iid", 2, ()),
        ("sorted", 2, ()),
    ],
)
def test_clients_are_named_by_the_values_that_only_they_hold(spec, clients, names):
    columns = {"ward": WARDS, "day": np.array([2, 1, 2, 1, 2, 2, 2, 1]), "unique": np.arange(8)}
    parts = make_partition(spec, LABELS, clients, 0, classes=2, columns=columns)
    assert parts.names == names
    objects = {name: values.astype(object) for name, values in columns.items()}
    assert make_partition(spec, LABELS, clients, 0, classes=2, columns=objects).names == names


def test_of_some_drawn_values_the_names_are_theirs():
    columns = {"ward": WARDS}
    parts = make_partition("natural:ward", LABELS, 2, 1, classes=2, columns=columns)
    assert len(parts.names) == 2
    for k, name in enumerate(parts.names):
        assert set(WARDS[parts.indices(k)]) == {name}


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (NAMES[:3], "3 client_names for 4"),
        (("a", "b", "a", "c"), "'a'.*distinct"),
        ("abcd", "list of strings"),
        (("a", 1, "b", "c"), "list of strings"),
    ],
)
def test_names_are_checked(names, words):
    with pytest.raises(DataError, match=words):
        hospitals(names)
    given = hospitals(())
    with pytest.raises(DataError, match=words):
        Federation(given.clients, given.test, classes=3, client_names=names)


def test_names_are_shown(tmp_path):
    fed = hospitals()
    text = shown(partition_table(fed.class_counts(), ["x", "y", "z"], client_names=fed.client_names))
    assert all(name in text for name in NAMES)
    skipped = SkippedUpdates(total=2, clients=[0, 2])
    assert "the updates of clients North [x], $5 are not finite" in nonfinite_update_warning(skipped, 3, NAMES)
    assert "the updates of clients 0, 2 are not finite" in nonfinite_update_warning(skipped, 3)
    summary = train(fed).summary
    changed = {"client_accuracy_worst": 0.0, "client_accuracy_worst_name": NAMES[0]}
    assert "worst client 0.0% (North [x])" in shown(summary_table(summary | changed))
    path = plot_clients_by_class(fed.class_counts(), ["x", "$y$", "z"], tmp_path / "a.svg", "$", client_names=NAMES)
    assert "</svg>" in path.read_text()
    assert literal_text("St. Mary's at the Lake", 9) == "St. Mary…"


def test_the_hospitals_of_a_table_have_their_names_everywhere(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"{i % 7},{i % 5},{NAMES[i % 4]},{i % 2}" for i in range(80)]
    (tmp_path / "h.csv").write_text("\n".join(["a,b,hospital,label", *rows]))
    args = ("--partition", "natural:hospital")
    found = call(capsys, "partition", "h.csv", "--label", "label", *args, "--json").json()
    assert found["client_names"] == sorted(NAMES)
    options = {"data": str(tmp_path / "h.csv"), "label": "label", "partition": "natural:hospital", "clients": None}
    result = train(None, **options, out="run")
    assert [row["name"] for row in result.clients] == sorted(NAMES)


# ---- clients.jsonl ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fedavg+ft", "ditto"])
@pytest.mark.parametrize("holdout", [0.25, 0.0])
def test_every_client_has_a_line_whose_means_are_those_of_the_summary(tmp_path, method, holdout):
    result = train(hospitals(holdout=holdout), method=method, out=tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "clients.jsonl").read_text().splitlines()]
    assert rows == result.clients
    assert [row["client"] for row in rows] == [0, 1, 2, 3]
    assert [row["name"] for row in rows] == list(NAMES)
    held = [2, 3, 5, 2] if holdout else [0] * 4
    assert [(row["samples"], row["num_held_out"]) for row in rows] == [
        (n - h, h) for n, h in zip((8, 12, 20, 9), held, strict=True)
    ]
    assert [sum(row["class_counts"].values()) for row in rows] == [row["samples"] for row in rows]
    for key, whose in (("accuracy", "client"), ("personal_accuracy", "personal")):
        if whose == "personal" and method == "fedavg":
            assert all(key not in row for row in rows)
            continue
        values = [row[key] for row in rows]
        assert np.mean(values) == result.summary[f"{whose}_accuracy_mean"]
        assert min(values) == result.summary[f"{whose}_accuracy_worst"]
        assert rows[int(np.argmin(values))]["name"] == result.summary[f"{whose}_accuracy_worst_name"]
    assert all(0 < row["loss"] < 10 for row in rows)


def test_of_many_clients_those_are_listed_that_took_part_or_were_evaluated(monkeypatch):
    monkeypatch.setattr(summary, "MOST_CLIENTS", 3)
    options = {"rounds": 1, "participation": 0.25}
    everyone = {row["client"]: row for row in train(hospitals(), **options).clients}
    assert len(everyone) == 4
    (cohort,) = (row["client"] for row in train(hospitals(), **options, eval_clients=0).clients)
    rows = train(hospitals(), **options, eval_clients=1).clients
    (evaluated,) = (row["client"] for row in rows if "accuracy" in row)
    assert [row["client"] for row in rows] == sorted({cohort, evaluated})
    assert all(row["samples"] == everyone[row["client"]]["samples"] for row in rows)


def test_only_those_evaluated_have_figures_and_only_named_ones_names(tmp_path):
    fed = hospitals(names=())
    result = train(fed, eval_clients=2)
    assert [set(row) for row in result.clients if "accuracy" not in row] == [
        {"client", "samples", "num_held_out", "class_counts"}
    ] * 2
    values = [row["accuracy"] for row in result.clients if "accuracy" in row]
    assert np.mean(values) == result.summary["client_accuracy_mean"]
    assert not any("name" in key for key in result.summary)
    assert all("accuracy" not in row for row in train(fed, eval_clients=0).clients)


def test_clients_without_held_out_data_have_no_figures_beside_those_that_have_some():
    clients = [(one_hot(y), np.array(y)) for y in ([0, 1, 2], [1], [2, 2])]
    fed = Federation.from_arrays(clients, test=(one_hot([0, 1]), np.array([0, 1])), classes=3, holdout=0.3)
    judge, v, b = evaluator(fed)
    assert judge.evaluate_clients(v, b, 10, 0).ids.tolist() == [0, 2]


def test_clients_that_are_loaded_one_by_one_are_not_all_loaded():
    given = hospitals()

    class Lazy:
        loaded: ClassVar = []

        def __len__(self):
            return 4

        def __getitem__(self, k) -> ClientData:
            Lazy.loaded.append(k)
            return given.clients[k]

    fed = Federation(Lazy(), given.test, classes=3)
    rows = train(fed, eval_clients=1, participation=0.25, rounds=1).clients
    assert len(rows) == 1
    assert {"samples", "num_held_out", "accuracy", "loss"} <= set(rows[0])
    assert len(set(Lazy.loaded)) < 4


def test_a_run_that_goes_on_has_no_lines_of_an_earlier_end(tmp_path):
    fed, folder = hospitals(), tmp_path / "run"
    train(fed, out=folder)
    before = (folder / "clients.jsonl").read_text()
    longer = unskew.resume(folder, federation=fed, rounds=4)
    after = [json.loads(line) for line in (folder / "clients.jsonl").read_text().splitlines()]
    assert after == longer.clients
    assert after != [json.loads(line) for line in before.splitlines()]


@pytest.mark.parametrize("own", [False, True])
def test_loss_per_client_by_hand_in_one_pass(monkeypatch, own):
    fed = held_out(([0, 1, 2, 2], [0, 1, 2, 0]), ([0, 1], [1, 0]), ([2], [2]))
    judge, v, b = evaluator(fed)
    passes, predict = [], judge.model.predict
    monkeypatch.setattr(judge.model, "predict", lambda *args: passes.append(1) or predict(*args))
    scores = judge.evaluate_clients(v, b, 10, 0, (lambda ids: ((v, b) for _ in ids)) if own else None)
    right, wrong = -np.log(np.e / (np.e + 2)), -np.log(1 / (np.e + 2))
    assert_close(scores.losses, [(3 * right + wrong) / 4, wrong, right], FEW, dtype=torch.float32)
    assert len(passes) == (3 if own else 1)


def test_loss_on_the_test_set_weighted_by_classes_by_hand():
    labels = [np.array([0, 0, 0, 1]), np.array([2])]
    y, says = draws.choice(3, 50, p=[0.2, 0.5, 0.3]), draws.integers(0, 3, 50)
    fed = Federation.from_arrays([(one_hot(k), k) for k in labels], test=(one_hot(says), y), classes=3, holdout=0.0)
    judge, v, b = evaluator(fed)
    losses = np.where(y == says, -np.log(np.e / (np.e + 2)), -np.log(1 / (np.e + 2)))
    expected = []
    for mine in labels:
        weights = np.array([(mine == c).mean() for c in range(3)])[y]
        expected.append((weights * losses).sum() / weights.sum())
    assert_close(judge.evaluate_clients(v, b, 10, 0).losses, expected, FEW, dtype=torch.float32)


def test_a_client_none_of_whose_classes_is_tested_has_no_score():
    x = draws.normal(size=(12, 3)).astype(np.float32)
    tested, other = np.arange(12) % 2, np.full(12, 2)
    fed = Federation.from_arrays([(x, tested), (x, other)], test=(x, tested), classes=3, holdout=0)
    found = train(fed)
    assert [(row["accuracy"] is None, row["loss"] is None) for row in found.clients] == [(False, False), (True, True)]
    assert found.summary["client_accuracy_undefined_names"] == [1]
    assert found.summary["client_accuracy_worst"] == found.clients[0]["accuracy"]


@pytest.mark.parametrize(("method", "shown"), [("local", "per client"), ("fedfomo", "personal models")])
def test_a_run_without_a_global_model_shows_the_models_of_clients_only(method, shown, capsys):
    found = train(blobs([20, 20, 20]), method=method)
    Console(width=200).print(summary_table(found.summary))
    said = capsys.readouterr().out
    assert "test accuracy" not in said
    assert shown in said
    assert repr(found).startswith(f"Result(method='{method}', rounds=2, personal_accuracy_mean=")


def test_unseen_clients_are_evaluated_on_what_is_said(capsys):
    x, y = draws.normal(size=(30, 3)).astype(np.float32), np.arange(30) % 2
    few = [(x[2 * k : 2 * k + 1], y[k : k + 1]) for k in range(3)]
    fed = Federation.from_arrays([*few, (x, y)], test=(x, y), holdout=0.3, client_names=list("abcd"))
    Console(width=200).print(summary_table(train(fed, unseen="d").summary))
    assert "unseen clients, on the clients' held-out data" in capsys.readouterr().out


def test_loss_of_a_client_with_several_labels_a_sample():
    from support.multilabel import federation

    fed = federation(holdout=0.3)
    result = unskew.run(fed, model="logistic", rounds=1, lr=0.1, engine="inline")
    client = fed.clients[1]
    logits = result.model(client.x_test)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, client.y_test.float())
    assert_close(result.clients[1]["loss"], loss.item(), FEW, dtype=torch.float32)


def test_data_that_a_rule_changes_are_counted_as_they_were():
    fed = blobs([8, 9])
    rows = train(fed, method="vhl").clients
    assert [(row["samples"], row["num_held_out"]) for row in rows] == [(8, 0), (9, 0)]


def test_a_metric_that_clients_do_not_report_is_not_called_undefined():
    """Sites report the primary metric and the loss, whatever the objective is."""
    scores = ClientScores(np.array([0.5, 1.0]), "held-out", np.array([0.1, 0.2]), np.array([0, 1]))
    assert scores.metrics("client", metric_info("auroc")) == dict.fromkeys(
        f"client_auroc_{what}" for what in ("mean", "std", "worst", "worst_decile")
    )
    measured = replace(scores, others={"auroc": np.array([np.nan, 1.0])})
    assert measured.metrics("client", metric_info("auroc"))["client_auroc_undefined_names"] == [0]


def test_the_interval_of_a_mean_over_clients_stays_within_the_range_of_the_metric():
    """Student's interval of 0.1 and 0.9 is 0.5 -+ 12.7 * 0.4."""
    scores = ClientScores(np.array([0.1, 0.9]), "held-out", np.array([0.1, 0.9]), np.array([0, 1]))
    half = stats.t.ppf(0.975, 1) * 0.4
    for metric, wanted in (("accuracy", (0, 1)), ("loss", (0.5 - half, 0.5 + half))):
        found = scores.metrics("client", metric_info(metric))
        ends = [found[f"client_{metric}_mean_{end}"] for end in ("low", "high")]
        assert ends == pytest.approx(wanted, abs=1e-5)
