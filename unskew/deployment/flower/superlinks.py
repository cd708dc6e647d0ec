"""SuperLink and sites of a run: on this machine for a rehearsal with real processes, or already running elsewhere."""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unskew.config.experiment import Experiment
from unskew.deployment.flower import cli as flower_cli
from unskew.deployment.flower import project_files
from unskew.deployment.flower.grid_bridge import GridBridge
from unskew.deployment.flower.subprocesses import ManagedProcess, ProcessGroup
from unskew.deployment.secagg.roster import FILE, read_roster
from unskew.errors import EngineError
from unskew.filesystem import user_cache

STARTING = 120.0
"""Seconds in which the SuperLink must listen."""


def deployment_cache() -> Path:
    """Return the folder with keys and states of deployments on this machine, which is never a run folder."""
    return user_cache() / "local"


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RemoteSuperLink:
    """A SuperLink that runs already, on this machine.

    Args:
        place: Folder of the deployment, as ``unskew deploy init`` wrote it.
        address: Host and port of the SuperLink.
    """

    def __init__(self, place: Path, address: str):
        self.folder, self.app = place, place / "app"
        self.superlink = flower_cli.SuperLink(address, place / "ca" / "ca.crt", place / "home")
        self.link: GridBridge | None = None

    def open(self, largest: int, seconds: float) -> GridBridge:
        """Start the app there, which connects to the link that is given back.

        Args:
            largest: Bytes of a message that are taken at most.
            seconds: In which it must.

        Raises:
            EngineError: The SuperLink cannot be reached.
        """
        self.link = GridBridge(largest)
        self.begin()
        self.link.connect(seconds)
        return self.link

    def begin(self) -> None:
        """Look whether everything is there, and start the app."""
        self.start()
        self.submit(60.0)

    def reopen(self, seconds: float) -> None:
        """Bring the app back to a SuperLink that was gone.

        Raises:
            EngineError: The SuperLink does not come back.
        """
        assert self.link is not None, "it was never opened"
        self.link.disconnect()
        self.superlink.wait(seconds)
        self.submit(seconds)
        self.link.connect(seconds)

    def roster(self) -> dict[int, Any]:
        """Return the public signing keys of the clients; empty if the deployment's folder has no roster."""
        path = self.folder / FILE
        return read_roster(path) if path.is_file() else {}

    def start(self) -> None:
        """Look whether everything is there.

        Raises:
            EngineError: Something is not.
        """
        for needed in (self.app / "pyproject.toml", self.superlink.ca):
            if not needed.is_file():
                raise EngineError(f"{needed} is missing; unskew deploy init and certificates.sh make it.")
        self.superlink.configure()
        self.superlink.wait(30.0)

    def submit(self, patience: float) -> None:
        """Start the app on the SuperLink."""
        assert self.link is not None, "it was never opened"
        self.superlink.submit(self.app, self.link.path, self.link.token, patience)

    def why(self) -> str:
        """Return the log excerpts of our processes that are not running."""
        return ""

    def close(self) -> None:
        """End the app; the SuperLink and the sites go on."""
        if self.link is not None:
            self.link.close()

    def forget(self) -> None:
        """The run has ended: remove what was only for it."""


class LocalSuperLink(RemoteSuperLink):
    """A SuperLink and sites on loopback, with TLS and node keys; each process is stopped by its own id.

    Args:
        run: What its folder is called.
        sites: How many sites.
        experiments: What the sites agree to.
    """

    def __init__(self, run: str, sites: int, experiments: Sequence[Experiment]):
        super().__init__(deployment_cache() / run, "")
        self.sites, self.experiments = sites, experiments
        self.family = ProcessGroup()
        self.sockets = Path(tempfile.mkdtemp(prefix="unskew-"))  # a path in it is short enough for a socket
        self.logs = self.folder / "logs"
        self.main: ManagedProcess | None = None

    def begin(self) -> None:
        """Start what does not run yet, and the app; Flower's command line takes seconds to start, so that is done once."""
        assert self.link is not None, "it was never opened"
        if self.main is not None:
            self.submit(60.0)
        else:
            self.start(self.superlink.running(self.app, self.link.path, self.link.token))

    def start(self, *further: Sequence[str]) -> None:
        """Start the SuperLink and the sites, and let them in.

        Args:
            further: What Flower's command line is asked for when they are let in.

        Raises:
            EngineError: The SuperLink does not start.
        """
        if self.main is not None:
            return
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        project_files.write_scripts(self.folder)
        if not (self.folder / "superlink" / "server.key").exists():
            project_files.make_certificates(self.folder, ["127.0.0.1", "localhost"])
        self.logs.mkdir(mode=0o700, exist_ok=True)
        port = free_port()
        self.superlink = flower_cli.SuperLink(f"127.0.0.1:{port}", self.superlink.ca, self.superlink.home)
        self.superlink.configure()
        main = self.main = self.family.add(
            flower_cli.start_superlink(self.folder, port, self.logs, self.folder / "home-superlink")
        )
        new = [key for key in map(self._make_keys, range(self.sites)) if key is not None]
        signing = [(self._site(client) / "signing.pub").read_text().strip() for client in range(self.sites)]
        roster = "".join(f"{client} {key}\n" for client, key in enumerate(signing))
        for folder in (self.folder, *map(self._site, range(self.sites))):
            project_files.write_file(folder / FILE, roster)
        for client in range(self.sites):
            self._start_site(client)
        self.superlink.wait(STARTING, main.running)
        self.superlink.control(*map(self.superlink.registering, new), *further)
        for client in range(self.sites):
            self.family.add(self._supernode(client))

    def _site(self, client: int) -> Path:
        return self.folder / "sites" / str(client)

    def _make_keys(self, client: int) -> Path | None:
        """Make a site's keys if there are none; returns the public key of its node then."""
        folder = self._site(client)
        if (folder / "node.key").exists():
            return None
        project_files.make_node_key(self.folder, folder)
        return folder / "node.pub"

    def _start_site(self, client: int) -> None:
        """Start a site's own process."""
        name, folder = f"site-{client}", self._site(client)
        shutil.rmtree(folder / "experiments", ignore_errors=True)
        for number, config in enumerate(self.experiments):
            project_files.write_file(folder / "experiments" / f"{number}.yaml", config.to_yaml())
        socket_of = str(self.sockets / f"{client}.sock")
        values = {"experiments": "experiments", "socket": socket_of}
        project_files.write_file(folder / "site.yaml", project_files.site_yaml_values(name, client, **values))
        command = [sys.executable, "-m", "unskew", "deploy", "site", str(folder / "site.yaml")]
        self.family.add(ManagedProcess(f"the process of {name}", command, self.logs / f"{name}.log", flower_cli.QUIET))

    def _supernode(self, client: int) -> ManagedProcess:
        return flower_cli.start_supernode(
            f"site-{client}",
            self.superlink,
            self._site(client) / "node.key",
            free_port(),
            self.sockets / f"{client}.sock",
            self.logs,
            self.folder / f"home-{client}",
        )

    def why(self) -> str:
        """Return the log excerpts of processes that were restarted."""
        dead = [child for child in self.family.children if child.restarts]
        return "\n".join(
            f"{child.name} was started again {child.restarts} times:\n{child.last_words()}" for child in dead
        )

    def close(self) -> None:
        """Stop everything."""
        super().close()
        self.family.close()
        shutil.rmtree(self.sockets, ignore_errors=True)

    def forget(self) -> None:
        """Remove keys, states and logs."""
        shutil.rmtree(self.folder, ignore_errors=True)
