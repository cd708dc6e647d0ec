"""Files that are read while data are loaded, so that cached data are loaded again if one of these files changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

FileVersion = tuple[int, int] | None
"""Modification time in nanoseconds and size in bytes of a file; None if it does not exist."""
READ: ContextVar[dict[str, FileVersion] | None] = ContextVar("files read", default=None)


def file_version(file: str | Path) -> FileVersion:
    """Return the version of a file."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def record_file(file: Path) -> None:
    """Record the version of a file that is about to be read, if files are collected."""
    files = READ.get()
    if files is not None:
        files[str(file)] = file_version(file)


@contextmanager
def collect_files() -> Iterator[dict[str, FileVersion]]:
    """Context manager that collects the files recorded by ``record_file``.

    Yields:
        Versions of the files so far, by path.
    """
    files: dict[str, FileVersion] = {}
    token = READ.set(files)
    try:
        yield files
    finally:
        READ.reset(token)
