"""A new task is a class and an entry of the registry: everything else works with what it defines."""

import csv
import json
from typing import ClassVar

import numpy as np
import pytest
import torch
from support.running import call
from torch import Tensor

import unskew
from unskew.errors import ConfigError, DataError
from unskew.tasks.base import Task
from unskew.tasks.registry import TASKS

TINY = {"model": "logistic", "rounds": 3, "local_steps": 5, "lr": 0.1, "engine": "inline"}


class Counts(Task):
    """Numbers of events, ``y [B]``, with the Poisson loss: the model predicts the logarithm of the rate."""

    name: ClassVar[str] = "counts"
    provides: ClassVar[frozenset[str]] = frozenset(("vector",))
    numeric_labels: ClassVar[bool] = True
    output_kind: ClassVar[str] = "rates"
    loss_options: ClassVar[tuple[str, ...]] = ("poisson",)
    extra_metrics: ClassVar[tuple[str, ...]] = ("ratio",)

    def read(self, y: Tensor, who: str) -> Tensor:
        y = y.reshape(len(y), -1)
        if y.shape[1] != 1 or not bool((y >= 0).all()):
            raise DataError(f"The counts of {who} must be one non-negative number per sample.")
        return y[:, 0].to(torch.float64)

    def with_loss(self, loss: str) -> Task:
        return self

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        return logits[:, 0].exp() - y.to(logits.dtype) * logits[:, 0]

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return self.losses(logits, y).mean()

    def outputs(self, logits: Tensor) -> Tensor:
        return logits.exp()

    def correct(self, logits: Tensor, y: Tensor) -> Tensor:
        return (logits[:, 0].exp().round() == y).to(torch.float64)

    def tally(self, logits: Tensor, y: Tensor) -> Tensor:
        return torch.stack([logits[:, 0].exp().to(torch.float64).sum(), y.sum()])

    def measure(self, tally: Tensor, loss: float) -> dict[str, float]:
        return {"ratio": float(tally[0] / tally[1])}

    def metrics_of_outputs(self, y: np.ndarray, outputs: np.ndarray, metrics: object) -> dict[str, float]:
        return {"accuracy": float((outputs[:, 0].round() == y).mean()), "ratio": float(outputs.sum() / y.sum())}

    def curves(self, y: np.ndarray, scores: np.ndarray, metrics: object) -> dict[str, object]:
        return {"rates": {"x": y.tolist(), "y": scores[:, 0].tolist()}}


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A table of counts at two sites, and the new task."""
    monkeypatch.setitem(TASKS, "counts", Counts())
    draws = np.random.default_rng(0)
    x = draws.normal(size=(200, 2)).round(3)
    y = draws.poisson(np.exp(0.5 * x[:, 0] + 1))
    rows = [*zip(*x.T, y, draws.choice(["north", "south"], 200), strict=True)]
    with (tmp_path / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("age", "dose", "events", "site"), *rows])
    return tmp_path / "t.csv"


def test_a_new_task_runs_evaluates_predicts_reports_and_exports_from_a_table(table, capsys):
    run = table.parent / "run"
    asked = ("--task", "counts", "--label", "events", "--partition", "natural:site", "--loss", "poisson")
    shared = ("--set", "model=logistic", "--rounds", "3", "--local-steps", "5", "--lr", "0.1", "--device", "cpu")
    data = f"table:{table}"
    done = call(capsys, "run", "--data", data, *asked, *shared, "--out", run)
    assert done.code == 0, done.err
    summary = json.loads((run / "summary.json").read_text())
    first, *_, last = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[-3:])
    assert last["loss"] < first["loss"]
    assert summary["ratio"] == pytest.approx(last["ratio"])
    assert all("client_accuracy" in row or "accuracy" in row for row in map(json.loads, (run / "clients.jsonl").open()))
    assert set(json.loads((run / "curves.json").read_text())) == {"rates"}

    (row,) = call(capsys, "evaluate", run, table, "--json").json()
    with table.open() as file:
        rows = [*csv.DictReader(file)]
    y = np.array([float(row["events"]) for row in rows])
    predicted = np.array(unskew.load_predictor(run).predict_file(table))
    assert row["ratio"] == pytest.approx(predicted.sum() / y.sum(), abs=1e-6)
    written = call(capsys, "predict", run, table, "--out", table.parent / "p.csv")
    assert written.code == 0, written.err
    with (table.parent / "p.csv").open() as file:
        assert [float(row["predicted_events"]) for row in csv.DictReader(file)] == pytest.approx(predicted, rel=1e-5)
    with pytest.raises(ConfigError, match="A counts model has no probabilities"):
        unskew.load_predictor(run).predict_proba(np.zeros((1, 2)))

    for command in (("report", run), ("export", run, "--format", "torchscript"), ("partition", data, *asked[:-2])):
        shown = call(capsys, *command)
        assert shown.code == 0, shown.err
    assert "events, mean ± std" in shown.out
    (exported,) = run.rglob("model.pt")
    x = torch.tensor([[float(row["age"]), float(row["dose"])] for row in rows])
    assert torch.jit.load(exported)(x)[:, 0].tolist() == pytest.approx(predicted, rel=1e-5)
    assert "returns rates for any inputs" in (exported.parent / "README.md").read_text()


def test_a_new_task_runs_from_arrays_with_every_method_that_needs_no_more_than_it_provides(monkeypatch):
    monkeypatch.setitem(TASKS, "counts", Counts())
    draws = np.random.default_rng(0)
    clients = [(x, draws.poisson(np.exp(x[:, 0])).astype(float)) for x in draws.normal(size=(3, 40, 2)).astype("f")]
    fed = unskew.Federation.from_arrays(clients, test=clients[0], task="counts", holdout=0.2)
    assert (fed.classes, fed.test[1].dtype, fed.test[1].dim()) == (1, torch.float64, 1)
    for method in ("fedprox+scaffold", "moon"):
        result = unskew.run(fed, **{**TINY, "model": "mlp", "model_options": {"hidden": [4]}}, method=method)
        assert result.history[-1]["loss"] < result.history[0]["loss"]
    for method, reason in (
        ("fedntd", "it needs one class per sample"),
        ("fedcog", "it learns inputs for given labels"),
    ):
        with pytest.raises(ConfigError, match=f"does not support the task 'counts', because {reason}"):
            unskew.run(fed, **TINY, method=method)
    unknown = "loss=mae requires regression, but the task of arrays is counts"
    with pytest.raises(ConfigError, match=unknown):
        unskew.run(fed, **TINY, loss="mae")
    with pytest.raises(ConfigError, match="metrics=auroc requires classification, but the task of arrays is counts"):
        unskew.run(fed, **TINY, metrics=["auroc"])
    with pytest.raises(DataError, match="The counts of client 1 must be one non-negative number"):
        unskew.Federation.from_arrays([clients[0], (clients[1][0], -clients[1][1])], test=clients[0], task="counts")
