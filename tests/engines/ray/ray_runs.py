"""Whole runs as tasks of a cluster: what they give is what they give one after another. Run by ``test_engine.py``."""

import os
import signal
from pathlib import Path

import pytest
from support.ray_nodes import TOKEN
from support.running import Process, metrics
from support.sweeps import small_table

import unskew
from unskew.errors import ConfigError
from unskew.records.recorder import Callback
from unskew.simulation.checkpoint import list_checkpoints

os.environ |= TOKEN  # before Ray is imported
pytestmark = pytest.mark.usefixtures("undrawn")


class KillsOne(Callback):
    """The worker that relays a run, after the run's first round."""

    def __init__(self, nodes):
        self.nodes, self.killed, self.warned = nodes, [], []

    def round(self, row):
        for pid in [] if self.killed else [pid for node in self.nodes for pid in node.pids()]:
            name = Path(f"/proc/{pid}/cmdline")
            if name.exists() and name.read_bytes().startswith(b"ray::run_remote_job"):
                os.kill(pid, signal.SIGKILL)
                self.killed.append(pid)
                return

    def warn(self, text):
        self.warned.append(text)


def test_whole_runs_as_tasks_of_the_cluster(nodes, tmp_path):
    options = {"methods": ["fedavg", "scaffold"], "seeds": 2, "model": "logistic", "rounds": 3, "local_steps": 2}
    options |= {"clients": 4, "checkpoint_every": 1}
    alone = unskew.compare(engine="inline", out=tmp_path / "alone", **options)
    killer = KillsOne(nodes[1])
    there = unskew.compare(
        parallel=f"2@{nodes[0]}", out=tmp_path / "there", callback_factory=lambda *run: [killer], **options
    )
    assert killer.killed
    assert any("restarting it" in text for text in killer.warned)
    for name, histories in alone.histories.items():
        for one, other in zip(histories, there.histories[name], strict=True):
            assert [row["loss"] for row in one] == [row["loss"] for row in other]
    for path in sorted((tmp_path / "alone").rglob("model.safetensors")):
        assert path.read_bytes() == (tmp_path / "there" / path.relative_to(tmp_path / "alone")).read_bytes()
    assert not list((tmp_path / "there").rglob("*.new"))
    again = unskew.compare(parallel=f"2@{nodes[0]}", out=tmp_path / "there", resume=True, **options)
    assert again.histories == there.histories
    with pytest.raises(ConfigError, match="each run is one task"):
        unskew.compare(parallel=f"2@{nodes[0]}", engine="ray", **options)


def test_a_table_on_a_cluster_with_its_common_rounds_made_once(nodes, tmp_path):
    alone = small_table(tmp_path / "alone", 1, [0], "logistic")
    assert small_table(tmp_path / "there", f"auto@{nodes[0]}", [0], "logistic") == alone


def test_tuning_on_a_cluster_is_tuning(nodes, tmp_path):
    pytest.importorskip("optuna")
    options = {"methods": ["fedprox"], "trials": 3, "seeds": 1, "data": "digits", "clients": 3, "model": "logistic"}
    options |= {"rounds": 2, "local_steps": 1, "pruning": False}
    found = unskew.tune(out=tmp_path / "there", parallel=f"2@{nodes[0]}", **options)
    assert [row["state"] for row in found.trials] == ["finished"] * 3
    best = max(found.trials, key=lambda row: row["value"])
    assert found.tuned["fedprox"].value == best["value"]
    # Trials beside each other draw other options than one after another; what one is worth is the same anywhere.
    first = unskew.tune(out=tmp_path / "alone", **{**options, "trials": 1}, engine="inline")
    assert first.trials[0]["value"] == found.trials[0]["value"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_after_all_nodes_have_saved_their_round(nodes, tmp_path, number):
    rounds, out = 10_000, tmp_path / "out"
    options = ("--model", "logistic", "--clients", 4, "--seeds", "0", "--rounds", rounds, "--local-steps", 2)
    options += ("--set", f"checkpoint_every={rounds}", "--no-references", "--parallel", f"2@{nodes[0]}")
    process = Process(tmp_path, "compare", "fedavg", "scaffold", *options, "--out", out)
    files = [out / name / "seed-0" / "metrics.jsonl" for name in ("fedavg", "scaffold")]
    assert process.wait_until(lambda: all(file.is_file() and file.read_bytes().count(b"\n") > 3 for file in files))
    process.signal(number)
    outcome = process.wait()
    assert outcome.code == 128 + number
    assert outcome.err.count("Finishing this round") == 1
    assert "Stopped; the run was saved. To resume, run: " in outcome.err
    for file in files:
        saved = [path.name for path in list_checkpoints(file.parent / "checkpoints")]
        assert saved == [f"{len(metrics(file.parent)):07}"]
