"""Slow ones with real processes: what is refused at the door, and kills in the middle of a run."""

import os
import random
import signal
import subprocess
import threading
import time

import pytest
import torch
from support.pages import ROOT
from support.sites import TINY

import unskew
from unskew.config.reading import experiment
from unskew.deployment import flower, folder
from unskew.deployment.places import Local, free_port
from unskew.deployment.run import Deployment, run

FLOWER = ROOT / ".venv-deploy"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (FLOWER / "installed").exists(), reason="make .venv-deploy/installed makes Flower's environment"
    ),
    pytest.mark.xdist_group("flower"),
]


@pytest.fixture
def flower_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{FLOWER / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def place(flower_is_found):
    local = Local("door", 0, [])
    local.start()
    yield local
    local.close()


def supernode(place, tmp_path, *instead, key="known"):
    """How a SuperNode ends, and what it says; None while it is let in."""
    certificate = ["--root-certificates", str(place.superlink.ca)] if not instead else list(instead)
    keys = tmp_path / key
    if not keys.exists():
        folder.make_node_key(place.folder, keys)
    command = [
        *(flower.program("flower-supernode"), "--superlink", place.superlink.address, *certificate),
        *("--auth-supernode-private-key", str(keys / "node.key"), "--host", "127.0.0.1", "--port", str(free_port())),
        *("--max-retries", "1"),
    ]
    log = tmp_path / "node.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **flower.QUIET}, start_new_session=True
        )
        try:
            code = process.wait(45)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:
                    break
                time.sleep(1)
            process.wait()
    return code, log.read_text()


def test_a_key_that_is_not_registered_is_refused_and_one_that_is_comes_in(place, tmp_path):
    code, text = supernode(place, tmp_path, key="unknown")
    assert code not in (0, None), text
    assert "SuperNode ID" not in text
    folder.make_node_key(place.folder, tmp_path / "known")
    place.superlink.control(place.superlink.registering(tmp_path / "known" / "node.pub"))
    code, text = supernode(place, tmp_path)
    assert code is None, text
    assert "SuperNode ID" in text


def test_foreign_certificates_and_plain_connections_are_refused(place, tmp_path):
    folder.make_node_key(place.folder, tmp_path / "known")
    place.superlink.control(place.superlink.registering(tmp_path / "known" / "node.pub"))
    folder.put_tools(tmp_path / "foreign")
    folder.make_certificates(tmp_path / "foreign", ["127.0.0.1"])
    foreign = tmp_path / "foreign" / "ca" / "ca.crt"
    for instead in (["--root-certificates", str(foreign)], ["--insecure"]):
        _, text = supernode(place, tmp_path, *instead)
        assert "SuperNode ID" not in text, text


def test_a_certificate_that_has_expired_is_refused(flower_is_found, tmp_path):
    late = Local("late", 0, [])
    late.folder.mkdir(parents=True)
    folder.put_tools(late.folder)
    subprocess.run(
        ["sh", str(late.folder / "certificates.sh"), "127.0.0.1"], check=True, env={**os.environ, "DAYS": "-1"}
    )
    late.superlink = flower.SuperLink(f"127.0.0.1:{free_port()}", late.superlink.ca, late.superlink.home)
    port = int(late.superlink.address.rpartition(":")[2])
    late.logs.mkdir()
    try:
        late.family.add(flower.superlink(late.folder, port, late.logs, late.folder / "home-superlink"))
        late.superlink.wait(60)
        _, text = supernode(late, tmp_path)
        assert "SuperNode ID" not in text, text
    finally:
        late.close()


class Kills:
    """A follower that kills a process of a deployment at a random moment after each round but the last."""

    def __init__(self, place, what, rounds, seed):
        self.place, self.what, self.rounds, self.draws = place, what, rounds, random.Random(seed)
        self.killed = 0

    def start(self, config, rounds_done):
        pass

    def round(self, row):
        if row["round"] < self.rounds:
            threading.Timer(self.draws.uniform(0, 4), self.kill).start()

    def kill(self):
        chosen = self.draws.choice([child for child in self.place.family.children if self.what in child.name])
        self.killed += 1
        os.kill(chosen.pid, signal.SIGKILL)

    def end(self, summary):
        pass


@pytest.mark.usefixtures("flower_is_found")
@pytest.mark.parametrize("what", ["the process of", "the SuperLink", "the SuperNode of"])
def test_a_run_survives_kills_with_the_numbers_of_the_simulator(what, tmp_path):
    """Nothing that was accepted is lost, and nothing is counted twice."""
    rounds = 4 if what == "the process of" else 2
    values = {**TINY, "clients": 2, "method": "scaffold", "rounds": rounds, "eval_clients": 0}
    place = Local("kills", 2, [experiment(values)])
    kills = Kills(place, what, rounds, seed=int(os.environ.get("UNSKEW_KILL_SEED", "0")))
    result = run(experiment(values), Deployment(), tmp_path / "run", [kills], lambda text: None, place)
    assert kills.killed == rounds - 1
    assert torch.equal(result.vector, unskew.run(**values).vector)
