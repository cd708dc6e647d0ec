"""Real processes on loopback: a SuperLink, SuperNodes with keys, TLS. Skipped where Flower's environment is not made."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from support.pages import ROOT
from support.running import metrics
from support.sites import TINY

import unskew
from unskew.config.loader import experiment

FLOWER = ROOT / ".venv-deploy" / "bin"
real = [
    pytest.mark.skipif(
        not (FLOWER.parent / "installed").exists(),
        reason="Flower has an environment of its own: make .venv-deploy/installed",
    ),
    pytest.mark.xdist_group("flower"),
]
pytestmark = real


def environment(tmp_path, **more):
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
    return {**kept, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", **more}


def command(tmp_path, *arguments, seconds=600, **more):
    return subprocess.run(
        [str(FLOWER / "unskew"), *map(str, arguments)],
        capture_output=True, text=True, timeout=seconds, env=environment(tmp_path, **more), check=False,
    )  # fmt: skip


def processes_of(tmp_path):
    """Processes that belong to a test: their command lines name its folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            line = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(tmp_path) in line and int(place.name) != os.getpid():
            found.append(line)
    return found


@pytest.mark.slow
def test_a_wrong_socket_is_reported_at_once(tmp_path):
    code = "import sys, time; from unskew.deployment.flower.app.client_app import exchange; "
    code += "from unskew.deployment.wire.frames import EncodedFrame, Frame; t = time.monotonic(); "
    code += "print(exchange(sys.argv[1], EncodedFrame.of(Frame('hello'))).decode()); assert time.monotonic() - t < 60"
    done = subprocess.run(
        [str(FLOWER / "python"), "-c", code, str(tmp_path / "run" / "site.sock")],
        capture_output=True, text=True, env=environment(tmp_path), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "kind='failed'" in done.stdout
    assert f"There is no socket at {tmp_path}/run/site.sock" in done.stdout


def test_two_sites_over_tls_give_the_numbers_of_the_simulator(tmp_path):
    """SCAFFOLD keeps state at the sites; every process is ended, and no key is left in the run folder."""
    values = {**TINY, "clients": 2, "method": "fedprox+scaffold", "eval_clients": 0}
    (tmp_path / "experiment.yaml").write_text(experiment(values).to_yaml())
    done = command(
        tmp_path, "deploy", "run", tmp_path / "experiment.yaml", "--local", 2, "--out", tmp_path / "sites", "--json"
    )
    assert done.returncode == 0, done.stderr
    unskew.run(out=tmp_path / "simulated", **values)
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("sites", "simulated"))
    assert one == other
    rows = metrics(tmp_path / "sites")  # on a busy machine Flower may have lost a message, which was sent again
    mine = [{name: value for name, value in row.items() if not name.startswith("sites_")} for row in rows]
    assert mine == metrics(tmp_path / "simulated")
    assert processes_of(tmp_path) == []
    assert not list((tmp_path / "cache").rglob("*.key"))
    for path in (tmp_path / "sites").rglob("*"):
        if path.is_file() and path.suffix in (".yaml", ".json", ".jsonl"):
            assert not re.search("PRIVATE KEY", path.read_text()), path
