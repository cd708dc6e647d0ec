"""Operation of a deployed run while it is running: waiting for sites, status, log, stop, exclude."""

import json
import socket
import stat
import tempfile
import threading
import time
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.running import call
from support.site_faults import SCAFFOLD, trained, with_patience
from support.sites import TINY, LoopPlace, Told, deployed

import unskew
from unskew.config.loader import experiment
from unskew.deployment.common.audit_log import AuditLog, read_events
from unskew.deployment.flower import cli as flower_cli
from unskew.deployment.flower.cli import SuperLink
from unskew.deployment.flower.subprocesses import ManagedProcess
from unskew.deployment.server import connection, joining, round_requests
from unskew.deployment.server.config import Deployment
from unskew.deployment.server.control import send_command, socket_path
from unskew.deployment.server.run import resume, run
from unskew.deployment.wire.frames import Frame
from unskew.errors import CheckpointError, ConfigError, EngineError
from unskew.filesystem import private_folder
from unskew.simulation.round_loop import RunInterrupted


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    monkeypatch.setattr(round_requests, "POLL", 0.01)
    monkeypatch.setattr(connection, "NODES", 0.0)
    monkeypatch.setattr(joining, "POLL", 0.01)
    monkeypatch.setattr(round_requests, "PAUSE", 0.001)


def failing(client, answers=None):
    """Flower fails to deliver hello to one site, a number of times or always."""
    left = [answers]

    def spoil(k, asked, answer):
        if k != client or asked.kind != "hello" or left[0] == 0:
            return answer
        left[0] = None if left[0] is None else left[0] - 1
        return Frame("failed", {"reason": "Flower's error 5: token expired"})

    return spoil


def test_waiting_reports_who_is_connected_who_is_missing_and_why(tmp_path, monkeypatch):
    monkeypatch.setattr(joining, "REPORT", 0.05)
    said, place = [], LoopPlace(tmp_path, TINY)
    place.link.away = {2}
    place.link.spoil = failing(1)
    with pytest.raises(EngineError) as stopped:
        run(experiment(TINY), Deployment(startup_timeout=0.5), tmp_path / "run", [Told()], said.append, place)
    text = str(stopped.value)
    assert "1 of 3 sites are connected after 0.5 s. Connected: site-0 (client 0). Missing clients: 1, 2." in text
    assert (
        "1 SuperNodes are connected, but their sites have not replied. Last failure: Flower's error 5: token expired."
        in text
    )
    assert any(line.startswith("1 of 3 sites after") and "token expired" in line for line in said)
    assert any("its site does not reply: Flower's error 5: token expired. Retrying" in line for line in said)


def test_a_site_whose_messages_fail_is_asked_with_growing_pauses_and_not_for_ever(tmp_path):
    place, times = LoopPlace(tmp_path, TINY), []
    spoil = failing(1)

    def noted(client, asked, answer):
        if client == 1:
            times.append(time.monotonic())
        return spoil(client, asked, answer)

    place.link.spoil = noted
    with pytest.raises(EngineError, match="2 of 3 sites"):
        run(experiment(TINY), Deployment(startup_timeout=1.8), tmp_path / "run", [Told()], [].append, place)
    assert len(times) == round_requests.FAILURES + 1
    waits = [b - a for a, b in pairwise(times)]
    assert all(wait >= 0.001 * 2**n for n, wait in enumerate(waits))
    assert round_requests.retry_delay(1000) == round_requests.LONGEST


def test_a_site_that_answers_after_failures_takes_part(tmp_path):
    place = LoopPlace(tmp_path, TINY)
    place.link.spoil = failing(1, 3)
    result, _ = deployed(tmp_path, place)
    assert [row["updates"] for row in result.history] == [3, 3]


class During:
    """A callback that runs something after some round, in the run's own thread."""

    def __init__(self, action, after=1):
        self.action, self.after = action, after

    def start(self, config, rounds_done):
        pass

    def round(self, row):
        if row["round"] == self.after:
            self.action()

    def end(self, summary):
        pass

    def warn(self, text):
        pass


