"""SuperLink and sites of a run: on this machine for a rehearsal with real processes, or already running elsewhere."""

from __future__ import annotations

import hashlib
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unskew.config.experiment import Experiment
from unskew.deployment.common.agreement import parse_address
from unskew.deployment.flower import cli as flower_cli
from unskew.deployment.flower import project_files
from unskew.deployment.flower.grid_bridge import GridBridge
from unskew.deployment.flower.subprocesses import ManagedProcess, ProcessGroup
from unskew.deployment.secagg.roster import FILE, read_roster
from unskew.errors import ConfigError, EngineError
from unskew.filesystem import user_cache
from unskew.sums.registry import PERMISSIONS

STARTING = 120.0
"""Seconds within which the SuperLink must be listening."""


def rehearsal_folder(run_folder: Path) -> Path:
    """Return the folder with keys and states of a run on this machine; its name follows from the path of the run folder.

    Args:
        run_folder: Run folder.
    """
    return user_cache() / "local" / hashlib.sha256(bytes(run_folder.resolve())).hexdigest()[:32]


def free_port() -> int:
    """Return a port that is currently unused."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RemoteSuperLink:
    """SuperLink that is already running on this machine.

    Args:
        folder: Folder of the deployment, as ``unskew deploy init`` wrote it.
        address: Host and port of the SuperLink.
    """

    def __init__(self, folder: Path, address: str):
        self.folder = folder
        self.superlink = flower_cli.SuperLink(address, folder / "ca" / "ca.crt")
        self.link: GridBridge | None = None

    def open(self, largest: int, seconds: float) -> GridBridge:
        """Start the app on the SuperLink and wait until it connects to the returned bridge.

        Args:
            largest: Largest accepted message, in bytes.
            seconds: Seconds within which the app must connect.

        Raises:
            EngineError: If the SuperLink cannot be reached.
        """
        self.link = GridBridge(largest)
        self.begin()
        self.link.connect(seconds)
        return self.link

    def begin(self) -> None:
        """Check the requirements and start the app."""
        self.start()
        self.submit(60.0)

    def reopen(self, seconds: float) -> None:
        """Start the app again after a failure of the SuperLink.

        Args:
            seconds: Longest time to wait for the app, in seconds.

        Raises:
            EngineError: If the SuperLink does not come back in time.
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
        """Check that all required files exist and the SuperLink is listening.

        Raises:
            EngineError: If the certificate is missing, or the SuperLink is not listening.
        """
        if not self.superlink.ca.is_file():
            raise EngineError(f"{self.superlink.ca} is missing; create it with unskew deploy init and certificates.sh.")
        self.superlink.wait(30.0)

    def submit(self, patience: float) -> None:
        """Start the app on the SuperLink."""
        assert self.link is not None, "it was never opened"
        self.superlink.submit(self.app(), self.link.path, patience)

    def app(self) -> Path:
        """Write the Flower app to the private folder of the link, and return its folder.

        Flower executes the app, so it never comes from the folder of the deployment.
        """
        assert self.link is not None, "it was never opened"
        return project_files.write_app(self.link.folder)

    def why(self) -> str:
        """Return log excerpts of local processes that failed; none here."""
        return ""

    def close(self) -> None:
        """End the app; the SuperLink and the sites continue to run."""
        if self.link is not None:
            self.link.close()

    def forget(self) -> None:
        """Remove files that only this run needed; call this after the run has finished."""


