"""Locks of files and folders between processes, and output folders that one process at a time fills."""

from __future__ import annotations

import errno
import os
import re
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from unskew.errors import ConfigError
from unskew.filesystem import NOFOLLOW, check_plain, disk_error, disk_errors, make_folder

_ours: set[Path] = set()
"""Folders locked by threads of this process, because the system's locks work only between processes."""


def _left_over(path: Path) -> bool:
    """Return whether a file was left by a killed process: a lock or a temporary file."""
    ours = path.name == ".lock" or re.fullmatch(r"\.[0-9a-f]{16,32}\.new", path.name)
    return bool(ours) and not path.is_symlink() and (path.is_file() or not path.exists())


def is_occupied(folder: Path) -> bool:
    """Return whether a folder has contents, ignoring unfinished files of a killed process.

    Args:
        folder: Folder to check; it may not exist.

    Raises:
        ConfigError: If the path is a file, or cannot be read.
    """
    try:
        return folder.exists() and not all(map(_left_over, folder.iterdir()))
    except NotADirectoryError as error:
        raise ConfigError(f"{folder} is a file, not a folder; choose another with --out.") from error
    except OSError as error:
        raise ConfigError(f"The folder {folder} cannot be used: {error.strerror}.") from error


def unmake_folder(folder: Path, added: list[Path]) -> None:
    """Undo ``make_folder``: empty the folder, and remove created folders that are empty.

    Args:
        folder: Folder to empty.
        added: Folders that ``make_folder`` created.
    """
    shutil.rmtree(folder, ignore_errors=True)
    if folder not in added:
        folder.mkdir(exist_ok=True)
    for path in added[1:]:
        with suppress(OSError):
            path.rmdir()


@contextmanager
def file_lock(path: Path, seconds: float) -> Iterator[None]:
    """Context manager that locks the file ``path`` exclusively and removes it at the end.

    The lock ends with the process, even if it is killed.

    Args:
        path: Lock file.
        seconds: Seconds to wait for the lock.

    Raises:
        ConfigError: If the lock is not available in time.
    """
    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        yield
        return
    end = time.monotonic() + seconds
    while True:
        with disk_errors(path):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | NOFOLLOW, 0o644)
        try:
            # flock, not lockf: threads of one process wait for each other, too.
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous owner may have removed this file, and another process created a new one.
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                break
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN, errno.ENOENT):
                break  # no such locks here
        os.close(handle)
        if time.monotonic() > end:
            raise ConfigError(f"Another process has locked {path} for {seconds:g} s; wait for it, or stop it first.")
        time.sleep(0.05)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Context manager that locks an existing folder. The lock ends with the process, even if it is killed.

    Args:
        folder: Folder to lock.

    Raises:
        ConfigError: If another process or thread is using the folder, or it contains a link, pipe or device.
    """
    resolved = folder.resolve()
    busy = ConfigError(
        f"Another process is working in {folder} (or another thread of this one). Wait for it, or stop it first."
    )
    if resolved in _ours:
        raise busy
    _ours.add(resolved)
    try:
        handle = _lock(folder / ".lock", busy)
        try:
            check_plain(folder)
            for path in filter(_left_over, folder.glob(".*.new")):
                path.unlink(missing_ok=True)
            yield
        finally:
            (folder / ".lock").unlink(missing_ok=True)
            if handle is not None:
                os.close(handle)
    finally:
        _ours.discard(resolved)


def _lock(path: Path, busy: ConfigError) -> int | None:
    """Lock a file and return its descriptor; None on a system without such locks (Windows)."""
    try:
        import fcntl
    except ImportError:
        return None
    while True:
        with disk_errors(path):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | NOFOLLOW, 0o644)
        try:
            # lockf, not flock: a worker process that briefly outlives this one must not keep the lock.
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous owner may have removed the file; then another process would lock a different one.
            if os.path.exists(path) and os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
            os.close(handle)
        except OSError as error:
            os.close(handle)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise busy from error
            raise disk_error(path, error) from error


def is_locked(folder: Path) -> bool | None:
    """Return whether a process holds the lock of a folder, without locking it; None if this system does not say.

    Args:
        folder: Folder that may be locked.

    Raises:
        OSError: If the lock file cannot be read.
    """
    if folder.resolve() in _ours:  # closing the lock file would release a lock of this process
        return True
    layouts = {"linux": ("hhqqi0q", 0), "darwin": ("qqihh", 3)}
    if sys.platform not in layouts or sys.maxsize < 2**32:
        return None
    import fcntl

    layout, position = layouts[sys.platform]  # of struct flock, and of the kind of the lock in it
    fields = [0, 0, 0, 0, 0]
    fields[position] = fcntl.F_RDLCK
    try:
        handle = os.open(folder / ".lock", os.O_RDONLY | NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        answer = fcntl.fcntl(handle, fcntl.F_GETLK, struct.pack(layout, *fields))
    finally:
        os.close(handle)
    return bool(struct.unpack(layout, answer)[position] != fcntl.F_UNLCK)


@contextmanager
def output_folder(folder: Path | None, resume: bool, kept: Callable[[], bool]) -> Iterator[None]:
    """Context manager that creates and locks an output folder.

    A new folder is removed if the block fails before anything worth keeping exists.

    Args:
        folder: Output folder, created if it is missing; None does nothing.
        resume: Whether the folder may have contents.
        kept: Returns whether the folder has contents worth keeping; called if the block fails.

    Raises:
        ConfigError: If the folder has contents and ``resume`` is false, or another process is using it.
    """
    if folder is None:
        yield
        return
    exists_error = ConfigError(
        f"The folder {folder} already exists; choose another with --out, or continue with unskew resume or compare --resume."
    )
    if is_occupied(folder) and not resume:
        raise exists_error
    added = make_folder(folder)
    with folder_lock(folder):
        # Check again: another process may have finished between the first check and the lock.
        fresh = not is_occupied(folder)
        if not fresh and not resume:
            raise exists_error
        try:
            yield
        except BaseException:
            # Without the lock file, the folder was moved or removed, and the path may be another folder now.
            if fresh and not kept() and (folder / ".lock").exists():
                unmake_folder(folder, added)
            raise
