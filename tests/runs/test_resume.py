"""A run is never lost: killed, interrupted, on a full disk or with a damaged checkpoint, it goes on bit for bit."""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from support.running import TIMES, TINY, Process, assert_same_run, call, metrics
from support.slow import as_slow, slow_but

import unskew
from unskew.errors import CheckpointError, UnskewError
from unskew.folder_locks import folder_lock
from unskew.runs import run as run_module
from unskew.simulation.checkpoint import FORMAT, list_checkpoints

# In one worker: each would start a server of its own for the processes.
pytestmark = [pytest.mark.usefixtures("undrawn"), pytest.mark.xdist_group("processes")]

RUN = (*TINY, "--method", "scaffold+fedavgm", "--rounds", "6", "--lr", "0.1", "--participation", "0.5")
RUN = (*RUN, "--set", "network.drop=0.2", "--set", "checkpoint_every=1")
RUN = (*RUN, "--partition", "iid", "--clients", "12", "--metrics", "auroc,auprc,f1,brier")


@dataclass(frozen=True)
class Dreamer(unskew.ClientRule):
    """Says where it is, and sleeps for longer than any test."""

    folder: str
    name, summary, paper = "dreamer", "-", "-"

    def begin(self, ctx):
        Path(self.folder, f"asleep-{os.getpid()}").touch()
        time.sleep(600)
        return {}


def dreaming(folder):
    """A run in a process of its own, which is killed."""
    fed = unskew.load_federation("digits", clients=2, partition="iid")
    unskew.run(fed, method=[Dreamer(folder)], engine="processes", workers=2, model="logistic", rounds=1, local_steps=1)


@dataclass(frozen=True)
class Sleeper(unskew.ClientRule):
    """Stops its own process, as somebody from outside may."""

    name, summary, paper = "sleeper", "-", "-"

    def begin(self, ctx):
        os.kill(os.getpid(), signal.SIGSTOP)
        return {}


