"""Control socket of a running deployed run: a Unix socket for the commands ``status``, ``stop`` and ``exclude``.

Its path follows from the path of the run folder. No file in the folder names it, because a folder that comes from others
could then name the socket of another run.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from unskew.deployment.common.agreement import LONGEST_SOCKET
from unskew.deployment.server.sites import SiteManager
from unskew.deployment.wire.frames import Frame, FrameError, receive, send
from unskew.errors import ConfigError
from unskew.filesystem import private_folder

LARGEST = 1 << 20
SECONDS = 10.0
"""Timeout in seconds for each end of the connection."""


def socket_path(folder: Path) -> Path:
    """Return the path of the control socket of the run in ``folder``; it exists while the run is running.

    Args:
        folder: Run folder.

    Raises:
        ConfigError: If the folder of the sockets is not a private folder of this user, or its path is too long.
    """
    path = private_folder() / f"{hashlib.sha256(bytes(folder.resolve())).hexdigest()[:32]}.sock"
    if len(str(path)) > LONGEST_SOCKET:
        raise ConfigError(f"{path} is longer than {LONGEST_SOCKET} characters. Set TMPDIR to a shorter folder.")
    return path


class ControlSocket:
    """Executes the operator's commands in a thread while the run is training.

    Args:
        folder: The run folder.
        sites: The sites of the run.
        save_excluded: Stores the excluded clients, so that a resumed run also excludes them.
    """

    def __init__(self, folder: Path, sites: SiteManager, save_excluded: Callable[[set[int]], None]):
        self.path = socket_path(folder)
        self.sites = sites
        self.save_excluded = save_excluded
        self.path.unlink(missing_ok=True)  # of a killed process: the folder is locked, so no other one is listening
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self.path.chmod(0o600)
        self._listener.listen(4)
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Stop the thread and remove the socket."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()
        self.path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with connection, suppress(Exception):  # whatever a message causes, the thread must reply to the next one
                connection.settimeout(SECONDS)
                send(connection, self.answer(receive(connection, LARGEST, SECONDS)))

    def answer(self, request: Frame) -> Frame:
        """Execute one command; if it fails, reply with the reason."""
        try:
            if request.kind == "status":
                return Frame("status", {"json": json.dumps(self.sites.status())})
            if request.kind == "stop":
                self.sites.stop(now=request.config.get("now") is True)
                return Frame("done")
            if request.kind == "exclude":
                name = self.sites.exclude(str(request.config.get("site")), self.save_excluded)
                return Frame("done", {"name": name})
            raise ConfigError(f"Unknown command {request.kind[:40]!r}; use the unskew version that the run uses.")
        except ConfigError as error:
            return Frame("failed", {"reason": str(error)})


def send_command(folder: Path, kind: str, **config: Any) -> dict[str, Any]:
    """Send a command to the deployed run in ``folder``.

    Args:
        folder: Run folder.
        kind: Name of the command.
        **config: Fields of the command.

    Returns:
        Fields of the reply.

    Raises:
        ConfigError: If no run is listening in the folder, or the run rejects the command.
    """
    path = socket_path(folder)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(SECONDS)
            connection.connect(str(path))
            send(connection, Frame(kind, config))
            reply = receive(connection, LARGEST)
    except (OSError, FrameError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"No deployed run is active in {folder}, or it is still starting ({reason}). Use the folder of a running one."
        ) from error
    if reply.kind == "failed":
        raise ConfigError(str(reply.config.get("reason")))
    return reply.config