class LocalSuperLink(RemoteSuperLink):
    """SuperLink and sites on loopback, with TLS and node keys; each process is stopped by its id.

    Args:
        run_folder: Run folder, whose path names the folder of keys and states.
        sites: Number of sites.
        experiments: Experiments that the sites agree to.
    """

    def __init__(self, run_folder: Path, sites: int, experiments: Sequence[Experiment]):
        super().__init__(rehearsal_folder(run_folder), "")
        self.sites, self.experiments = sites, experiments
        self.family = ProcessGroup()
        self.sockets = Path(tempfile.mkdtemp(prefix="unskew-"))  # the path of a socket must be short
        self.logs = self.folder / "logs"
        self.main: ManagedProcess | None = None

    def begin(self) -> None:
        """Start missing processes and the app, with one call of Flower's command line, which takes seconds to start."""
        assert self.link is not None, "it was never opened"
        if self.main is not None:
            self.submit(60.0)
        else:
            self.start(self.superlink.running(self.app(), self.link.path))

    def start(self, *further: Sequence[str]) -> None:
        """Start the SuperLink and the sites, and register the sites.

        Args:
            *further: Arguments of further commands of Flower's command line to run after the registration.

        Raises:
            EngineError: If the SuperLink does not start.
        """
        if self.main is not None:
            return
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        project_files.write_scripts(self.folder)
        if not (self.folder / "superlink" / "server.key").exists():
            project_files.make_certificates(self.folder, ["127.0.0.1", "localhost"])
        self.logs.mkdir(mode=0o700, exist_ok=True)
        port = free_port()
        self.superlink = flower_cli.SuperLink(f"127.0.0.1:{port}", self.superlink.ca)
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
        """Create a site's keys if they are missing, and return the public node key then."""
        folder = self._site(client)
        if (folder / "node.key").exists():
            return None
        project_files.make_node_key(self.folder, folder)
        return folder / "node.pub"

    def _start_site(self, client: int) -> None:
        """Start a site's process."""
        name, folder = f"site-{client}", self._site(client)
        shutil.rmtree(folder / "experiments", ignore_errors=True)
        for number, config in enumerate(self.experiments):
            project_files.write_file(folder / "experiments" / f"{number}.yaml", config.to_yaml())
        socket_of = str(self.sockets / f"{client}.sock")
        # The server has the data of these sites itself, so that they send every statistic as it is.
        statistics = {"allow": [*PERMISSIONS], "min_count": 1}
        values = {"experiments": "experiments", "socket": socket_of, "statistics": statistics}
        project_files.write_file(folder / "site.yaml", project_files.site_yaml_values(name, client, **values))
        command = [sys.executable, "-P", "-m", "unskew", "deploy", "site", str(folder / "site.yaml")]
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
        return "\n".join(f"{child.name} was restarted {child.restarts} times:\n{child.last_words()}" for child in dead)

    def close(self) -> None:
        """End the app and stop all processes."""
        super().close()
        self.family.close()
        shutil.rmtree(self.sockets, ignore_errors=True)

    def forget(self) -> None:
        """Remove keys, states and logs."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class RunLocation:
    """Sites and SuperLink of a deployed run, as named on the command line.

    Attributes:
        local: Number of sites to start on this machine; None uses an existing SuperLink.
        folder: Folder of the deployment, or None.
        address: Address of the SuperLink, or None.
    """

    local: int | None = None
    folder: Path | None = None
    address: str | None = None

    def check(self, remedy: str = "") -> None:
        """Validate that the sites are named completely.

        Args:
            remedy: Further advice for the error.

        Raises:
            ConfigError: If it names neither local sites nor the folder and the address of a SuperLink, or both.
        """
        remote = self.folder is not None and self.address is not None
        if (self.local is None) != remote or (self.local is not None and (self.folder or self.address)):
            raise ConfigError(
                f"No sites given: use --local N to start N sites here, or --folder FOLDER with --superlink HOST:PORT.{remedy}"
            )
        if self.address is not None:
            try:
                parse_address(self.address)
            except ValueError as error:
                raise ConfigError(f"--superlink {self.address} is not an address: {error}.") from error

    @property
    def options(self) -> list[str]:
        """Options of the command line that name these sites."""
        if self.local is not None:
            return ["--local", str(self.local)]
        return ["--folder", str(self.folder), "--superlink", str(self.address)]

    def superlink(self, run_folder: Path, config: Experiment, again: bool) -> RemoteSuperLink:
        """Return the SuperLink and sites of a run.

        Args:
            run_folder: Run folder.
            config: Configuration of the run.
            again: Whether the run is resumed, with the keys and states of its sites.
        """
        if self.folder is not None and self.address is not None:
            return RemoteSuperLink(self.folder.absolute(), self.address)
        assert self.local is not None, "it was not checked"
        link = LocalSuperLink(run_folder, self.local, [config])
        if not again:
            link.forget()  # an earlier run may have been in a folder of this path
        return link
