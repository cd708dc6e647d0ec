"""Real processes on loopback: a SuperLink, SuperNodes with keys, TLS. Skipped where Flower's environment is not made."""

import re
import subprocess

import pytest
from support.flower_processes import FLOWER, command, environment, processes_of, real
from support.running import metrics
from support.sites import TINY

import unskew
from unskew.config.loader import experiment

pytestmark = real


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
