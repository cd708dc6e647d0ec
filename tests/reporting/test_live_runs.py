"""State of runs from their folders: in progress, finished, stopped, killed, damaged, and from somebody who means harm."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys

import pytest
from support.named import CLIENTS, federation

import unskew
from unskew.errors import ConfigError
from unskew.filesystem import write_atomic
from unskew.folder_locks import folder_lock, is_locked
from unskew.reporting.live_runs import LONGEST_LINE, POINTS, LiveRun
from unskew.tasks.formatting import format_megabytes, format_percent

OPTIONS = {"model": "logistic", "rounds": 3, "local_steps": 2, "lr": 0.1, "engine": "inline", "batch_size": 8}
STATE, METHOD, DATA, ROUNDS, METRIC, LATEST, BEST, LEFT, ELAPSED, UP, DOWN = range(11)


class Watching(unskew.Callback):
    """Looks at the folder of a run after each of its rounds, and may end it."""

    def __init__(self, folder, last=None):
        self.run, self.last, self.rows = LiveRun(folder, "run", 0), last, []

    def round(self, row):
        self.run.update(math.inf)
        self.rows.append(self.run.row())
        if row["round"] == self.last:
            raise RuntimeError("the run ends")


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A finished run, and what was seen of it after each round."""
    folder = tmp_path_factory.mktemp("watched") / "run"
    watching = Watching(folder)
    return unskew.run(federation(), out=folder, callbacks=[watching], **OPTIONS), watching


@pytest.fixture
def copied(watched, tmp_path):
    return shutil.copytree(watched[0].folder, tmp_path / "run")


def seen(folder, run=None):
    """Return the row of a run, read as far as it goes."""
    run = run or LiveRun(folder, "run", 0)
    run.update(math.inf)
    return run.row()


def unfinished(folder):
    for name in ("summary.json", "clients.jsonl"):
        (folder / name).unlink()
    return folder