def test_status_and_sites_of_a_running_run(tmp_path, capsys):
    (tmp_path / "sites" / "0").mkdir(parents=True)
    (tmp_path / "sites" / "0" / "node.pub").write_text("ecdsa-sha2-nistp384 AAAA")
    place, found = LoopPlace(tmp_path, {**TINY, **SCAFFOLD}), {}
    place.link.spoil = lambda k, asked, answer: (
        Frame("refused", {"reason": "no disk"}) if trained(asked) and k == 2 else answer
    )

    def look():
        path = socket_path(tmp_path / "run")
        found["modes"] = [stat.S_IMODE(one.stat().st_mode) for one in (path, path.parent)]
        found["json"] = call(capsys, "deploy", "status", tmp_path / "run", "--json").json()
        found["text"] = call(capsys, "deploy", "status", tmp_path / "run").out
        found["table"] = call(capsys, "deploy", "sites", tmp_path / "run").out
        place.link.away = {0}

    def look_again():
        found["away"] = call(capsys, "deploy", "status", tmp_path / "run").out
        place.link.away = set()

    run(experiment({**TINY, **SCAFFOLD}), with_patience(round_timeout=0.5, on_timeout="continue"), tmp_path / "run",
        [During(look), During(look_again, 2)], [].append, place)  # fmt: skip
    assert found["modes"] == [0o600, 0o700]
    assert (found["json"]["round"], found["json"]["phase"]) == (1, "train")
    assert all(row["connected"] for row in found["json"]["sites"])
    rows = {row["site"]: row for row in found["json"]["sites"]}
    assert [rows[f"site-{k}"]["updates_received"] for k in range(3)] == [1, 1, 1]
    assert [rows[f"site-{k}"]["faults"] for k in range(3)] == [0, 0, 1]
    assert rows["site-0"]["version"] == unskew.__version__
    assert rows["site-0"]["key"].startswith("SHA256:")
    assert rows["site-1"]["key"] == ""
    assert "connected     site-0 (client 0), site-1 (client 1), site-2 (client 2)" in found["text"]
    assert "no disk" in found["text"]
    assert unskew.__version__ in found["table"]
    assert "missing       site-0 (client 0), since" in found["away"]
    after = call(capsys, "deploy", "status", tmp_path / "run")
    assert after.code == 2
    assert "No deployed run is active in" in after.err
    assert not socket_path(tmp_path / "run").exists()


def test_no_file_of_a_folder_names_the_socket_of_another_run(tmp_path, capsys, monkeypatch):
    place, said = LoopPlace(tmp_path, TINY), []
    sent = tmp_path / "sent"
    sent.mkdir()

    def look():
        path = str(socket_path(tmp_path / "run"))
        for name in ("control.json", "deployment.json"):
            (sent / name).write_text(json.dumps({"socket": path, "run": "0123456789abcdef"}))
        said.append(call(capsys, "deploy", "stop", sent).err)

    run(experiment(TINY), Deployment(startup_timeout=0.5), tmp_path / "run", [During(look)], [].append, place)
    assert "No deployed run is active" in said[0]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == TINY["rounds"]


def test_the_folder_of_sockets_is_this_users_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    private = private_folder()
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    private.chmod(0o755)
    with pytest.raises(ConfigError, match="not a private folder"):
        socket_path(tmp_path / "run")
    private.rmdir()
    private.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="not a private folder"):
        socket_path(tmp_path / "run")
    private.unlink()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 25)))
    (tmp_path / ("long" * 25)).mkdir()
    with pytest.raises(ConfigError, match="shorter folder"):
        socket_path(tmp_path / "run")


