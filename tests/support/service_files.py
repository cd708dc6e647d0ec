"""Units and ``compose.yaml`` as ``unskew deploy init`` writes them, read by rules of systemd and of Compose."""

import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from support.sites import TINY
from unskew.config.loader import experiment
from unskew.deployment.flower.project_files import init_project, make_certificates, make_node_key

ONE = {**TINY, "clients": 1, "partition": "iid", "method": "scaffold"}

UNITS = {
    "superlink": "superlink/flower-superlink.service",
    "supernode": "site/flower-supernode.service",
    "site": "site/unskew-site.service",
}
"""Unit that does what a service of ``compose.yaml`` does, in the folder of a deployment."""


class Unit:
    """The section ``Service``: the command line and, by name, the words of all lines of a setting."""

    def __init__(self, path: Path):
        text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
        self.settings: dict[str, list[str]] = {}
        for line in text.partition("[Service]")[2].partition("[Install]")[0].split("\n"):
            name, equals, value = line.partition("=")
            if equals:
                self.settings.setdefault(name, []).extend(shlex.split(value))
        self.command = self.settings["ExecStart"]
        self.environment = dict(word.split("=", 1) for word in self.settings.get("Environment", []))
        (self.folder,) = self.settings["WorkingDirectory"]

    def paths(self, *names: str) -> list[str]:
        """The paths of settings, without the sign of those that may be missing."""
        return [path.removeprefix("-") for name in names for path in self.settings.get(name, [])]


def composed(folder: Path) -> dict[str, dict]:
    """The services of ``compose.yaml``; ``argv`` is the command, and ``mounts`` the path here of each path inside."""
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    for service in services.values():
        argv = shlex.split(service["command"])
        if argv[:2] == ["sh", "-c"]:
            argv = shlex.split(argv[2].partition("exec ")[2])
        mounts = [volume.split(":") for volume in service["volumes"]]
        service |= {"argv": argv, "mounts": {inside: folder / here for here, inside, *_ in mounts}}
    return services


@contextmanager
def installed() -> Iterator[Path]:
    """A deployment's folder at one machine, as the instructions say: keys, and the folders that the units write to."""
    with tempfile.TemporaryDirectory(prefix="u") as short:  # the path of a socket is a short one
        path = Path(short) / "unskew"
        init_project(path, experiment(ONE))
        make_certificates(path, ["localhost", "127.0.0.1"])
        make_node_key(path, path / "site")
        shutil.copy(path / "ca" / "ca.crt", path / "site" / "ca.crt")
        shutil.copy(path / "experiment.yaml", path / "site" / "experiment.yaml")
        instructions = (path / "site" / "ADMINISTRATOR.md").read_text()
        (made,) = re.findall(r"`mkdir -p ([^`]+)`", instructions)
        for name in (*made.split(), "/srv/unskew/data", "/srv/unskew/keys", "/srv/unskew/runs"):
            Path(name.replace("/srv/unskew", str(path))).mkdir(parents=True, exist_ok=True)
        (path / "site" / "data").mkdir()  # Compose looks for the data there
        yield path
