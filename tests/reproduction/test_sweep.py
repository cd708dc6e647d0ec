"""The runs of a table: their order, and that a table in parts is the table in one."""

import hashlib
import itertools
import json
import re
import shutil

import pytest
from support.running import call

from unskew.records.recorder import Callback
from unskew.reproduction.outcomes import stored_outcomes
from unskew.reproduction.preset import Preset, load_preset
from unskew.reproduction.sweep import Sweep
from unskew.reproduction.time_limit import TimeLimit
from unskew.simulation.checkpoint import newest_checkpoint

COLUMNS = ("A", "B")


def small_preset(rows, **changes):
    settings = {
        "data": "digits", "clients": 5, "rounds": 4, "local_steps": 1, "model": "logistic", "engine": "inline",
    }  # fmt: skip
    return Preset(
        name="fedcog/small", title="", where="", reference="", rows=rows, settings={**settings, **changes},
        columns={"A": {"partition": "iid"}, "B": {"partition": "classes:2"}},
        common={"start": {"method": "fedcog:start_round=2", "rounds": 2}},
    )  # fmt: skip


PROX = {"method": "fedprox:mu=0.1"}
COG = {"method": "fedcog:start_round=2,n=4,g_steps=1", "after": "start"}
ROWS = {"FedAvg": {"method": "fedavg", "after": "start"}, "FedProx": PROX, "FedCOG": COG}


def test_the_first_row_and_the_papers_method_are_run_first_and_column_by_column(tmp_path):
    titles = []
    sweep = Sweep(
        small_preset(ROWS), "paper", tmp_path / "runs", tmp_path / "results", {}, None, None,
        lambda title, common: titles.append(title) or [],
    )  # fmt: skip
    found = [(cell.row, cell.column, cell.config.seed) for cell, _ in sweep.carry_out([0, 1])]
    expected = []
    for column, seed in itertools.product(COLUMNS, (0, 1)):
        expected.append(f"fedcog/small, common rounds, {column}, seed {seed}")
        expected += [f"{row}, {column}, seed {seed}" for row in ("FedAvg", "FedCOG")]
    expected += [f"FedProx, {column}, seed {seed}" for column, seed in itertools.product(COLUMNS, (0, 1))]
    assert titles == expected
    assert found == [(row, column, seed) for column in COLUMNS for row in ROWS for seed in (0, 1)]


def without_times(outcome):
    summary = {name: value for name, value in outcome["summary"].items() if "seconds" not in name}
    return json.dumps([outcome["run"], summary, outcome["curve"]], sort_keys=True)


def content(folder):
    """Outcomes of all runs without times, and digests of their models."""
    outcomes = {key: without_times(stored.outcome) for key, stored in stored_outcomes(folder / "results").items()}
    models = {
        path.parent.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (folder / "runs").glob("*/model.safetensors")
    }
    return outcomes, models


