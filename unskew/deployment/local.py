"""A SuperLink and several sites on this machine: real processes, TLS and node keys, on loopback."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path

from unskew.config.experiment import Experiment
from unskew.deployment import flower, folder
from unskew.deployment.link import Link
from unskew.deployment.processes import Child, Family
from unskew.errors import EngineError

STARTING = 120.0
"""Seconds in which the SuperLink must listen."""


def cache() -> Path:
    """Where deployments on this machine keep keys and states: never in a run folder."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "unskew" / "local"


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Local:
    """A deployment on loopback; everything is stopped by its own process id.

    Args:
        run: The run's identity, after which its folder is called.
        sites: How many sites.
        config: The experiment.
        threads: Of each site's training.
    """

    def __init__(self, run: str, sites: int, config: Experiment, threads: int = 1):
        self.folder, self.sites, self.config, self.threads = cache() / run, sites, config, threads
        self.family = Family()
        self.app = self.folder / "app"
        self.superlink = flower.SuperLink("", self.folder / "ca" / "ca.crt", self.folder / "home")
        self.links: Child | None = None

    def start(self, link: Link) -> None:
        """Start everything, and the app on the SuperLink.

        Raises:
            EngineError: The SuperLink does not start.
        """
        flower.program("flower-superlink")
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.put_tools(self.folder)
        if not (self.folder / "superlink" / "server.key").exists():
            folder.make_certificates(self.folder, ["127.0.0.1", "localhost"])
        logs = self.folder / "logs"
        logs.mkdir(mode=0o700, exist_ok=True)
        port = free_port()
        address = f"127.0.0.1:{port}"
        self.superlink = flower.SuperLink(address, self.folder / "ca" / "ca.crt", self.folder / "home")
        self.superlink.configure()
        self.links = self.family.add(flower.superlink(self.folder, port, logs, self.folder / "home-superlink"))
        keys, nodes = [], []
        for client in range(self.sites):
            name, place = f"site-{client}", self.folder / "sites" / str(client)
            if not (place / "node.key").exists():
                folder.make_node_key(self.folder, place)
                keys.append(place / "node.pub")
            to = link.folder / f"{client}.sock"  # a path short enough for a socket
            folder.put(place / "experiment.yaml", self.config.to_yaml())
            folder.put(place / "site.yaml", folder.site_values(name, client, socket=str(to), threads=self.threads))
            command = [sys.executable, "-m", "unskew", "deploy", "site", str(place / "site.yaml")]
            self.family.add(Child(f"the process of {name}", command, logs / f"{name}.log", flower.QUIET))
            home = self.folder / f"home-{client}"
            key = place / "node.key"
            nodes.append(flower.supernode(name, address, self.superlink.ca, key, free_port(), to, logs, home))
        self.superlink.wait(STARTING, alive=lambda: self.links is not None and self.links.running())
        registering = [self.superlink.registering(key) for key in keys]
        self.superlink.control(*registering, self.superlink.running(self.app, link.path, link.token))
        for node in nodes:
            self.family.add(node)

    def why(self) -> str:
        """The last lines of logs of what does not run."""
        dead = [child for child in self.family.children if child.restarts]
        return "\n".join(f"{child.name} was started again {child.restarts} times:\n{child.last_words()}" for child in dead)

    def close(self) -> None:
        """Stop everything."""
        self.family.close()

    def forget(self) -> None:
        """Remove keys, states and logs: the run has ended."""
        shutil.rmtree(self.folder, ignore_errors=True)


class Given:
    """A SuperLink that runs already, on this machine.

    Args:
        folder: Of the deployment, as ``unskew deploy init`` wrote it.
        address: Host and port of the SuperLink.
    """

    def __init__(self, place: Path, address: str):
        self.folder, self.app = place, place / "app"
        self.superlink = flower.SuperLink(address, place / "ca" / "ca.crt", place / "home")

    def start(self, link: Link) -> None:
        """Start the app there.

        Raises:
            EngineError: It cannot be reached.
        """
        flower.program("flwr")
        for needed in (self.app / "pyproject.toml", self.superlink.ca):
            if not needed.is_file():
                raise EngineError(f"{needed} is missing; unskew deploy init and certificates.sh make it.")
        self.superlink.configure()
        self.superlink.wait(30.0)
        self.superlink.submit(self.app, link.path, link.token, 60.0)

    def why(self) -> str:
        """Nothing here runs of it."""
        return ""

    def close(self) -> None:
        """The SuperLink and the sites are not ours."""

    def forget(self) -> None:
        """Nothing of it is ours."""


Place = Local | Given
