"""Trackers: whatever happens to them, the run goes on; MLflow's runs share one store that is whole from the start."""

import importlib
import os
import sqlite3
import sys
import threading
import time

import pytest
from support.running import Process, metrics
from support.slow import slow_but

import unskew
from unskew.errors import ConfigError
from unskew.folder_locks import file_lock
from unskew.records import mlflow_store, trackers
from unskew.records.mlflow_store import is_complete_database, move_aside

QUICK = {"data": "digits", "clients": 3, "model": "logistic", "local_steps": 1, "engine": "inline", "rounds": 2}


class Fake:
    """A tracker that remembers how it was made, and fails when it is told to."""

    made, fails = [], ""

    def __init__(self, *args):
        Fake.made.append(args)
        self.step("creation")

    def step(self, name):
        if Fake.fails == name:
            raise RuntimeError("no such table\n[SQL: SELECT ...]")

    def start(self, config, rounds_done):
        self.step("start")

    def round(self, row):
        self.step("round")

    def end(self, summary):
        self.step("end")


class WandBModule:
    """The part of the module ``wandb`` that the tracker uses."""

    def __init__(self):
        self.runs, self.calls = [], []

    def init(self, **options):
        self.calls.append(options)
        self.runs.append(WandBRun(options["id"] or "abc"))
        return self.runs[-1]


class WandBRun:
    def __init__(self, number):
        self.id, self.rows, self.summary, self.finished = number, [], {}, False

    def log(self, row, step):
        self.rows.append((step, row))

    def finish(self):
        self.finished = True


def test_wandb_receives_rounds_and_summary_and_is_resumed(tmp_path, monkeypatch):
    module = WandBModule()
    monkeypatch.setitem(sys.modules, "wandb", module)
    result = unskew.run(**QUICK, trackers="wandb", out=tmp_path / "run")
    (run,) = module.runs
    assert [step for step, _ in run.rows] == [1, 2]
    assert [row["accuracy"] for _, row in run.rows] == [row["accuracy"] for row in result.history]
    assert run.summary["final_accuracy"] == result.summary["accuracy"]
    assert run.finished
    unskew.resume(tmp_path / "run", rounds=3, trackers="wandb")
    assert [call["id"] for call in module.calls] == [None, "abc"]
    assert [step for step, _ in module.runs[1].rows] == [3]
    assert module.calls[0]["name"] == "fedavg, seed 0"


@pytest.fixture
def fake(monkeypatch):
    for name in ("TensorBoard", "MLflow"):
        monkeypatch.setattr(trackers, name, Fake)
    monkeypatch.setattr(Fake, "made", [])
    return Fake


@pytest.mark.parametrize("moment", ["creation", "start", "round", "end"])
def test_a_tracker_that_fails_is_one_warning(tmp_path, fake, monkeypatch, moment):
    monkeypatch.setattr(fake, "fails", moment)
    with pytest.warns(UserWarning, match="The tracker") as seen:
        result = unskew.run(**QUICK, trackers="mlflow", out=tmp_path / "run")
    (text,) = [str(warning.message) for warning in seen]
    assert text == "The tracker 'mlflow' failed, so the run continues without it: no such table"
    assert len(metrics(tmp_path / "run")) == result.summary["rounds"] == 2


def test_the_runs_of_a_comparison_share_a_store(tmp_path, fake):
    unskew.compare(methods=["fedavg", "fedprox"], seeds=1, **QUICK, trackers="mlflow", out=tmp_path / "all")
    assert [args[1] for args in fake.made] == [tmp_path / "all"] * 2
    unskew.run(**QUICK, trackers="mlflow", out=tmp_path / "one")
    assert fake.made[-1] == (tmp_path / "one", tmp_path, False)
    unskew.resume(tmp_path / "one", rounds=3, trackers="mlflow")
    assert fake.made[-1] == (tmp_path / "one", tmp_path, True)


# ---- the store --------------------------------------------------------------------------------------------------------


def test_empty_and_partial_databases_are_incomplete(tmp_path):
    path = tmp_path / "mlflow.db"
    assert not is_complete_database(path)
    path.touch()
    assert not is_complete_database(path), "empty"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE experiments (name TEXT)")
    assert not is_complete_database(path), "tables, but not yet an experiment"
    with sqlite3.connect(path) as database:
        database.execute("INSERT INTO experiments VALUES ('Default')")
        database.execute("CREATE TABLE more (name TEXT)")
    assert is_complete_database(path)
    for size in (path.stat().st_size - 4096, 5000, 50):
        os.truncate(path, size)
        assert not is_complete_database(path), f"cut to {size}"
    (tmp_path / "mlflow.db-journal").write_bytes(b"of the cut one")
    move_aside(path)
    assert {found.name for found in tmp_path.iterdir()} == {"mlflow-damaged.db", "mlflow-damaged.db-journal"}


def test_threads_wait_for_a_lock_file(tmp_path):
    order = []

    def hold(name):
        with file_lock(tmp_path / "lock", 10):
            order.append(f"{name} in")
            time.sleep(0.02)
            order.append(f"{name} out")

    several = [threading.Thread(target=hold, args=(name,)) for name in "abc"]
    for one in several:
        one.start()
    for one in several:
        one.join()
    assert len(order) == 6
    assert [(x[0], y[0]) for x, y in zip(order[::2], order[1::2], strict=True)] == [(x[0], x[0]) for x in order[::2]]
    with file_lock(tmp_path / "lock", 0), pytest.raises(ConfigError, match="Another process"):  # noqa: SIM117
        with file_lock(tmp_path / "lock", 0):
            pass
    assert not list(tmp_path.iterdir())