def test_a_stopped_run_is_resumed_with_the_same_numbers(tmp_path, capsys):
    values = {**TINY, **SCAFFOLD}
    place = LoopPlace(tmp_path, values)

    def stop():
        assert "unskew resume" in call(capsys, "deploy", "stop", tmp_path / "run").out

    with pytest.raises(RunInterrupted):
        run(experiment(values), with_patience(), tmp_path / "run", [During(stop, 2)], [].append, place)
    with socket.socket(socket.AF_UNIX) as left:  # by a process that was killed
        left.bind(str(socket_path(tmp_path / "run")))
    result = resume(tmp_path / "run", [Told()], tell=[].append, location=place)
    assert torch.equal(result.vector, unskew.run(**values).vector)
    events = [event["event"] for event in read_events(tmp_path / "run" / "audit.jsonl", verify=True)[0]]
    assert [name for name in events if name in ("started", "stopped", "resumed", "finished")] == [
        *("started", "stopped", "resumed", "finished")
    ]


def test_a_round_that_waits_for_ever_can_be_given_up(tmp_path, capsys):
    place = LoopPlace(tmp_path, {**TINY, **SCAFFOLD})
    place.link.spoil = lambda k, asked, answer: (
        None if trained(asked) and k == 1 and asked.config["round"] == 1 else answer
    )
    threading.Thread(target=ask_after_a_round, args=(tmp_path / "run", "stop"), kwargs={"now": True}).start()
    with pytest.raises(RunInterrupted):
        run(experiment({**TINY, **SCAFFOLD}), with_patience(), tmp_path / "run", [Told()], [].append, place)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


def ask_after_a_round(folder, kind, **config):
    while not (folder / "metrics.jsonl").exists():
        time.sleep(0.02)
    send_command(folder, kind, **config)


@pytest.mark.parametrize("options", [{}, {"secure_aggregation": "required", "clients": 4}], ids=["single", "masked"])
def test_a_round_does_not_wait_for_a_site_that_is_excluded(options, tmp_path):
    values = {**TINY, **SCAFFOLD, **options}
    place = LoopPlace(tmp_path, values)
    place.link.spoil = lambda k, asked, answer: (
        None if trained(asked) and k == 1 and asked.config["round"] > 0 else answer
    )
    threading.Thread(target=ask_after_a_round, args=(tmp_path / "run", "exclude"), kwargs={"site": "1"}).start()
    result = run(experiment(values), with_patience(), tmp_path / "run", [Told()], [].append, place)
    rest = values["clients"] - 1
    assert [row["updates"] for row in result.history] == [rest + 1, rest, rest, rest]


def test_an_excluded_site_is_asked_no_longer_also_after_a_resume(tmp_path, capsys):
    values = {**TINY, **SCAFFOLD}
    place = LoopPlace(tmp_path, values)

    def exclude():
        assert call(capsys, "deploy", "exclude", tmp_path / "run", "nobody").code == 2
        assert "site-1 (client 1) is excluded." in call(capsys, "deploy", "exclude", tmp_path / "run", "site-1").out
        call(capsys, "deploy", "stop", tmp_path / "run")

    with pytest.raises(RunInterrupted):
        run(experiment(values), with_patience(), tmp_path / "run", [During(exclude, 2)], [].append, place)
    result = resume(tmp_path / "run", [Told()], tell=[].append, location=place)
    assert [row["updates"] for row in result.history] == [3, 3, 2, 2]
    assert not [f for k, f in place.link.sent if k == 1 and trained(f) and f.config["round"] > 1]


