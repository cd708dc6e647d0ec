"""Writing to disk so that nothing is ever half there or outside its folder, and reading what is certain to end.

Run folders may come from others. Nothing is written through a link, and temporary files have names that nobody can foresee.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from unskew.errors import CheckpointError, ConfigError, short_repr

NOFOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
"""Links are not followed; Windows has no such flag."""


def disk_error(path: Path, error: OSError) -> CheckpointError:
    """The sentence for a write that failed.

    Args:
        path: File that was written.
        error: Error of the operating system.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return CheckpointError(
            f"The disk is full: {path} could not be written. What was saved before is intact; "
            "free some space, then resume or repeat the run."
        )
    if error.errno == errno.ELOOP:
        return CheckpointError(f"{path} is a symbolic link, and unskew writes through none. Remove it.")
    return CheckpointError(f"{path} could not be written: {error.strerror or error}.")


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Context manager that converts disk errors to ``unskew.errors.CheckpointError`` with the path."""
    try:
        yield
    except OSError as error:
        raise disk_error(path, error) from error


def create_file(path: Path) -> BinaryIO:
    """Open a new file for writing.

    Raises:
        FileExistsError: If something is there, be it a link to nowhere.
    """
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW, 0o666), "wb")


def open_to_append(path: Path) -> int:
    """Open a file for appending, not following a link; gives its handle.

    Raises:
        CheckpointError: If it is a link, or cannot be opened.
    """
    with disk_errors(path):
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | NOFOLLOW, 0o644)


def append_text(path: Path, text: str) -> None:
    """Append a text to a file.

    Args:
        path: File to extend or create.
        text: Text to append.

    Raises:
        CheckpointError: If the file is a link, or the disk is full.
    """
    with disk_errors(path), os.fdopen(open_to_append(path), "a", encoding="utf-8") as file:
        file.write(text)


def read_file(path: Path) -> bytes:
    """Read a regular file: a pipe or a device may never end.

    Raises:
        OSError: If it cannot be read, or is not a regular file.
    """
    check_regular(path)
    return path.read_bytes()


def read_json(path: Path) -> Any:
    """Read a JSON file that may be damaged.

    Raises:
        OSError: If it cannot be read, or is not a regular file.
        ValueError: See ``parse_json``.
    """
    return parse_json(read_file(path))


def parse_json(data: bytes) -> Any:
    """Read JSON that may be damaged.

    Raises:
        ValueError: If it is not JSON, is nested too deeply, or holds a number that nothing can work with.
    """
    try:
        return json.loads(data, parse_int=_whole, parse_float=_real)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _whole(text: str) -> int:
    if len(text) > 20 or abs(int(text)) >= 2**63:
        raise ValueError(f"the number {text[:20]}... is too large")
    return int(text)


def _real(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"the number {text[:20]} is too large")
    return float(text)


def check_run(folder: Path, resume: bool = False) -> None:
    """Reject a folder without a run, before PyTorch is loaded.

    Args:
        folder: The folder.
        resume: Whether a run is to be resumed there.

    Raises:
        CheckpointError: If it has no ``config.yaml``.
    """
    if not (folder / "config.yaml").is_file():
        what = f"There is no run to resume in {folder}" if resume else f"{folder} is not a run folder"
        raise CheckpointError(f"{what}: config.yaml is missing.")


def check_regular(path: Path) -> None:
    """Reject what is not a regular file, such as a folder, a pipe or a device.

    Raises:
        OSError: The path is not a regular file, or does not exist.
    """
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a regular file", str(path))


def check_plain(folder: Path) -> None:
    """Reject a folder with links, pipes or devices in it: what is written there could land elsewhere.

    Raises:
        ConfigError: There is a link at any depth.
    """
    for directory, folders, names in os.walk(folder):
        for path in (Path(directory, name) for name in (*folders, *names)):
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:  # another process has removed it by now
                continue
            if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
                raise ConfigError(
                    f"{path} is a link, a pipe or a device, and unskew works only in folders of plain files. Remove it, or "
                    "replace it with a copy."
                )


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on the disk.

    Args:
        path: File to create.
        data: Content of the file.

    Raises:
        FileExistsError: If something is there.
    """
    with create_file(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def temporary_path(path: Path) -> Path:
    """Make up a name that nobody can foresee, in the folder of ``path``."""
    return path.with_name(f".{secrets.token_hex(8)}.new")


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all, also after a power cut; a link there is replaced.

    Args:
        path: File to write or replace.
        data: Content of the file.

    Raises:
        CheckpointError: The disk is full or the folder cannot be written.
    """
    fresh = temporary_path(path)
    with disk_errors(path):
        try:
            write_synced(fresh, data)
            os.replace(fresh, path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
        sync_path(path.parent)


def _left_over(path: Path) -> bool:
    """Return whether a file was left by a killed process: a lock or a temporary file."""
    ours = path.name == ".lock" or re.fullmatch(r"\.[0-9a-f]{16,32}\.new", path.name)
    return bool(ours) and not path.is_symlink() and (path.is_file() or not path.exists())


def is_occupied(folder: Path) -> bool:
    """Return whether a folder has contents, not counting unfinished files of a killed process.

    Raises:
        ConfigError: The path is a file, or cannot be read.
    """
    try:
        return folder.exists() and not all(map(_left_over, folder.iterdir()))
    except NotADirectoryError as error:
        raise ConfigError(f"{folder} is a file, not a folder; choose another with --out.") from error
    except OSError as error:
        raise ConfigError(f"The folder {folder} cannot be used: {error.strerror}.") from error


def parse_path(path: str | Path) -> Path:
    """A file or a folder by its name.

    Raises:
        ConfigError: The name is empty, which a path would take for the folder one works in, or it is not a name.
    """
    if not isinstance(path, str | Path):
        raise ConfigError(f"A file or a folder is named by text or a Path, not by {short_repr(path)}.")
    if "\0" in str(path):
        raise ConfigError(f"{str(path)!r} names no file or folder: it holds the character 0.")
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise ConfigError(f"{str(path)!r} names no file or folder: it is not valid Unicode.") from error
    if re.match("[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
        raise ConfigError(f"{path} is an address; unskew reads and writes local files, so give a path on this machine.")
    if isinstance(path, str) and not path.strip():
        raise ConfigError(f"{path!r} names no file or folder; give a name, or leave the option out.")
    return Path(path)


def user_cache() -> Path:
    """Return the folder of this user's cache for unskew; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "unskew"


def make_folder(folder: Path) -> list[Path]:
    """Make a folder with its parents; gives those that were not there, innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return missing


def unmake_folder(folder: Path, added: list[Path]) -> None:
    """Undo ``make_folder``: empty the folder, and remove the folders it ``added`` that are empty then.

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


_ours: set[Path] = set()
"""Folders that a thread of this process works in: the system's locks are between processes only."""


@contextmanager
def file_lock(path: Path, seconds: float) -> Iterator[None]:
    """Context manager that holds the lock file ``path`` exclusively.

    It waits for the lock and removes the file at the end.

    The lock ends with the process, however that ends.

    Args:
        path: Lock file.
        seconds: How long to wait for the lock.

    Raises:
        ConfigError: Another one has it for more than ``seconds``.
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
            # Whoever had it before may have removed this file, and a third one made another.
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                break
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN, errno.ENOENT):
                break  # no such locks here
        os.close(handle)
        if time.monotonic() > end:
            raise ConfigError(f"Another process has had {path} for {seconds:g} seconds; wait for it, or stop it first.")
        time.sleep(0.05)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Context manager that locks an existing folder. The lock ends with the process, even if it is killed.

    Raises:
        ConfigError: Another process, or another thread of this one, is working there, or a link or the like lies in it.
    """
    resolved = folder.resolve()
    busy = ConfigError(
        f"Another process is working in {folder}, or another thread of this one; wait for it, or stop it first."
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
    """The locked file's handle; None on a system without such locks (Windows)."""
    try:
        import fcntl
    except ImportError:
        return None
    while True:
        with disk_errors(path):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | NOFOLLOW, 0o644)
        try:
            # lockf, not flock: a worker process that outlives this one for a moment must not keep the lock.
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had it may have removed the file before we had it: then others would lock another one.
            if os.path.exists(path) and os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
            os.close(handle)
        except OSError as error:
            os.close(handle)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise busy from error
            raise disk_error(path, error) from error


@contextmanager
def output_folder(folder: Path | None, resume: bool, kept: Callable[[], bool]) -> Iterator[None]:
    """Context manager that creates and locks an output folder.

    A new folder is removed if the block fails before anything worth keeping exists.

    Args:
        folder: It is made if it is not there.
        resume: Whether something may be in it.
        kept: Whether something is in it that must stay, asked if it fails.

    Raises:
        ConfigError: Something is in it, or somebody else works there.
    """
    if folder is None:
        yield
        return
    there = ConfigError(
        f"The folder {folder} is already there; choose another with --out, or go on: unskew resume, or compare --resume."
    )
    if is_occupied(folder) and not resume:
        raise there
    added = make_folder(folder)
    with folder_lock(folder):
        # Looked at again: whoever had the lock before may have finished just now.
        fresh = not is_occupied(folder)
        if not fresh and not resume:
            raise there
        try:
            yield
        except BaseException:
            # Without the lock file, the folder was moved or removed, and another one may be in its place.
            if fresh and not kept() and (folder / ".lock").exists():
                unmake_folder(folder, added)
            raise
