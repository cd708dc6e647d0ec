"""Processes that are ours: started with a log of their own, watched, and stopped by their own ids."""

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

PR_SET_PDEATHSIG = 1  # its number in linux/prctl.h
GRACE = 5.0
"""Seconds from SIGTERM to SIGKILL."""


def _end_with_parent() -> None:
    """In a fresh child: Linux sends it SIGTERM when its parent dies, however that dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass
class ManagedProcess:
    """A process that must run.

    Attributes:
        name: What messages call it.
        command: Its program and arguments.
        log: Where its output goes.
        environment: What is added to ours.
        process: The process, once it is started.
        restarts: How often it was started again.
    """

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0

    def start(self) -> None:
        """Start it, in a process group of its own."""
        with self.log.open("ab") as log:
            os.chmod(self.log, 0o600)
            self.process = subprocess.Popen(
                list(self.command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,
                umask=0o077,  # databases, logs and sockets are their owner's alone
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )

    @property
    def pid(self) -> int:
        """Its id."""
        assert self.process is not None, "it was never started"
        return self.process.pid

    def running(self) -> bool:
        """Return whether the process is running."""
        return self.process is not None and self.process.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal to it and to what it started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)

    def last_words(self) -> str:
        """The end of its log."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(line for line in lines[-12:] if line.strip())


class ProcessGroup:
    """Several children, those that die started again after a second."""

    def __init__(self) -> None:
        self.children: list[ManagedProcess] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._restart, daemon=True)

    def add(self, child: ManagedProcess) -> ManagedProcess:
        """Start one more."""
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
                        child.signal(signal.SIGKILL)  # what it has left behind
                        child.restarts += 1
                        child.start()

    def close(self) -> None:
        """Stop all of them."""
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
    """The output of a command that ends by itself.

    Args:
        command: Command line.
        environment: Environment variables.
        seconds: Time limit.
        what: Name of the command, for errors.

    Raises:
        EngineError: The command fails, or does not end in time.
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
        raise EngineError(f"{what} has not ended within {seconds:g} s.") from error
    except OSError as error:
        raise EngineError(f"{what} cannot be started: {command[0]}: {error.strerror}.") from error
    if done.returncode:
        text = " ".join((done.stderr or done.stdout).split())
        raise EngineError(f"{what} failed: {text[-600:]}")
    return done.stdout
