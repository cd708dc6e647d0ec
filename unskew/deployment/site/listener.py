"""Socket of a site's process: receives messages of its SuperNode, one at a time, and sends the replies."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType

import torch

from unskew.deployment.site.process import SiteProcess
from unskew.deployment.wire.frames import Frame, FrameError, receive, send
from unskew.engines.cpu import keep_freed_memory
from unskew.errors import ConfigError

MESSAGE_SECONDS = 10.0
"""Seconds within which a connection must send the header of its message, and, at a minimum rate, the rest."""
IDLE_SECONDS = 60.0
"""Seconds within which a reply must be read."""


def serve(site: SiteProcess) -> None:
    """Reply to messages at the site's socket, one at a time, until the process is stopped.

    Args:
        site: The site.

    Raises:
        ConfigError: If another process of this site is running.
    """
    path = site.config.path("socket", site.folder)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if path.exists() and probe.connect_ex(str(path)) == 0:
            raise ConfigError(f"Another process of this site is listening at {path}; stop it first.")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    unready = path.with_suffix(".new")  # renamed once it listens, so that no client connects too early
    unready.unlink(missing_ok=True)
    before = os.umask(0o177)  # only the owner can access the socket, from the start
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(unready))
    finally:
        os.umask(before)
    listener.listen(4)
    unready.rename(path)
    site.log(f"The site {site.config.name}, client {site.config.client}, answers at {path}.")
    try:
        with listener:
            while True:
                try:
                    connection, _ = listener.accept()
                    with connection:
                        connection.settimeout(IDLE_SECONDS)
                        serve_connection(site, connection)
                except Exception as error:  # whatever a message causes, the process must reply to the next one
                    site.log(f"A connection was closed ({error!r:.500}).")
                    time.sleep(0.1)  # for example while there are too many open files
    finally:
        path.unlink(missing_ok=True)


def serve_connection(site: SiteProcess, connection: socket.socket) -> None:
    """Reply to the message that a connection sends.

    Args:
        site: The site.
        connection: Accepted connection.
    """
    try:
        request = receive(connection, int(site.config.limits.max_message_mb * 1e6), MESSAGE_SECONDS)
    except FrameError as error:
        reply = Frame("refused", {"reason": str(error)})
    except OSError as error:
        site.log(f"A connection was closed because it did not send a complete message in time ({error}).")
        return
    else:
        reply = site.answer(request)
    if reply.kind in ("refused", "forgotten", "outdated"):
        site.log(f"rejected: {reply.config['reason']!r:.1000}")
    with contextlib.suppress(OSError):
        send(connection, reply)


def serve_site(path: Path) -> None:
    """Run the site's process until SIGTERM."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(0)

    site = SiteProcess(path)
    signal.signal(signal.SIGTERM, end)
    torch.set_num_threads(site.config.threads)
    keep_freed_memory()
    site.experiments.warm()
    serve(site)
