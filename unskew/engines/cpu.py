"""Memory and threads of processes that share a machine."""

from __future__ import annotations

import contextlib
import ctypes
import math
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

from unskew.errors import EngineError

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt in glibc's malloc.h


def keep_freed_memory() -> None:
    """Make glibc keep freed blocks; otherwise every training step maps the memory of its activations again.

    This affects the whole process, so call it only in processes that unskew created.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_MMAP_THRESHOLD, 32 << 20)
            mallopt(_TRIM_THRESHOLD, 1 << 30)


def exit_with_parent(ending: int = signal.SIGTERM) -> None:
    """End this process when its parent process ends, even if the parent is killed.

    Args:
        ending: Signal that this process sends to itself.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), ending)

    threading.Thread(target=wait, daemon=True).start()


@contextlib.contextmanager
def default_torch_modes() -> Iterator[None]:
    """Context manager in which PyTorch computes gradients in full precision, whatever modes the caller has set."""
    with contextlib.ExitStack() as within:
        within.enter_context(torch.inference_mode(False))
        within.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                within.enter_context(torch.autocast(kind, enabled=False))
        yield


CONTAINER_LIMIT = Path("/sys/fs/cgroup/cpu.max")
"""Microseconds of all cores in a period, and the period, of the container in which this process runs."""
_share: int | None = None
"""Core limit of this process, as one of several that share the machine."""


def set_core_limit(number: int) -> None:
    """Limit this process to a number of cores; call it only in processes that unskew created."""
    global _share
    _share = number
    torch.set_num_threads(number)


def num_cores() -> int:
    """Return the number of cores that this process may use, at most those that the limit of a container is worth."""
    if _share is not None:
        return _share
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # without a limit, the first word is "max"
        limit, period = CONTAINER_LIMIT.read_text().split()
        return min(cores, math.ceil(int(limit) / int(period)))
    return cores


def may_start_processes() -> bool:
    """Return whether this process may have children: the workers of ``multiprocessing.Pool`` may not."""
    return not multiprocessing.current_process().daemon


@contextlib.contextmanager
def num_threads(number: int) -> Iterator[None]:
    """Context manager that computes with ``number`` threads."""
    before = torch.get_num_threads()
    if before != number:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if before != number:
            torch.set_num_threads(before)


def check_may_start_processes() -> None:
    """Validate that this process may have children (raises ``EngineError`` otherwise)."""
    if not may_start_processes():
        raise EngineError(
            "A worker of multiprocessing.Pool is a daemon, which may not start processes. Use engine='inline' there, without "
            "parallel, or run the sweep with concurrent.futures.ProcessPoolExecutor or joblib."
        )


@contextlib.contextmanager
def time_limit(seconds: float, error: Exception) -> Iterator[None]:
    """Context manager that limits the duration of its block; no effect outside the main thread or on Windows.

    Args:
        seconds: Maximum duration in seconds.
        error: Raised if the block takes longer.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, end)
    # Repeat every second: Python discards an exception raised inside a destructor or a weak reference's callback.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
