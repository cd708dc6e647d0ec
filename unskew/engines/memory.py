"""How a worker process handles its memory."""

from __future__ import annotations

import ctypes
import sys

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
