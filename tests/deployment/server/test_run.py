"""Processes of a deployed run are killed at random moments: what was accepted is kept, and nothing is counted twice.

``UNSKEW_KILLS`` says how many kills there are, ``UNSKEW_KILL_SEED`` with which seed their moments and victims are drawn.
"""

import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from support.flower_processes import FLOWER, environment, processes_of, real
from support.running import metrics
from support.sites import TINY

import unskew
from unskew.config.loader import experiment
from unskew.deployment.flower.superlinks import LocalSuperLink
from unskew.deployment.server.config import Deployment
from unskew.deployment.server.run import run

pytestmark = [pytest.mark.slow, *real]

KILLS = int(os.environ.get("UNSKEW_KILLS", "20"))
SEED = int(os.environ.get("UNSKEW_KILL_SEED", "0"))
VICTIMS = {
    "site": ("the process of", None),
    "SuperNode": ("the SuperNode of", None),
    "client process": ("the SuperNode of", "flwr-clientapp"),
    "SuperLink": ("the SuperLink", None),
    "server process": ("the SuperLink", "flwr-serverapp"),
}
"""The child of a deployment that is killed, or of what it has started the process of that name."""


def started_by(ancestor, program):
    """Processes of that name that descend from a process of ours."""
    parents, named = {}, []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(place.name)] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            if program in (place / "cmdline").read_text():
                named.append(int(place.name))
        except OSError:
            continue
    found = []
    for one in named:
        above = one
        while above in parents and above != ancestor:
            above = parents[above]
        if above == ancestor:
            found.append(one)
    return found


class Kills:
    """A follower that kills a process of a deployment at a random moment after each round but the last."""

    def __init__(self, place, rounds, seed):
        self.place, self.rounds, self.draws = place, rounds, random.Random(seed)
        self.killed = []

    def start(self, config, rounds_done):
        pass

    def round(self, row):
        if row["round"] < self.rounds:
            threading.Timer(self.draws.uniform(0, 6), self.kill, [self.draws.choice(sorted(VICTIMS))]).start()

    def kill(self, kind):
        name, program = VICTIMS[kind]
        child = self.draws.choice([child for child in self.place.family.children if name in child.name])
        found, end = [child.pid], time.monotonic() + 20
        while program and not (found := started_by(child.pid, program)) and time.monotonic() < end:
            time.sleep(0.05)  # Flower starts them for each message
        if found:
            self.killed.append(kind)
            os.kill(self.draws.choice(found), signal.SIGKILL)

    def end(self, summary):
        pass


@pytest.mark.usefixtures("flower_is_found")
def test_a_run_survives_kills_with_the_numbers_of_the_simulator(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "unskew.deployment.server.round_requests.NO_REPLY", 10.0
    )  # else each lost message costs two minutes
    rounds = KILLS + 1
    values = {**TINY, "clients": 2, "method": "scaffold", "rounds": rounds, "eval_clients": 0}
    place = LocalSuperLink(tmp_path / "run", 2, [experiment(values)])
    kills = Kills(place, rounds, SEED)
    result = run(experiment(values), Deployment(), tmp_path / "run", [kills], lambda text: None, place)
    print("killed:", {kind: kills.killed.count(kind) for kind in sorted(VICTIMS)}, result.history[-1])
    assert len(kills.killed) >= KILLS // 2  # else the run was over before its victims were there
    assert torch.equal(result.vector, unskew.run(**values).vector)


def test_a_server_that_is_killed_is_resumed_with_the_numbers_of_the_simulator(tmp_path):
    """All that it had started ends with it, and the sites go on from what was accepted last."""
    draws, kills = random.Random(SEED), max(1, KILLS // 7)
    values = {**TINY, "clients": 2, "method": "scaffold", "rounds": kills + 2, "eval_clients": 0}
    (tmp_path / "experiment.yaml").write_text(experiment(values).to_yaml())
    out = tmp_path / "sites"
    begin = ["deploy", "run", tmp_path / "experiment.yaml", "--local", 2, "--out", out]
    for number in range(kills + 1):
        asked = begin if number == 0 else ["resume", out, "--local", 2]
        process = subprocess.Popen(
            [str(FLOWER / "unskew"), *map(str, asked)], env=environment(tmp_path), stdout=subprocess.DEVNULL
        )
        if number == kills:
            assert process.wait(600) == 0
            break
        end = time.monotonic() + 300
        while (not (out / "metrics.jsonl").exists() or len(metrics(out)) <= number) and time.monotonic() < end:
            time.sleep(0.2)
        time.sleep(draws.uniform(0, 6))
        process.kill()
        process.wait()
        while processes_of(tmp_path) and time.monotonic() < end:
            time.sleep(0.5)
    unskew.run(out=tmp_path / "simulated", **values)
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("sites", "simulated"))
    assert one == other
    assert len(metrics(out)) == kills + 2