class Nothing:
    def start(self, config, rounds_done):
        pass

    def round(self, row):
        pass

    def end(self, summary):
        pass


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The same run, never interrupted."""
    folder = tmp_path_factory.mktemp("straight")
    assert Process(folder, "run", *RUN, "--out", folder / "run").wait().code == 0
    return folder / "run"


def rounds_on_disk(run):
    path = Path(run) / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def go_on(tmp_path, run):
    """Resume, or begin again where the process died before there was anything to resume."""
    if (run / "config.yaml").exists():
        return Process(tmp_path, "resume", run, "--json").wait()
    return Process(tmp_path, "run", *RUN, "--out", run, "--json").wait()


@pytest.mark.parametrize("draw", slow_but([1], range(6)))
def test_killed_at_a_random_moment(tmp_path, straight, draw):
    """Up to three kills in one run, each a random while after a random round (also before the first)."""
    luck = random.Random(draw)
    run, command, killed = tmp_path / "run", ("run", *RUN, "--out", tmp_path / "run"), 0
    for _ in range(1 + draw % 3):
        process = Process(tmp_path, *command)
        target = luck.randint(0, 4)
        pause = luck.uniform(0, 0.06)
        process.wait_until(lambda target=target: rounds_on_disk(run) >= target)
        time.sleep(pause)
        process.process.kill()
        killed += process.wait().code == -signal.SIGKILL
        if (run / "config.yaml").exists():
            command = ("resume", run)
    outcome = go_on(tmp_path, run)
    # It may have been killed after its last line was written; then there was nothing to resume.
    assert outcome.code == 0 or "is complete" in outcome.err, outcome.err
    assert_same_run(straight, run)


@pytest.mark.parametrize("draw", slow_but([0], range(4)))
def test_killed_during_a_checkpoint(tmp_path, straight, draw):
    """From outside, as soon as an unfinished checkpoint is seen."""
    luck = random.Random(100 + draw)
    run, wanted = tmp_path / "run", luck.randint(1, 5)
    process = Process(tmp_path, "run", *RUN, "--out", run)
    process.wait_until(lambda: (run / "checkpoints" / f".{wanted:07d}.new").exists() or rounds_on_disk(run) > wanted)
    process.process.kill()
    process.wait()
    outcome = go_on(tmp_path, run)
    assert outcome.code == 0, outcome.err
    assert_same_run(straight, run)


WRITES = random.Random(7).sample(range(1, 50), 8)


@pytest.mark.parametrize("count", slow_but(WRITES[:2], WRITES))
def test_killed_at_a_write(tmp_path, straight, count):
    """The process dies exactly at its n-th wait for the disk: inside of every kind of file."""
    run = tmp_path / "run"
    assert Process(tmp_path, "run", *RUN, "--out", run, hook="die", value=count).wait().code == -signal.SIGKILL
    outcome = go_on(tmp_path, run)
    assert outcome.code == 0, outcome.err
    assert_same_run(straight, run)
    assert not list((run / "checkpoints").glob(".*")), "what was half-written is cleaned up"
    assert not (run / "clients").exists()


def test_killed_with_worker_processes(tmp_path, straight):
    """Several times; the workers must not outlive it, and the numbers are those of any other run."""
    run = tmp_path / "run"
    command = [a if a != "inline" else "processes" for a in ("run", *RUN, "--set", "workers=2", "--out", run)]
    for rounds in (1, 3):
        process = Process(tmp_path, *command)
        assert process.wait_until(lambda rounds=rounds: rounds_on_disk(run) >= rounds)
        process.process.kill()
        process.wait()
        gone = time.monotonic() + 10
        while process.alive() and time.monotonic() < gone:
            time.sleep(0.01)
        left = process.alive()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, "workers outlive the process that started them"
        command = ["resume", run]
    assert Process(tmp_path, "resume", run).wait().code == 0
    assert_same_run(straight, run, without=(*TIMES, "engine"))


@pytest.mark.parametrize("engine", ["inline", "processes"])
def test_ctrl_c_finishes_the_round_and_saves(tmp_path, straight, engine):
    run, marker = tmp_path / "run", tmp_path / "marker"
    args = [engine if a == "inline" else a for a in RUN] + ["--set", "checkpoint_every=100"]
    process = Process(tmp_path, "run", *args, "--out", run, "--json", hook="wait", value=marker)
    assert process.wait_until(marker.exists), process.wait()
    process.signal(signal.SIGINT, everyone=True)  # as a terminal does
    outcome = process.wait()
    assert outcome.code == 130
    assert outcome.out == ""
    assert f"unskew resume {run}" in outcome.err
    assert "Traceback" not in outcome.err
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["0000003"]
    assert len(metrics(run)) == 3
    assert not (run / "summary.json").exists()
    assert not process.alive()
    assert Process(tmp_path, "resume", run).wait().code == 0
    assert_same_run(straight, run, without=(*TIMES, "engine"))


@pytest.mark.parametrize(
    ("number", "everyone"), [(signal.SIGTERM, True), (signal.SIGTERM, False), as_slow((signal.SIGHUP, True))]
)
def test_sigterm_is_ctrl_c_with_code_143(tmp_path, straight, number, everyone):
    """To all processes of a job, as Slurm may send it, or to the first alone, as Kubernetes does; SIGHUP is the same."""
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("the tests run under nohup, which makes processes ignore SIGHUP")
    run, marker = tmp_path / "run", tmp_path / "marker"
    args = ["processes" if a == "inline" else a for a in RUN] + ["--set", "checkpoint_every=100"]
    process = Process(tmp_path, "run", *args, "--out", run, hook="wait", value=marker)
    assert process.wait_until(marker.exists), process.wait()
    process.signal(number, everyone=everyone)
    outcome = process.wait()
    assert outcome.code == 128 + number
    assert f"Stopped; the run was saved. To resume, run: unskew resume {run}" in outcome.err
    assert "Traceback" not in outcome.out + outcome.err
    assert not process.alive()
    if everyone:
        assert Process(tmp_path, "resume", run).wait().code == 0
        assert_same_run(straight, run, without=(*TIMES, "engine"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGQUIT])
def test_workers_in_the_middle_of_a_step_end_with_the_process_that_started_them(tmp_path, number):
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("the tests run in the background of a shell, which makes processes ignore SIGQUIT")
    process = Process(tmp_path, hook=dreaming, value=tmp_path)
    assert process.wait_until(lambda: len(list(tmp_path.glob("asleep-*"))) == 2)
    process.signal(number, everyone=number == signal.SIGQUIT)
    process.process.join(60)
    gone = time.monotonic() + 60
    while process.alive() and time.monotonic() < gone:
        time.sleep(0.01)
    left = process.alive()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "workers outlive the process that started them"


class Moves(Nothing):
    """A callback that changes the place of the run folder, or of the process, after the first round."""

    def __init__(self, change):
        self.change = change

    def round(self, row):
        if row["round"] == 1:
            self.change()


QUICK = {"data": "digits", "clients": 2, "partition": "iid", "model": "logistic", "local_steps": 1, "engine": "inline"}


@pytest.mark.parametrize("change", ["removed", "moved", "replaced", "metrics.jsonl removed"])
def test_a_run_stops_if_its_folder_is_gone(tmp_path, change):
    run = tmp_path / "run"

    def act():
        if change == "metrics.jsonl removed":
            (run / "metrics.jsonl").unlink()
        elif change == "removed":
            shutil.rmtree(run)
        else:
            run.rename(tmp_path / "elsewhere")
            if change == "replaced":
                run.mkdir()
                (run / "mine.txt").write_text("kept")

    with pytest.raises(CheckpointError, match="was removed, moved or replaced during the run"):
        unskew.run(rounds=3, out=run, callbacks=[Moves(act)], **QUICK)
    if change == "moved":
        assert not run.exists()
        assert len(unskew.resume(tmp_path / "elsewhere").history) == 3
    if change == "replaced":
        assert (run / "mine.txt").read_text() == "kept"


def test_a_relative_folder_stays_where_it_was_when_the_run_began(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    result = unskew.run(rounds=2, out="run", callbacks=[Moves(lambda: os.chdir(tmp_path / "other"))], **QUICK)
    assert result.folder == tmp_path / "run"
    assert (tmp_path / "run" / "summary.json").is_file()
    assert not any((tmp_path / "other").iterdir())
    assert not (tmp_path / "run" / ".lock").exists()


def test_a_start_that_is_killed_before_the_engine_is_chosen_can_be_resumed(tmp_path, monkeypatch):
    """In the place of a kill: nothing of what would be undone is undone."""
    monkeypatch.setattr("unskew.runs.simulated_clients.make_engine", lambda *_: os._exit(9))
    child = os.fork()
    if not child:
        unskew.run(rounds=2, out=tmp_path / "run", **QUICK)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    monkeypatch.undo()
    assert (tmp_path / "run" / "engine.json").exists()
    assert len(unskew.resume(tmp_path / "run").history) == 2


def test_a_worker_that_hangs_is_said(tmp_path):
    """It is stopped at its first step, and continued as soon as that was said."""
    text = []

    def told(self, words):
        text.append(words)
        os.kill(int(re.search(r"Stopped by a signal: \[(\d+)\]", words)[1]), signal.SIGCONT)

    watch = type("Watch", (Nothing,), {"warn": told})()
    given = {"model": "logistic", "rounds": 1, "clients": 1, "partition": "iid", "local_steps": 1}
    result = unskew.run(
        method=[Sleeper()], engine="processes", workers=1, stall_warning_seconds=0.3, callbacks=[watch], **given
    )
    assert "No reply from any worker for 0.3 s" in text[0]
    assert torch.equal(result.vector, unskew.run(method="fedavg", engine="inline", **given).vector)


def test_second_ctrl_c_stops_at_once(tmp_path, straight):
    run, marker = tmp_path / "run", tmp_path / "marker"
    process = Process(tmp_path, "run", *RUN, "--out", run, hook="wait twice", value=marker)
    assert process.wait_until(marker.exists)
    process.signal(signal.SIGINT)
    assert process.wait_until(Path(f"{marker}.seen").exists)
    process.signal(signal.SIGINT)
    outcome = process.wait()
    assert outcome.code == 130
    assert f"unskew resume {run}" in outcome.err
    assert len(metrics(run)) == 2, "the round was not finished"
    assert Process(tmp_path, "resume", run).wait().code == 0
    assert_same_run(straight, run)


def test_ctrl_c_in_the_last_round_finishes_the_run(tmp_path, capsys):
    run, marker = tmp_path / "run", tmp_path / "marker"
    process = Process(tmp_path, "run", *RUN, "--rounds", "3", "--out", run, hook="wait", value=marker)
    assert process.wait_until(marker.exists)
    process.signal(signal.SIGINT)
    outcome = process.wait()
    assert outcome.code == 0
    assert "Finishing this round" in outcome.err
    assert (run / "summary.json").exists()


def test_ctrl_c_in_a_comparison_says_how_to_go_on(tmp_path):
    out, marker = tmp_path / "all", tmp_path / "marker"
    args = ("compare", "fedavg", "fedprox", "--seeds", "1", *TINY, "--rounds", "4", "--out", out)
    process = Process(tmp_path, *args, hook="wait", value=marker)
    assert process.wait_until(marker.exists)
    process.signal(signal.SIGINT)
    outcome = process.wait()
    assert outcome.code == 130
    said = outcome.err.splitlines()[-1].partition("run: unskew ")[2].split()
    assert said[-1] == "--resume"
    assert Process(tmp_path, *said).wait().code == 0
    assert Process(tmp_path, *args[:-1], tmp_path / "straight").wait().code == 0
    for method in ("fedavg", "fedprox"):
        assert_same_run(out / method / "seed-0", tmp_path / "straight" / method / "seed-0")


def test_a_run_can_be_made_longer(tmp_path, straight, capsys):
    run = tmp_path / "run"
    assert call(capsys, "run", *RUN, "--rounds", "4", "--out", run).code == 0
    assert "is complete (4 rounds)" in call(capsys, "resume", run).err
    assert "is complete" in call(capsys, "resume", run, "--rounds", "3").err
    outcome = call(capsys, "resume", run, "--rounds", "6", "--json")
    assert outcome.json()["rounds"] == 6
    assert_same_run(straight, run)
    assert yaml.safe_load((run / "config.yaml").read_text())["rounds"] == 6


# ---- damaged checkpoints ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four_rounds(tmp_path_factory):
    """A run that has two rounds to go: as if killed after the fourth."""
    folder = tmp_path_factory.mktemp("four")
    run = folder / "run"
    assert Process(folder, "run", *RUN, "--rounds", 4, "--out", run).wait().code == 0
    (run / "summary.json").unlink()
    (run / "model.safetensors").unlink()
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"rounds": 6}, sort_keys=False))
    return run


@pytest.fixture
def stopped(four_rounds, tmp_path):
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(four_rounds, tmp_path / "run"))


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "truncated tensors": lambda folder: os.truncate(folder / "server.safetensors", 100),
    "a flipped bit in the model": lambda folder: flip(folder / "server.safetensors"),
    "a flipped bit in a client's state": lambda folder: flip(folder / "clients-0000.safetensors"),
    "a missing file": lambda folder: (folder / "clients-0000.safetensors").unlink(),
    "a damaged manifest": lambda folder: flip(folder / "manifest.json"),
    "a truncated manifest": lambda folder: os.truncate(folder / "manifest.json", 20),
    "an empty manifest": lambda folder: os.truncate(folder / "manifest.json", 0),
    "a missing manifest": lambda folder: (folder / "manifest.json").unlink(),
}
QUICK_DAMAGE = ["a flipped bit in the model", "a missing file", "a damaged manifest", "an empty manifest"]


@pytest.mark.parametrize("damage", slow_but(QUICK_DAMAGE, DAMAGE))
def test_damaged_checkpoint_is_reported_and_the_one_before_used(stopped, straight, capsys, damage):
    run = stopped
    newest, before = list_checkpoints(run / "checkpoints")
    assert (newest.name, before.name) == ("0000004", "0000003"), "the last two are kept"
    DAMAGE[damage](newest)
    outcome = call(capsys, "resume", run, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json()["rounds"] == 6
    report = " ".join(outcome.err.split())
    assert "0000004 is corrupted" in report
    assert "Resuming from 0000003 instead" in report
    assert_same_run(straight, run)
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["0000006", "0000005"]


def test_damaged_checkpoint_does_not_push_out_a_good_one(stopped, capsys):
    run = stopped
    flip(list_checkpoints(run / "checkpoints")[0] / "server.safetensors")
    assert call(capsys, "resume", run, "--set", "checkpoint_every=100").code == 0
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["0000006", "0000003"]


def test_checkpoint_of_another_version_is_refused_and_kept(stopped, capsys):
    run = stopped
    path = list_checkpoints(run / "checkpoints")[0] / "manifest.json"
    text = json.loads(path.read_text())["manifest"].replace(f'"format": {FORMAT}', '"format": 99')
    path.write_text(json.dumps({"manifest": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}))
    outcome = call(capsys, "resume", run)
    assert outcome.code == 2
    assert "another version" in outcome.err
    assert len(list_checkpoints(run / "checkpoints")) == 2


def test_resume_fails_if_all_checkpoints_are_damaged(stopped, capsys):
    run = stopped
    for path in list_checkpoints(run / "checkpoints"):
        flip(path / "server.safetensors")
    before = sorted(str(p) for p in run.rglob("*"))
    outcome = call(capsys, "resume", run)
    assert outcome.code == 2
    assert "No checkpoint in" in outcome.err
    assert "Traceback" not in outcome.err
    assert sorted(str(p) for p in run.rglob("*")) == before


def test_what_a_killed_process_left_behind_is_ignored(stopped, straight, capsys):
    run = stopped
    half = run / "checkpoints" / ".0000005.new"
    half.mkdir()
    (half / "server.safetensors").write_bytes(b"half")
    (run / ".0123456789abcdef.new").write_bytes(b"half")
    (run / "clients").mkdir()
    (run / "clients" / "1.safetensors").write_bytes(b"of another time")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"round": 5, "accu')
    assert call(capsys, "resume", run).code == 0
    assert_same_run(straight, run)
    assert not half.exists()
    assert not list(run.glob(".*.new"))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), "does not contain all"),
        (lambda path: path.write_text(path.read_text()[:200]), "damaged"),
        (lambda path: path.write_bytes(b"\xff\xfe" + path.read_bytes()), "damaged"),
        (lambda path: path.write_text("".join(path.read_text().splitlines(keepends=True)[1:])), "does not contain all"),
    ],
)
def test_damaged_metrics_are_refused(stopped, capsys, damage, words):
    run = stopped
    damage(run / "metrics.jsonl")
    outcome = call(capsys, "resume", run)
    assert outcome.code == 2
    assert words in outcome.err


# ---- resuming what is not the same ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [("lr", 0.2), ("seed", 1), ("method", "scaffold"), ("clients", 11), ("network", {"drop": 0.3}), ("holdout", 0.2)],
)
def test_another_configuration_is_named_and_refused(stopped, capsys, field, value):
    run = stopped
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | {field: value}))
    outcome = call(capsys, "resume", run)
    assert outcome.code == 2
    assert f"{field}=" in outcome.err


def test_a_refused_change_changes_nothing(stopped, straight, capsys):
    run = stopped
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    outcome = call(capsys, "resume", run, "--set", "lr=5")
    assert outcome.code == 2
    assert "lr=0.1" in outcome.err
    assert "lr=5" in outcome.err
    assert call(capsys, "resume", run, "--rounds", "3").code == 2
    assert call(capsys, "resume", run, "--set", "rouds=3").code == 2
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert call(capsys, "resume", run).code == 0
    assert_same_run(straight, run)


def test_other_data_are_refused(tmp_path):
    """Data given in Python are not in the configuration; who holds how much, and of what, must be the same."""
    options = {"model": "logistic", "engine": "inline", "lr": 0.1}
    given = unskew.load_federation("digits", partition="iid", clients=4)
    unskew.run(given, rounds=2, **options, out=tmp_path / "run")
    for other in ({"seed": 1}, {"holdout": 0.3}, {"server_data": 50}, {"partition": "sorted"}):
        data = unskew.load_federation("digits", **{"partition": "iid", "clients": 4, **other})
        with pytest.raises(CheckpointError, match="The data differ"):
            unskew.resume(tmp_path / "run", federation=data, rounds=3)
    unskew.run(given, rounds=3, **options, out=tmp_path / "straight")
    unskew.resume(tmp_path / "run", federation=given, rounds=3)
    assert_same_run(tmp_path / "run", tmp_path / "straight")


def test_resume_rejects_a_folder_without_a_run(tmp_path, capsys):
    for path in (tmp_path / "nowhere", tmp_path):
        outcome = call(capsys, "resume", path)
        assert outcome.code == 2
        assert "no run to resume" in outcome.err


def test_two_processes_cannot_work_in_one_folder(tmp_path):
    run, marker = tmp_path / "run", tmp_path / "marker"
    first = Process(tmp_path, "run", *RUN, "--out", run, hook="wait", value=marker)
    assert first.wait_until(marker.exists)
    second = Process(tmp_path, "resume", run).wait()
    assert second.code == 2
    assert "Another process is working" in second.err
    first.process.kill()
    first.wait()
    assert Process(tmp_path, "resume", run).wait().code == 0, "the lock ends with the process"


def test_a_folder_is_taken_before_anything_is_looked_at(tmp_path, monkeypatch):
    """Two runs into one folder: while the first loads its data, the second one is refused and removes nothing."""
    out, real, refused = tmp_path / "run", run_module.federation_of, []

    def slowly(spec, seed):
        monkeypatch.setattr(run_module, "federation_of", real)
        for begin in (unskew.run, unskew.compare):
            thread = threading.Thread(target=lambda begin=begin: refused.append(attempt(begin)))
            thread.start()
            thread.join()
        return real(spec, seed)

    def attempt(begin):
        try:
            begin(out=out, rounds=1, **({"methods": ["fedavg"]} if begin is unskew.compare else {}))
        except UnskewError as error:
            return str(error)

    monkeypatch.setattr(run_module, "federation_of", slowly)
    given = {"model": "logistic", "rounds": 2, "clients": 3, "partition": "iid", "local_steps": 1, "engine": "inline"}
    unskew.run(out=out, **given)
    assert [text and text.split(" in ")[0] for text in refused] == ["Another process is working"] * 2
    assert rounds_on_disk(out) == 2
    assert not (out / ".lock").exists()
    assert "already exists" in attempt(unskew.run)
    assert rounds_on_disk(out) == 2, "what another one made is never removed"


def test_a_lock_removed_by_the_one_before_is_no_lock(tmp_path, monkeypatch):
    """Between opening the file and locking it, its owner may end and remove it; then a new one is locked."""
    import fcntl

    real, ends = fcntl.lockf, [1]

    def lockf(handle, how):
        if ends.pop() if ends else False:
            (tmp_path / ".lock").unlink()
        return real(handle, how)

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with folder_lock(tmp_path):
        assert (tmp_path / ".lock").exists()


def test_without_its_checkpoints_a_run_is_not_trained_again_in_silence(tmp_path, stopped):
    short = tmp_path / "short"  # shorter than the rounds between two checkpoints
    unskew.run(data="digits", model="logistic", clients=2, local_steps=1, rounds=2, engine="inline", out=short)
    shutil.rmtree(short / "checkpoints")
    with pytest.raises(CheckpointError, match="its checkpoints are missing"):
        unskew.resume(short, rounds=3)
    shutil.rmtree(stopped / "checkpoints")
    before = (stopped / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match="its checkpoints are missing"):
        unskew.resume(stopped)
    assert (stopped / "metrics.jsonl").read_bytes() == before


def test_a_run_folder_is_used_from_elsewhere_and_its_data_may_move(tmp_path, monkeypatch):
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir()
    other.mkdir()
    draws = random.Random(0)
    lines = [f"{draws.random():.3f},{draws.random():.3f},{i % 2}" for i in range(60)]
    (home / "rows.csv").write_text("\n".join(["a,b,y", *lines]))
    given = {"label": "y", "model": "logistic", "clients": 2, "partition": "iid", "engine": "inline"}
    monkeypatch.chdir(home)
    for name, data in (("straight", "table:rows.csv"), ("run", "table:rows.csv"), ("file", "rows.csv")):
        unskew.run(data=data, out=name, rounds=3 if name == "straight" else 2, **given)
    monkeypatch.chdir(other)
    assert_same_run(home / "straight", unskew.resume(home / "file", rounds=3).folder)
    shutil.move(home / "rows.csv", other / "moved.csv")
    again = unskew.resume(home / "run", rounds=3, data="table:moved.csv")
    assert_same_run(home / "straight", again.folder, (*TIMES, "data"))
    shutil.copy(other / "moved.csv", other / "again.csv")
    assert len(unskew.resume(home / "file", rounds=4, data_path="again.csv").history) == 4
    moved = (other / "moved.csv").read_text().replace("0.1", "0.2")
    (other / "moved.csv").write_text(moved)
    with pytest.raises(CheckpointError, match="The data differ"):
        unskew.resume(home / "run", rounds=4)


# ---- a full disk ------------------------------------------------------------------------------------------------------


def test_full_disk_during_a_checkpoint(tmp_path, stopped, straight, capsys):
    run = stopped
    good = {path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()}
    outcome = Process(tmp_path, "resume", run, hook="small files", value=10_000).wait()
    assert outcome.code == 2
    assert "The disk is full" in outcome.err
    assert "Traceback" not in outcome.err
    assert {path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()} == good
    assert call(capsys, "resume", run).code == 0
    assert_same_run(straight, run)


def test_full_disk_while_metrics_are_written(tmp_path, stopped, straight, capsys):
    run = stopped
    size = max((run / name).stat().st_size for name in ("metrics.jsonl", "config.yaml"))
    outcome = Process(
        tmp_path, "resume", run, "--set", "checkpoint_every=100", hook="small files", value=size + 30
    ).wait()
    assert outcome.code == 2
    assert "The disk is full" in outcome.err
    assert "metrics.jsonl" in outcome.err
    assert "Traceback" not in outcome.err
    assert call(capsys, "resume", run, "--set", "checkpoint_every=1").code == 0
    assert_same_run(straight, run)


def test_full_disk_from_the_start_leaves_nothing(tmp_path):
    outcome = Process(tmp_path, "run", *RUN, "--out", tmp_path / "runs" / "a", hook="small files", value=400).wait()
    assert outcome.code == 2
    assert "The disk is full" in outcome.err
    assert "config.yaml" in outcome.err
    assert not (tmp_path / "runs").exists()


def test_full_disk_at_the_figure(tmp_path):
    """The run itself is whole; only its picture is missing, and the sentence says so."""
    outcome = Process(tmp_path, "run", *RUN, "--out", tmp_path / "run", hook="small files", value=40_000).wait()
    assert outcome.code == 2
    assert "convergence.png" in outcome.err
    assert (tmp_path / "run" / "summary.json").exists()


def test_resume_goes_on_after_a_full_disk(tmp_path, straight, capsys):
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(disk)], capture_output=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if made.returncode:
        pytest.skip("mounting is not permitted here")
    try:
        run, marker = disk / "run", tmp_path / "marker"
        process = Process(tmp_path, "run", *RUN, "--out", run, hook="wait", value=marker)
        assert process.wait_until(marker.exists)
        with (disk / "filler").open("wb", buffering=0) as file:
            while True:
                try:
                    file.write(b"0" * 4096)
                except OSError:
                    break
        process.signal(signal.SIGINT)
        outcome = process.wait()
        assert outcome.code == 2
        assert "The disk is full" in outcome.err
        assert "Traceback" not in outcome.err
        assert (disk / "filler").exists()
        (disk / "filler").unlink()
        outcome = Process(tmp_path, "resume", run, "--json").wait()
        # The figure needs more room than this disk has; the run does not.
        assert (run / "summary.json").exists(), outcome.err
        assert_same_run(straight, run)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_the_folder_of_a_deployed_run_is_not_continued_by_a_simulation(tmp_path):
    options = {"data": "digits", "clients": 3, "model": "logistic", "local_steps": 1, "engine": "inline"}
    unskew.run(method="fedavg", rounds=1, out=tmp_path / "run", **options)
    (tmp_path / "run" / "deployment.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"is the folder of a deployed run.*--local"):
        unskew.resume(tmp_path / "run", rounds=2)
    with pytest.raises(CheckpointError, match="is the folder of a deployed run"):
        unskew.run(method="fedavg", rounds=2, out=tmp_path / "run", resume=True, **options)
