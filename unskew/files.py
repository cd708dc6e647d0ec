"""Writing to disk so that nothing is ever half there, and saying plainly when it fails."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unskew.errors import CheckpointError, ConfigError


def disk_error(path: Path, error: OSError) -> CheckpointError:
    """The sentence for a write that failed."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return CheckpointError(
            f"The disk is full: {path} could not be written. What was saved before is intact; "
            "make room, then resume or repeat the run."
        )
    return CheckpointError(f"{path} could not be written: {error.strerror or error}.")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within, an error of the disk becomes a ``unskew.errors.CheckpointError`` that names ``path``."""
    try:
        yield
    except OSError as error:
        raise disk_error(path, error) from error


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as file:
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


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all, also after a power cut.

    Raises:
        CheckpointError: The disk is full or the folder cannot be written.
    """
    fresh = path.with_name(f".{path.name}.new")
    with writing(path):
        try:
            write_synced(fresh, data)
            os.replace(fresh, path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
        sync_path(path.parent)


def _temporary(path: Path) -> bool:
    return path.name == ".lock" or (path.name.startswith(".") and path.name.endswith(".new"))


def occupied(folder: Path) -> bool:
    """Whether something is in ``folder``; what a killed process left half-written does not count.

    Raises:
        ConfigError: It is a file, or cannot be read.
    """
    try:
        return folder.exists() and not all(map(_temporary, folder.iterdir()))
    except NotADirectoryError as error:
        raise ConfigError(f"{folder} is a file, not a folder; choose another with --out.") from error
    except OSError as error:
        raise ConfigError(f"The folder {folder} cannot be used: {error.strerror}.") from error


def place(path: str | Path) -> Path:
    """A file or a folder by its name.

    Raises:
        ConfigError: The name is empty, which a path would take for the folder one works in.
    """
    if isinstance(path, str) and not path.strip():
        raise ConfigError(f"{path!r} names no file or folder; give a name, or leave the option out.")
    return Path(path)


def make_folder(folder: Path) -> list[Path]:
    """Make a folder with its parents; gives those that were not there, innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return missing


def unmake_folder(folder: Path, added: list[Path]) -> None:
    """Undo ``make_folder``: empty the folder, and remove the folders it ``added`` that are empty then."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder not in added:
        folder.mkdir(exist_ok=True)
    for path in added[1:]:
        with contextlib.suppress(OSError):
            path.rmdir()


@contextmanager
def locked(folder: Path | None) -> Iterator[None]:
    """Within, no other process may work in ``folder``. The lock ends with the process, however that ends.

    Raises:
        ConfigError: Another process is working there.
    """
    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        yield
        return
    if folder is None:
        yield
        return
    with writing(folder / ".lock"):
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # lockf, not flock: a worker process that outlives this one for a moment must not keep the lock.
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            os.close(handle)
            raise ConfigError(f"Another process is working in {folder}; wait for it, or stop it first.") from error
    try:
        yield
    finally:
        (folder / ".lock").unlink(missing_ok=True)
        os.close(handle)