def write_rows(folder, rows):
    write_atomic(folder / "metrics.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows).encode())


def test_a_run_in_progress_shows_its_round_metric_and_traffic(watched):
    result, watching = watched
    for number, (row, line) in enumerate(zip(watching.rows, result.history, strict=True), 1):
        best = max(result.history[:number], key=lambda each: each["accuracy"])
        assert row[:BEST] == ["running", "fedavg", "arrays", f"{number} of 3", "accuracy", row[LATEST]]
        assert row[LATEST] == format_percent(line["accuracy"]) + "%"
        assert row[BEST] == f"{format_percent(best['accuracy'])}% (round {best['round']})"
        assert row[UP:] == [format_megabytes(line["bytes_up"]), format_megabytes(line["bytes_down"])]
        assert row[LEFT].endswith(" s") == (number < 3)
    assert watching.rows[-1][LEFT] == "final evaluation"
    finished = seen(result.folder, watching.run)
    assert (finished[STATE], finished[LEFT], finished[ROUNDS]) == ("finished", "", "3 of 3")
    assert watching.run.update(math.inf) is False, "nothing has changed"


def test_clients_are_listed_worst_first_with_all_of_them(watched, copied):
    run = watched[1].run
    seen(copied, run)
    columns, rows = run.client_table()
    assert columns[:4] == ["client", "samples", "held-out samples", "accuracy"]
    wanted = sorted(watched[0].clients, key=lambda client: client["accuracy"])
    assert [row[0] for row in rows] == [client["name"] for client in wanted]
    assert {row[0] for row in rows} == {*CLIENTS}
    assert [row[3] for row in rows] == [format_percent(client["accuracy"]) + "%" for client in wanted]
    summary = json.loads((copied / "summary.json").read_text())
    (copied / "summary.json").write_text(json.dumps({**summary, "objective": "loss"}))
    by_loss = LiveRun(copied, "run", 0)
    assert seen(copied, by_loss)[METRIC] == "loss"
    losses = {client["name"]: client["loss"] for client in watched[0].clients}
    assert [row[0] for row in by_loss.client_table()[1]] == sorted(losses, key=losses.get, reverse=True)


def test_a_run_that_ended_with_an_error_is_stopped(tmp_path):
    watching = Watching(tmp_path / "run", last=2)
    with pytest.raises(RuntimeError, match="the run ends"):
        unskew.run(federation(), out=tmp_path / "run", callbacks=[watching], **OPTIONS)
    row = seen(tmp_path / "run", watching.run)
    assert (row[STATE], row[ROUNDS], row[LEFT]) == ("stopped", "2 of 3", "")
    assert watching.run.client_table()[1] == []


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="this system does not say whether a file is locked")
def test_a_run_is_running_while_its_process_holds_the_lock_and_failed_after_it_was_killed(copied):
    unfinished(copied)
    code = (
        "import pathlib, sys, time\nfrom unskew.folder_locks import folder_lock\n"
        f"with folder_lock(pathlib.Path({str(copied)!r})):\n    print('locked', flush=True)\n    time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        run = LiveRun(copied, "run", 0)
        assert seen(copied, run)[STATE] == "running"
        assert is_locked(copied) is True, "looking at a lock does not release it"
        with pytest.raises(ConfigError, match="Another process"), folder_lock(copied):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (copied / ".lock").exists()
    assert seen(copied, run)[STATE] == "failed"
    with folder_lock(copied):
        assert seen(copied, run)[STATE] == "running"
    assert seen(copied, run)[STATE] == "stopped"


def test_without_locks_the_time_of_the_last_round_tells_whether_a_run_is_running(copied, monkeypatch):
    monkeypatch.setattr("unskew.reporting.live_runs.is_locked", lambda folder: None)
    assert seen(copied)[STATE] == "finished"
    unfinished(copied)
    (copied / "metrics.jsonl").touch()
    assert seen(copied)[STATE] == "running"
    os.utime(copied / "metrics.jsonl", (1, 1))
    assert seen(copied)[STATE] == "stopped"


def test_rows_are_read_as_they_are_appended_and_again_after_a_resume(copied):
    unfinished(copied)
    lines = (copied / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    write_atomic(copied / "metrics.jsonl", lines[0])
    run = LiveRun(copied, "run", 0)
    assert seen(copied, run)[ROUNDS] == "1 of 3"
    with (copied / "metrics.jsonl").open("ab") as file:
        file.write(lines[1][:20])
        file.flush()
        assert seen(copied, run)[ROUNDS] == "1 of 3", "an incomplete line is not a round yet"
        file.write(lines[1][20:])
    assert seen(copied, run)[ROUNDS] == "2 of 3"
    assert run.notes == {}
    with (copied / "metrics.jsonl").open("ab") as file:
        file.write(b'{"round": NaN}\n' + lines[2])
    row = seen(copied, run)
    assert (row[ROUNDS], row[STATE]) == ("3 of 3", "stopped (see notes)")
    assert "corrupted" in run.notes["metrics.jsonl"]
    write_atomic(copied / "metrics.jsonl", lines[0])  # as resume does
    assert seen(copied, run)[ROUNDS] == "1 of 3"
    assert run.notes == {}
    assert run.curves(POINTS)["test accuracy (%)"] == [(1, 100 * json.loads(lines[0])["accuracy"])]
    (copied / "metrics.jsonl").unlink()
    assert seen(copied, run)[ROUNDS] == "0 of 3"


def test_a_long_history_is_read_in_parts_and_drawn_with_few_points(copied, watched, monkeypatch):
    unfinished(copied)
    base, count = watched[0].history[0], 10_000
    accuracy = [number / count if number % 5 == 0 else None for number in range(1, count + 1)]
    rows = [{**base, "round": at + 1, "seconds": 2.0 * (at + 1), "accuracy": accuracy[at]} for at in range(count)]
    write_rows(copied, rows)
    (copied / "config.yaml").write_text("method: fedavg\ndata: arrays\nrounds: 10090\n")
    run = LiveRun(copied, "run", 0)
    parts = 0
    with folder_lock(copied):
        while run.update(until=-math.inf) and run.unread:  # one part per call
            parts += 1
        row = run.row()
    assert parts == (copied / "metrics.jsonl").stat().st_size // (1 << 20)
    assert (row[ROUNDS], row[LATEST], row[LEFT]) == ("10000 of 10090", "100.0%", "3 min")  # 90 rounds of 2 s
    points = run.curves(POINTS)["test accuracy (%)"]
    assert len(points) == POINTS
    assert (points[0], points[-1]) == ((5, pytest.approx(0.05)), (10_000, 100.0))
    assert all(number % 5 == 0 and value == pytest.approx(number / 100) for number, value in points)


def test_a_run_without_a_global_model_shows_the_models_of_the_clients(tmp_path):
    compared = unskew.compare(federation(), methods=["fedavg"], seeds=1, references=True, out=tmp_path / "c", **OPTIONS)
    (folder,) = (path.parent for path in compared.folder.rglob("metrics.jsonl") if "local" in str(path))
    run = LiveRun(folder, "local", 0)
    mean = json.loads((folder / "summary.json").read_text())["personal_accuracy_mean"]
    assert seen(folder, run)[LATEST:LEFT] == [f"{format_percent(mean)}% (mean of personal models)", ""]
    columns, rows = run.client_table()
    clients = [json.loads(line) for line in (folder / "clients.jsonl").read_text().splitlines()]
    assert columns[3] == "accuracy"
    assert [row[3] for row in rows] == [
        f"{format_percent(value)}%" for value in sorted(client["personal_accuracy"] for client in clients)
    ]


def test_a_method_that_only_trains_own_models_is_shown_with_personal_metrics(tmp_path):
    watching = Watching(tmp_path / "run")
    with pytest.warns(UserWarning, match="fedfomo, clients send their own models"):
        summary = unskew.run(
            federation(), method="fedfomo", out=tmp_path / "run", callbacks=[watching], **OPTIONS
        ).summary
    assert {tuple(row[LATEST:LEFT]) for row in watching.rows} == {("no global model", "")}
    mean = f"{format_percent(summary['personal_accuracy_mean'])}% (mean of personal models)"
    assert seen(tmp_path / "run", watching.run)[LATEST:LEFT] == [mean, ""]
    assert not any("accuracy" in title for title in watching.run.curves(POINTS))
    assert watching.run.client_table()[0][3:] == ["personal accuracy", "personal loss"]


@pytest.mark.fuzz
@pytest.mark.parametrize("name", ["config.yaml", "summary.json", "clients.jsonl", "metrics.jsonl", "warnings.txt"])
def test_a_link_a_pipe_or_a_folder_in_the_place_of_a_file_is_not_read(copied, tmp_path, name):
    secret = tmp_path / "secret"
    secret.write_text('{"method": "secret"}')
    if name == "config.yaml":  # which is only read without a summary
        unfinished(copied)
    path = copied / name
    for make in (lambda: path.symlink_to(secret), lambda: os.mkfifo(path), path.mkdir):
        path.unlink(missing_ok=True)
        make()
        run = LiveRun(copied, "run", 0)
        shown = [*seen(copied, run), *run.log(), str(run.client_table()), str(run.curves(POINTS))]
        assert "secret" not in " ".join(shown)
        assert "link, folder, pipe or device" in run.notes[name]


@pytest.mark.fuzz
def test_damaged_and_huge_files_are_named_and_the_rest_is_shown(copied, monkeypatch):
    monkeypatch.setattr("unskew.reporting.live_runs.CHUNK", 1 << 23)
    damage = {
        "summary.json": b'{"method": "fedavg", "rounds": 1e999}',
        "clients.jsonl": b'{"client": 0, "samples": "many"}\n',
        "config.yaml": b"rounds: 3\n" + b"#" * (1 << 18),
        "metrics.jsonl": (copied / "metrics.jsonl").read_bytes() + b"1" * (LONGEST_LINE + 1),
    }
    for name, data in damage.items():
        (copied / name).write_bytes(data)
    run = LiveRun(copied, "run", 0)
    row = seen(copied, run)
    assert run.notes.keys() == damage.keys()
    assert row[:ROUNDS] == ["finished (see notes)", "", ""]
    assert row[LATEST] != ""
    (copied / "warnings.txt").write_bytes(b"\xff" * 50_000 + b"\nthe last line\n")
    seen(copied, run)
    assert run.log()[-1] == "the last line"


@pytest.mark.fuzz
@pytest.mark.parametrize(
    "values",
    [
        {"rounds": 10**400, "method": ["fedavg"], "objective": {"a": 1}},
        {"rounds": True, "own_metrics": [1], "positive": 3, "objective": "a:b:c"},
        {"rounds": -3, "objective": "mine.module:cost", "max_rounds": "many"},
    ],
    ids=str,
)
def test_a_configuration_with_values_of_other_types_is_shown_as_far_as_possible(copied, values):
    (copied / "summary.json").unlink()
    (copied / "config.yaml").write_text(json.dumps(values))
    run = LiveRun(copied, "run", 0)
    assert seen(copied, run)[STATE].startswith("stopped")
    assert run.curves(POINTS)
    assert len(run.client_table()[1]) == 4