class RoundClock(Callback):
    """A clock that advances by a second with every round of any run."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def round(self, row):
        self.now += 1.0


@pytest.mark.parametrize("parallel", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_table_that_is_interrupted_again_and_again_equals_one_that_is_not(tmp_path, parallel):
    preset, seeds, clock = small_preset(ROWS), [0, 1], RoundClock()

    def sweep(folder, limit=None):
        follow = lambda title, common: [clock]  # noqa: E731
        return Sweep(preset, "paper", folder / "runs", folder / "results", {}, follow=follow, limit=limit)

    whole = sweep(tmp_path / "whole").carry_out(seeds, parallel)
    assert len(whole) == len(ROWS) * len(COLUMNS) * len(seeds)
    partial_runs, finished = set(), 0
    for _ in range(60):
        part = sweep(tmp_path / "parts", TimeLimit(7 / 60, clock))
        shown = part.carry_out(seeds, parallel)
        state = part.progress()
        assert len(shown) == state.finished >= finished
        assert all(outcome["summary"]["rounds"] == 4 for _, outcome in shown)
        assert state.finished + len(state.in_progress) + state.not_started == len(whole)
        finished = state.finished
        partial_runs.update(state.in_progress)
        if state.is_complete:
            break
    assert state.is_complete
    assert len(partial_runs) > 2
    assert content(tmp_path / "parts") == content(tmp_path / "whole")
    lines = [
        line for path in (tmp_path / "parts" / "results").rglob("*.jsonl") for line in path.read_text().splitlines()
    ]
    assert len(lines) == len(content(tmp_path / "whole")[0]), "every outcome is stored once"


def test_the_rounds_of_a_run_in_progress_are_those_of_its_checkpoint(tmp_path):
    """Its common rounds count, too."""
    ticks = itertools.count()
    limit = TimeLimit(9 / 60, lambda: float(next(ticks)))
    folders = tmp_path / "runs", tmp_path / "results"
    sweep = Sweep(small_preset(ROWS, rounds=40), "paper", *folders, {}, ["FedCOG"], ["A"], limit=limit)
    assert sweep.carry_out([0]) == []
    state = sweep.progress()
    ((title, (done, rounds)),) = state.in_progress.items()
    saved = [newest_checkpoint(folder)[1]["round"] for folder in (tmp_path / "runs").glob("*/checkpoints")]
    assert (title, done, rounds) == ("FedCOG, A, seed 0", max(saved), 40)
    assert 2 < done < 40
    assert state.seconds > 0
    assert {stored.outcome["run"]["rounds"] for stored in stored_outcomes(tmp_path / "results").values()} <= {2}


def test_an_outcome_names_the_card_of_its_run(tmp_path):
    def sweep():
        preset = small_preset({"FedAvg": {"method": "fedavg"}}, rounds=1)
        return Sweep(preset, "paper", tmp_path / "runs", tmp_path / "results", {}, None, ["A"])

    ((_, outcome),) = sweep().carry_out([0])
    assert set(outcome["made_with"]) == {"torch", "python", "cores"}
    (about,) = (tmp_path / "runs").glob("*/about.json")
    values = json.loads(about.read_text())
    values["machine"]["device"] = "NVIDIA H100 80GB HBM3"
    about.write_text(json.dumps(values))
    shutil.rmtree(tmp_path / "results")
    ((_, again),) = sweep().carry_out([0])
    assert again["made_with"] == {**outcome["made_with"], "device": "NVIDIA H100 80GB HBM3"}


def test_the_rows_of_a_partial_table_have_the_order_of_the_preset(tmp_path):
    preset = load_preset("fedcog/table-1")

    def sweep(rows):
        settings = {"engine": "inline", "model": "mlp", "local_steps": 1}
        made = Sweep(preset, "smoke", tmp_path / "runs", tmp_path / "results", settings, rows, ["NIID-1"])
        made.otherwise = True
        return made

    sweep(["FedProx"]).carry_out([0])
    sweep(["FedAvg"]).carry_out([1])
    found = [(cell.row, cell.config.seed) for cell, _ in sweep(["FedAvg", "FedProx"]).found([0, 1])]
    assert found == [("FedAvg", 1), ("FedProx", 0)]


def test_reproduce_ends_in_time_and_names_the_command_that_continues(capsys, tmp_path, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(TimeLimit.__init__, "__defaults__", (lambda: float(next(ticks)),))
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", "fedals/table-1", "--row", "FedALS", "--column", "sorted", "--engine", "inline"]
    words += ["--minutes", str(8 / 60)]
    monkeypatch.setattr("unskew.cli.reproduce.report_after_runs", lambda *args: None)
    shown = call(capsys, *words)
    assert shown.code == 0
    assert "Finished: 0 of 1 runs. In progress: FedALS, sorted, seed 0 (" in shown.out
    assert f"To continue, run: unskew {' '.join(words)}" in shown.out
    assert re.search(r"FedALS +│ not run │ 52.24", shown.out), "what is not finished is not shown as if it were"
    for _ in range(20):
        last = call(capsys, *words, "--json")
        state = last.json()["progress"]
        assert last.code == 0
        assert bool(last.json()["entries"]) == (state["finished"] == 1)
        if state["finished"]:
            break
    assert (state["in_progress"], state["not_started"]) == ({}, 0)