def test_a_path_that_mlflow_cannot_write_to_is_said_at_once(tmp_path):
    with pytest.raises(ConfigError, match="cannot store a database"):
        mlflow_store.open_client(tmp_path / "100%")


def mlflow_runs(path):
    client = importlib.import_module("mlflow").MlflowClient(f"sqlite:///{path}")
    runs = client.search_runs([client.get_experiment_by_name("unskew").experiment_id])
    steps = {
        run.data.tags["unskew.folder"]: [p.step for p in client.get_metric_history(run.info.run_id, "accuracy")]
        for run in runs
    }
    assert len(steps) == len(runs)
    return steps


@pytest.mark.slow
@pytest.mark.filterwarnings("error:The tracker")
@pytest.mark.parametrize("name", ["St. Mary's", "a \"quoted\" 'name' \\ with_all", "plain"])
def test_a_resumed_run_goes_on_in_its_mlflow_run(tmp_path, name):
    """Also where a name has quotes, and beside one that differs from it in a quote only."""
    other, folder = tmp_path / name.replace("'", "´"), tmp_path / name
    for place in {other, folder}:
        unskew.run(**QUICK, trackers="mlflow", out=place)
    unskew.resume(folder, rounds=3, trackers="mlflow")
    assert mlflow_runs(tmp_path / "mlflow.db") == {str(other): [1, 2], str(folder): [1, 2, 3]}


@pytest.mark.slow
@pytest.mark.filterwarnings("error:The tracker")
def test_a_run_of_a_comparison_that_is_resumed_alone_goes_on_in_the_comparisons_store(tmp_path):
    out = tmp_path / "all"
    unskew.compare(methods=["fedavg", "fedprox"], seeds=1, **QUICK, trackers="mlflow", out=out)
    unskew.resume(out / "fedavg" / "seed-0", rounds=3, trackers="mlflow")
    found = mlflow_runs(out / "mlflow.db")
    assert found == {str(out / "fedavg" / "seed-0"): [1, 2, 3], str(out / "fedprox" / "seed-0"): [1, 2]}
    assert [str(path.relative_to(out)) for path in out.rglob("mlflow*")] == ["mlflow.db"]


@pytest.mark.slow
@pytest.mark.filterwarnings("error:The tracker")
@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_file_does_not_start_a_tracker_that_acts_outside_the_run_folder(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "wandb", None)
    unskew.run(**QUICK, out=tmp_path / "in" / "run")
    path = tmp_path / "in" / "run" / "config.yaml"
    path.write_text(path.read_text().replace("trackers: []", f"trackers: [{name}]"))
    with pytest.raises(
        ConfigError, match=f"trackers in .*config.yaml names .*{name}.* set trackers yourself, or trust the file"
    ):
        unskew.resume(tmp_path / "in" / "run", rounds=3)
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["run"]
    path.write_text(path.read_text().replace(f"trackers: [{name}]", "trackers: [tensorboard]"))
    unskew.resume(tmp_path / "in" / "run", rounds=3)
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["run"]


@pytest.mark.parametrize("size", slow_but([300_000], [0, 50, 300_000]))
def test_a_half_made_database_is_made_anew(tmp_path, size):
    unskew.run(**QUICK, trackers="mlflow", out=tmp_path / "a")
    os.truncate(tmp_path / "mlflow.db", size)
    unskew.run(**QUICK, trackers="mlflow", out=tmp_path / "b")
    unskew.resume(tmp_path / "a", rounds=3, trackers="mlflow")
    assert mlflow_runs(tmp_path / "mlflow.db") == {str(tmp_path / "a"): [3], str(tmp_path / "b"): [1, 2]}
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "mlflow.db", "mlflow-damaged.db"}


TRACKED = ("run", "--data", "digits", "--clients", "3", "--model", "logistic", "--local-steps", "1", "--rounds", "2")
TRACKED = (*TRACKED, "--engine", "inline", "--set", "trackers=mlflow")


@pytest.mark.slow
def test_several_at_once_in_a_folder_where_one_was_killed(tmp_path):
    """The first dies while the database is made; then three begin together."""
    first = Process(tmp_path, *TRACKED, "--out", tmp_path / "runs" / "first")
    fresh = tmp_path / "runs" / ".mlflow.new" / "mlflow.db"
    assert first.wait_until(lambda: fresh.exists() and fresh.stat().st_size > 0)
    first.process.kill()
    first.wait()
    assert fresh.exists()
    several = [Process(tmp_path, *TRACKED, "--out", tmp_path / "runs" / name) for name in "abc"]
    for outcome in [one.wait() for one in several]:
        assert outcome.code == 0, outcome.err
        assert "tracker" not in outcome.err + outcome.out
    folder = tmp_path / "runs"
    assert mlflow_runs(folder / "mlflow.db") == {str(folder / name): [1, 2] for name in "abc"}
    assert not list(folder.glob(".mlflow*"))