def test_the_audit_log_has_every_event_and_shows_changes(tmp_path, capsys):
    place = LoopPlace(tmp_path, TINY)
    result, _ = deployed(tmp_path, place)
    path = result.folder / "audit.jsonl"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(result.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((result.folder / "clients.jsonl").stat().st_mode) == 0o600
    events, _ = read_events(path, verify=True)
    names = [event["event"] for event in events]
    a_round = [*(["update accepted"] * 3), "round finished", "checkpoint"]
    assert names == ["joined"] * 3 + ["started", *a_round, *a_round, "finished"]
    assert [event["site"] for event in events[4:7]] == ["site-0", "site-1", "site-2"]
    assert [event["round"] for event in events] == [0] * 4 + [1] * 5 + [2] * 6
    assert all(len(event["digest"]) == 64 for event in events if "accepted" in event["event"])
    found = call(capsys, "deploy", "log", result.folder, "--verify")
    assert found.code == 0
    assert f"{len(events)} events, none changed" in found.out
    assert "update accepted" in call(capsys, "deploy", "log", result.folder).out
    lines = path.read_text().splitlines(keepends=True)
    for altered in (lines[:4] + lines[5:], [*lines[:4], lines[4].replace("site-0", "site-9"), *lines[5:]], lines[1:]):
        path.write_text("".join(altered))
        assert "was modified: line" in call(capsys, "deploy", "log", result.folder, "--verify").err


def test_files_of_processes_that_unskew_starts_are_their_owners_alone(tmp_path):
    """Such as Flower's database, which holds updates while they wait."""
    child = ManagedProcess("it", ["touch", str(tmp_path / "superlink.db")], tmp_path / "log")
    child.start()
    child.process.wait()
    assert stat.S_IMODE((tmp_path / "superlink.db").stat().st_mode) == 0o600


def test_a_line_that_was_cut_off_does_not_break_the_chain(tmp_path):
    log = AuditLog(tmp_path)
    log.add("joined", 0, site="a")
    log.close()
    with (tmp_path / "audit.jsonl").open("ab") as file:
        file.write(b'{"time": "2026')
    log = AuditLog(tmp_path)
    log.add("finished", 1)
    log.close()
    assert [e["event"] for e in read_events(tmp_path / "audit.jsonl", verify=True)[0]] == ["joined", "finished"]
    (tmp_path / "audit.jsonl").write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match="line 1"):
        read_events(tmp_path / "audit.jsonl")


def test_the_log_of_a_running_run_is_followed_until_it_ends(tmp_path, capsys, monkeypatch):
    log = AuditLog(tmp_path)
    log.add("started", 0)
    socket_path(tmp_path).touch()

    def later(seconds):
        log.add("finished", 1, digest="ab")
        socket_path(tmp_path).unlink()

    monkeypatch.setattr("unskew.cli.operate.time.sleep", later)
    lines = call(capsys, "deploy", "log", tmp_path, "--follow").out.splitlines()
    log.close()
    assert [line.split("  ")[1:] for line in lines] == [["round 0", "started"], ["round 1", "finished", "digest=ab"]]


def test_all_sites_are_registered_in_one_call_after_the_superlink_listens(tmp_path, capsys, monkeypatch):
    done = []
    monkeypatch.setattr(SuperLink, "wait", lambda self, seconds: done.append(("wait", self.address)))
    monkeypatch.setattr(SuperLink, "control", lambda self, *commands: done.append(commands))
    keys = [tmp_path / name for name in ("b.pub", "a.pub")]
    options = ("--superlink", "localhost:8001", "--folder", tmp_path)
    assert call(capsys, "deploy", "register", *keys, *options).code == 2
    assert done == []
    for key in keys:
        key.touch()
    assert call(capsys, "deploy", "register", *keys, *options).code == 0
    registered = tuple(["supernode", "register", str(key), "unskew"] for key in keys)
    assert done == [("wait", "localhost:8001"), registered]
    assert not (tmp_path / "home").exists()


def test_the_configuration_of_flowers_command_line_is_escaped_and_temporary(tmp_path, monkeypatch):
    seen = []

    def done(command, environment, seconds, what):
        home = Path(environment["FLWR_HOME"])
        seen.append((home, tomllib.loads((home / "config.toml").read_text()), command[1:4]))
        return ""

    monkeypatch.setattr(flower_cli, "run_to_completion", done)
    monkeypatch.setattr(flower_cli, "program_path", lambda name: f"/bin/{name}")
    address = 'host:1"\n[superlink.other]\naddress = "evil:1'
    SuperLink(address, tmp_path / 'a"b' / "ca.crt").control(["ls"])
    ((home, content, command),) = seen
    own = {"address": address, "root-certificates": str(tmp_path / 'a"b' / "ca.crt")}
    assert content == {"superlink": {"default": "unskew", "unskew": own}}
    assert command == ["-P", "-m", "unskew.deployment.flower.app.flwr_batch"]
    assert not home.exists()
