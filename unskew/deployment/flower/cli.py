"""Flower's programs: find them, start them, and run commands of Flower's command line."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from unskew.deployment.flower.subprocesses import ManagedProcess, run_to_completion
from unskew.errors import ConfigError, EngineError

VERSIONS = ">=1.41,<1.44"
"""Supported versions of Flower. All machines of a deployment need the same minor version."""
CONNECTION = "unskew"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
    "OMP_NUM_THREADS": "1",
}
"""Environment that turns off telemetry and update checks and makes Flower poll for messages ten times per second."""


def program_path(name: str) -> str:
    """Return the path of one of Flower's programs.

    Args:
        name: Name of the program, such as ``flower-superlink``.

    Raises:
        ConfigError: If Flower is not installed.
    """
    beside = Path(sys.executable).parent / name
    executable = str(beside) if beside.is_file() else shutil.which(name)
    if executable is None:
        raise ConfigError(
            f"{name} is not installed here: a deployment needs Flower {VERSIONS}. Install it into a separate environment "
            "with pip install --constraint constraints-deploy.txt 'unskew[flower,hub]', and run unskew from there."
        )
    return executable


@dataclass(frozen=True)
class SuperLink:
    """A SuperLink as its clients see it.

    Attributes:
        address: Host and port.
        ca: Certificate of the CA that signed the SuperLink's certificate.
    """

    address: str
    ca: Path

    @property
    def configuration(self) -> str:
        """Configuration of Flower's command line, in TOML; JSON escapes are valid there."""
        address, ca = (json.dumps(value, ensure_ascii=False) for value in (self.address, str(self.ca.resolve())))
        return (
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = {address}\n'
            f"root-certificates = {ca}\n"
        )

    def control(self, *commands: Sequence[str]) -> str:
        """Run commands of Flower's command line in one process, because it takes seconds to start.

        Its configuration is in a temporary folder: nothing is written to the folder of the deployment.

        Args:
            *commands: Arguments of each command.

        Returns:
            The standard output.

        Raises:
            EngineError: If a command fails.
        """
        if not commands:
            return ""
        # -P: modules of the working directory, which may come from others, are not imported.
        python = Path(program_path("flwr")).parent / "python"  # of the environment in which Flower is installed
        command = [str(python), "-P", "-m", "unskew.deployment.flower.app.flwr_batch", json.dumps(commands)]
        with tempfile.TemporaryDirectory(prefix="unskew-") as home:
            Path(home, "config.toml").write_text(self.configuration, encoding="utf-8")
            environment = {**QUIET, "FLWR_HOME": home}
            return run_to_completion(command, environment, 60.0 + 30.0 * len(commands), "Flower's command line")

    def registering(self, public_key: Path) -> list[str]:
        """Return the command that registers a site's public key."""
        return ["supernode", "register", str(public_key), CONNECTION]

    def running(self, app: Path, socket: Path) -> list[str]:
        """Return the command that starts the app.

        Args:
            app: Folder of the Flower app.
            socket: Socket of the run's process.
        """
        return ["run", str(app), CONNECTION, "--run-config", f'socket="{socket}"', "--format", "json"]

    def submit(self, app: Path, socket: Path, patience: float) -> None:
        """Start the app; retry while the SuperLink is starting.

        Args:
            app: Folder of the Flower app.
            socket: Socket of the run's process.
            patience: Seconds for which to retry.

        Raises:
            EngineError: If the app cannot be started in time.
        """
        end = time.monotonic() + patience
        while True:
            try:
                self.control(self.running(app, socket))
                return
            except EngineError:
                if time.monotonic() > end:
                    raise
                time.sleep(1.0)

    def wait(self, seconds: float, alive: Callable[[], bool] = lambda: True) -> None:
        """Wait until the SuperLink is listening.

        Args:
            seconds: Time limit.
            alive: Returns whether the process of the SuperLink is running.

        Raises:
            EngineError: If the SuperLink does not listen in time.
        """
        host, _, port = self.address.rpartition(":")
        end = time.monotonic() + seconds
        while True:
            try:
                socket.create_connection((host, int(port)), 1.0).close()
                return
            except OSError as error:
                if time.monotonic() > end or not alive():
                    raise EngineError(f"The SuperLink is not listening at {self.address}: {error}.") from error
                time.sleep(0.1)


def start_superlink(folder: Path, port: int, logs: Path, home: Path) -> ManagedProcess:
    """Create the process of a SuperLink on loopback, with the certificates of ``folder``.

    Args:
        folder: Folder of the deployment.
        port: Port to listen on.
        logs: Folder of the logs.
        home: Home folder of the process.
    """
    keys = folder / "superlink"
    command = [
        *(program_path("flower-superlink"), "--host", "127.0.0.1", "--port", str(port)),
        *("--ssl-ca-certfile", str(keys / "ca.crt"), "--ssl-certfile", str(keys / "server.crt")),
        *("--ssl-keyfile", str(keys / "server.key"), "--enable-supernode-auth"),
        *("--disable-runtime-dependency-installation", "--database", str(keys / "superlink.db")),
    ]
    return ManagedProcess("the SuperLink", command, logs / "superlink.log", {**QUIET, **_home(home)})


def start_supernode(
    name: str, superlink: SuperLink, key: Path, port: int, to: Path, logs: Path, home: Path
) -> ManagedProcess:
    """Create the process of a SuperNode that forwards messages to a site's process at the socket ``to``.

    Args:
        name: Name of the site.
        superlink: SuperLink to connect to.
        key: Private key of the site.
        port: Port of the SuperNode.
        to: Socket of the site's process.
        logs: Folder of the logs.
        home: Home folder of the process.
    """
    command = [
        *(program_path("flower-supernode"), "--superlink", superlink.address, "--root-certificates", str(superlink.ca)),
        *("--auth-supernode-private-key", str(key), "--host", "127.0.0.1", "--port", str(port)),
        *("--node-config", f'socket="{to}"'),
    ]
    return ManagedProcess(f"the SuperNode of {name}", command, logs / f"{name}-supernode.log", {**QUIET, **_home(home)})


def _home(home: Path) -> dict[str, str]:
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = str(Path(program_path("flower-superexec")).parent)
    return {"FLWR_HOME": str(home), "PATH": f"{beside}{os.pathsep}{os.environ.get('PATH', '')}"}
