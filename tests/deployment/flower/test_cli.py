"""Slow ones with real processes: what is refused at the door, and sums that are masked with Flower's cryptography."""

import os
import signal
import subprocess
import time

import pytest
import torch
from safetensors.torch import load_file
from support.flower_processes import command, processes_of, real
from support.running import metrics
from support.sites import TINY

import unskew
from unskew.config.loader import experiment
from unskew.deployment.flower import cli as flower_cli
from unskew.deployment.flower import project_files
from unskew.deployment.flower.superlinks import LocalSuperLink, free_port

pytestmark = [pytest.mark.slow, *real]


@pytest.fixture
def place(flower_is_found, tmp_path):
    local = LocalSuperLink(tmp_path / "door", 0, [])
    local.start()
    yield local
    local.close()


def supernode(place, tmp_path, *instead, key="known"):
    """Return a SuperNode's exit code, None if it is admitted, and its output."""
    certificate = ["--root-certificates", str(place.superlink.ca)] if not instead else list(instead)
    keys = tmp_path / key
    if not keys.exists():
        project_files.make_node_key(place.folder, keys)
    command = [
        *(flower_cli.program_path("flower-supernode"), "--superlink", place.superlink.address, *certificate),
        *("--auth-supernode-private-key", str(keys / "node.key"), "--host", "127.0.0.1", "--port", str(free_port())),
        *("--max-retries", "1"),
    ]
    log = tmp_path / "node.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **flower_cli.QUIET}, start_new_session=True
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
    project_files.make_node_key(place.folder, tmp_path / "known")
    place.superlink.control(place.superlink.registering(tmp_path / "known" / "node.pub"))
    code, text = supernode(place, tmp_path)
    assert code is None, text
    assert "SuperNode ID" in text


def test_foreign_certificates_and_plain_connections_are_refused(place, tmp_path):
    project_files.make_node_key(place.folder, tmp_path / "known")
    place.superlink.control(place.superlink.registering(tmp_path / "known" / "node.pub"))
    project_files.write_scripts(tmp_path / "foreign")
    project_files.make_certificates(tmp_path / "foreign", ["127.0.0.1"])
    foreign = tmp_path / "foreign" / "ca" / "ca.crt"
    for instead in (["--root-certificates", str(foreign)], ["--insecure"]):
        _, text = supernode(place, tmp_path, *instead)
        assert "SuperNode ID" not in text, text


def test_a_certificate_that_has_expired_is_refused(flower_is_found, tmp_path):
    late = LocalSuperLink(tmp_path / "late", 0, [])
    late.folder.mkdir(parents=True)
    project_files.write_scripts(late.folder)
    subprocess.run(
        ["sh", str(late.folder / "certificates.sh"), "127.0.0.1"], check=True, env={**os.environ, "DAYS": "-1"}
    )
    late.superlink = flower_cli.SuperLink(f"127.0.0.1:{free_port()}", late.superlink.ca)
    port = int(late.superlink.address.rpartition(":")[2])
    late.logs.mkdir()
    try:
        late.family.add(flower_cli.start_superlink(late.folder, port, late.logs, late.folder / "home-superlink"))
        late.superlink.wait(60)
        _, text = supernode(late, tmp_path)
        assert "SuperNode ID" not in text, text
    finally:
        late.close()


def test_masked_sums_over_three_sites(tmp_path):
    """With Flower's keys, shares and sealed messages the sum is that of the simulator, but for rounding."""
    values = {**TINY, "method": "scaffold", "secure_aggregation": "required", "eval_clients": 0}
    (tmp_path / "experiment.yaml").write_text(experiment(values).to_yaml())
    done = command(tmp_path, "deploy", "run", tmp_path / "experiment.yaml", "--local", 3, "--out", tmp_path / "sites")
    assert done.returncode == 0, done.stderr
    unskew.run(out=tmp_path / "simulated", **values)
    mine, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("sites", "simulated"))
    for name, tensor in theirs.items():
        assert torch.allclose(mine[name], tensor, atol=1e-6)
    assert all(0 < row["masking_error"] < 1e-7 and row["updates"] == 3 for row in metrics(tmp_path / "sites"))
    assert processes_of(tmp_path) == []
