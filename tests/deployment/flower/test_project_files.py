"""Units and ``compose.yaml`` of a deployment's folder agree with each other, with ``site.yaml`` and with the instructions."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from support.service_files import UNITS, Unit, composed, installed

from unskew.deployment.site.config import SiteConfig


@pytest.fixture
def folder():
    with installed() as path:
        yield path


def test_units_and_containers_run_the_same_commands(folder):
    services = composed(folder)
    for name, file in UNITS.items():
        unit = Unit(folder / file)
        program, *options = unit.command
        assert program.startswith("/opt/unskew/bin/")
        assert unit.environment.get("PATH", "/opt/unskew/bin").startswith("/opt/unskew/bin")
        without = [word for word in options if word not in ("--isolation", "subprocess")]  # which is the default
        assert [program.rpartition("/")[2], *without] == services[name]["argv"]
        assert unit.settings["User"] == ["unskew"]
    assert {service["user"] for service in services.values()} == {"10001:10001"}
    assert "--uid 10001 unskew" in (folder / "Dockerfile").read_text()
    variables = dict(re.findall(r"(FLWR_\w+)=(\S+)", (folder / "Dockerfile").read_text()))
    assert variables.items() <= Unit(folder / UNITS["supernode"]).environment.items()


def test_all_paths_of_units_and_containers_exist(folder):
    """Else a unit does not start, and Docker creates a folder that belongs to root."""
    for file in UNITS.values():
        unit = Unit(folder / file)
        needed = unit.paths("WorkingDirectory", "ReadWritePaths", "ReadOnlyPaths", "InaccessiblePaths")
        needed += [f"{unit.folder}/{word}" for word in unit.command if re.fullmatch(r"[\w.-]+\.(crt|key)", word)]
        needed += [word for word in unit.command if word.startswith("/srv/") and word.endswith(".yaml")]
        for path in needed:
            assert Path(path.replace("/srv/unskew", str(folder))).exists(), f"{path} in {file}"
    for name, service in composed(folder).items():
        for here in service["mounts"].values():
            assert here.exists(), f"{here} in {name}"


def test_what_a_site_reads_and_writes_is_allowed(folder):
    site = SiteConfig.model_validate(yaml.safe_load((folder / "site" / "site.yaml").read_text()))
    unit, node = Unit(folder / UNITS["site"]), Unit(folder / UNITS["supernode"])
    assert {f"{unit.folder}/{path}" for path in (site.state, str(Path(site.socket).parent))} == set(
        unit.paths("ReadWritePaths")
    )
    socket = f'socket="{unit.folder}/{site.socket}"'
    assert node.command[-1] == composed(folder)["supernode"]["argv"][-1] == socket
    data = site.data.source.partition(":")[2]
    assert str(Path(data).parent) in unit.paths("ReadOnlyPaths")
    assert {f"{unit.folder}/{site.state}", str(Path(data).parent), f"{unit.folder}/{site.signing_key}"} == set(
        node.paths("InaccessiblePaths")
    )
    assert f"{unit.folder}/{site.key}" in unit.paths("InaccessiblePaths")
    inside = composed(folder)["site"]["mounts"]
    assert {
        data.rpartition("/")[0],
        *(f"{unit.folder}/{path}" for path in ("state", "run", "site.yaml")),
    } <= inside.keys()
    assert not any(path.endswith(".key") for path in inside)
    assert f"{unit.folder}/{site.key}" in composed(folder)["supernode"]["mounts"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_accepts_the_units(folder):
    for file in UNITS.values():
        program = folder / Path(Unit(folder / file).command[0]).name
        program.touch(0o755)
        text = (folder / file).read_text().replace("/opt/unskew/bin/flower", f"{folder}/flower")
        (folder / file).write_text(text.replace("/opt/unskew/bin/unskew", f"{folder}/unskew"))
    command = ["systemd-analyze", "verify", "--man=no", *(str(folder / file) for file in UNITS.values())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if ".service" in line] == []
