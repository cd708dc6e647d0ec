"""Managed child processes: started with their own logs, monitored, and stopped by process id."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unskew.errors import EngineError

PR_SET_PDEATHSIG = 1  # constant of linux/prctl.h
GRACE = 5.0
"""Seconds from SIGTERM to SIGKILL."""


def _end_with_parent() -> None:
    """Make Linux send SIGTERM to this new child process when its parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass
class ManagedProcess:
    """Child process that should keep running.

    Attributes:
        name: Name of the process in messages.
        command: Program and arguments.
        log: File for its output.
        environment: Additional environment variables.
        process: The process, once started.
        restarts: Number of restarts.
    """

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0

    def start(self) -> None:
        """Start the process in a separate process group."""
        with self.log.open("ab") as log:
            os.chmod(self.log, 0o600)
            self.process = subprocess.Popen(
                list(self.command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,
                umask=0o077,  # only the owner can access databases, logs and sockets
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )

    @property
    def pid(self) -> int:
        """Process id."""
        assert self.process is not None, "it was never started"
        return self.process.pid

    def running(self) -> bool:
        """Return whether the process is running."""
        return self.process is not None and self.process.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal to the process group."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)

    def last_words(self) -> str:
        """Return the last lines of the log."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(line for line in lines[-12:] if line.strip())


class ProcessGroup:
    """Group of child processes; each one that dies is restarted within about a second."""

    def __init__(self) -> None:
        self.children: list[ManagedProcess] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._restart, daemon=True)

    def add(self, child: ManagedProcess) -> ManagedProcess:
        """Start a process and add it to the group."""
        with self._lock:
            child.start()
            self.children.append(child)
        if not self._watch.is_alive() and not self._ended.is_set():
            self._watch.start()
        return child

    def _restart(self) -> None:
        while not self._ended.wait(1.0):
            with self._lock:
                for child in self.children:
                    if not self._ended.is_set() and not child.running():
                        child.signal(signal.SIGKILL)  # ends remaining processes of its group
                        child.restarts += 1
                        child.start()

    def close(self) -> None:
        """Stop all processes."""
        self._ended.set()
        with self._lock:
            for child in self.children:
                child.signal(signal.SIGTERM)
            end = time.monotonic() + GRACE
            for child in self.children:
                if child.process is not None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.process.wait(max(0.05, end - time.monotonic()))
                child.signal(signal.SIGKILL)
                if child.process is not None:
                    child.process.wait()
            self.children = []


def run_to_completion(command: Sequence[str], environment: Mapping[str, str], seconds: float, what: str) -> str:
    """Run a command until it ends and return its output.

    Args:
        command: Command line.
        environment: Environment variables.
        seconds: Time limit.
        what: Name of the command, for error messages.

    Raises:
        EngineError: If the command fails, or does not end in time.
    """
    try:
        done = subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            env={**os.environ, **environment},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"{what} did not finish within {seconds:g} s.") from error
    except OSError as error:
        raise EngineError(f"{what} cannot be started: {command[0]}: {error.strerror}.") from error
    if done.returncode:
        text = " ".join((done.stderr or done.stdout).split())
        raise EngineError(f"{what} failed: {text[-600:]}")
    return done.stdout
