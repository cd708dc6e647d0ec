"""How processes share the machine: their memory and their threads."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of mallopt's parameters in glibc's malloc.h


def keep_freed_memory() -> None:
    """Tell glibc to keep freed blocks; without this every training step faults its activations in anew.

    It holds for the whole process, so it is for processes that are unskew's own.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_MMAP_THRESHOLD, 32 << 20)
            mallopt(_TRIM_THRESHOLD, 1 << 30)


_share: int | None = None
"""Cores that this process was given of the machine's, as one of several that work side by side."""


def take_share(number: int) -> None:
    """From now on this process uses so many cores only; it is for processes that are unskew's own."""
    global _share
    _share = number
    torch.set_num_threads(number)


def cores() -> int:
    """Cores that this process may use."""
    if _share is not None:
        return _share
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Within, this process computes with ``number`` threads."""
    before = torch.get_num_threads()
    if before != number:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if before != number:
            torch.set_num_threads(before)
