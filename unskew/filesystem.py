"""Safe file access: atomic and synced writes, and reading of regular files only.

Run folders may come from others. Therefore nothing is written through a link, and temporary files have unpredictable names.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from unskew.errors import CheckpointError, ConfigError, short_repr

NOFOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
"""Flags to not follow links; Windows has no ``O_NOFOLLOW``."""
DEPLOYMENT = "deployment.json"
"""File in the folder of a deployed run."""
SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")
"""End of an SQLite journal that names another file, which SQLite removes after it has applied the journal."""


def disk_error(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a failed write.

    Args:
        path: File that was written.
        error: Error of the operating system.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return CheckpointError(
            f"The disk is full: {path} could not be written. Earlier results are intact; "
            "free some space, then resume or repeat the run."
        )
    if error.errno == errno.ELOOP:
        return CheckpointError(f"{path} is a symbolic link, and unskew does not write through links. Remove it.")
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

    Args:
        path: File to create.

    Raises:
        FileExistsError: If the path exists, even as a broken link.
    """
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW, 0o666), "wb")


def open_to_append(path: Path) -> int:
    """Open a file for appending without following links, and return its descriptor.

    Args:
        path: File to open; created if it is missing.

    Raises:
        CheckpointError: If the file is a link, or cannot be opened.
        ConfigError: If the file has a second name (a hard link), which may be anywhere.
    """
    with disk_errors(path):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | NOFOLLOW, 0o644)
    if os.fstat(handle).st_nlink > 1:
        os.close(handle)
        raise ConfigError(f"{path} has a second name elsewhere (a hard link). Replace it with a copy.")
    return handle


def append_text(path: Path, text: str) -> None:
    """Append text to a file.

    Args:
        path: File to extend or create.
        text: Text to append.

    Raises:
        CheckpointError: If the file is a link, or the disk is full.
    """
    with disk_errors(path), os.fdopen(open_to_append(path), "a", encoding="utf-8") as file:
        file.write(text)


def read_file(path: Path) -> bytes:
    """Read a regular file; reading a pipe or device might never end.

    Args:
        path: File to read.

    Raises:
        OSError: If the file cannot be read, or is not a regular file.
    """
    check_regular(path)
    return path.read_bytes()


def parse_json(data: bytes) -> Any:
    """Parse JSON that may be corrupted.

    Args:
        data: Encoded JSON.

    Raises:
        ValueError: If the data are not JSON, are nested too deeply, or contain a number that is too large or not finite.
    """
    try:
        return json.loads(data, parse_int=_whole, parse_float=_real, parse_constant=_real)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _whole(text: str) -> int:
    if len(text) > 20 or abs(int(text)) >= 2**63:
        raise ValueError(f"the number {text[:20]}... is too large")
    return int(text)


def _real(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"the number {text[:20]} is too large or not finite")
    return float(text)


def escape_formula(value: object) -> object:
    """Escape a CSV cell, so that spreadsheets do not interpret it as a formula, as OWASP recommends; numbers stay.

    >>> escape_formula("=1+1"), escape_formula("red"), escape_formula("-0.5")
    ("'=1+1", 'red', '-0.5')
    """
    if not isinstance(value, str) or not value.startswith(tuple("=+-@\t\r\n＝＋－＠")):
        return value
    return value if re.fullmatch(r"[+-]?[0-9.]+(e[+-]?[0-9]+)?", value, re.I) else f"'{value}"


def check_run(folder: Path, resume: bool = False) -> None:
    """Validate that a folder contains a run and no links, before PyTorch is loaded.

    Args:
        folder: The folder.
        resume: Whether a run is to be resumed there.

    Raises:
        CheckpointError: If the folder has no ``config.yaml``.
        ConfigError: If it contains a link, pipe or device.
    """
    if not (folder / "config.yaml").is_file():
        what = f"There is no run to resume in {folder}" if resume else f"{folder} is not a run folder"
        raise CheckpointError(f"{what}: config.yaml is missing.")
    check_plain(folder)


def check_database(path: Path) -> None:
    """Validate that SQLite, which applies the journal of an interrupted program, would not remove another file with it.

    Args:
        path: Database; it may not exist.

    Raises:
        ConfigError: If its journal names another file.
    """
    journal = path.with_name(f"{path.name}-journal")
    if journal.exists() and read_file(journal).endswith(SUPER_JOURNAL):
        raise ConfigError(f"{journal} names another file, which SQLite would remove. Remove the journal.")


def check_regular(path: Path) -> None:
    """Validate that a path is a regular file, and not a folder, pipe or device.

    Args:
        path: Path to check.

    Raises:
        OSError: If the path is not a regular file, or does not exist.
    """
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a regular file", str(path))


def check_plain(folder: Path) -> None:
    """Validate that a folder contains only files and folders: writing to a link could change files elsewhere.

    Args:
        folder: Folder to check.

    Raises:
        ConfigError: If there is a link, pipe or device at any depth.
    """
    for directory, folders, names in os.walk(folder):
        for path in (Path(directory, name) for name in (*folders, *names)):
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:  # another process has removed it by now
                continue
            if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
                raise ConfigError(
                    f"{path} is a link, pipe or device, but unskew works only in folders of regular files. Remove it, or "
                    "replace it with a copy."
                )


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on disk.

    Args:
        path: File to create.
        data: Content of the file.

    Raises:
        FileExistsError: If the path exists.
    """
    with create_file(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def temporary_path(path: Path) -> Path:
    """Return an unpredictable temporary path in the folder of ``path``."""
    return path.with_name(f".{secrets.token_hex(8)}.new")


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file atomically, even if power fails; a link at the path is replaced.

    Args:
        path: File to write or replace.
        data: Content of the file.

    Raises:
        CheckpointError: If the disk is full or the file cannot be written.
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


def parse_path(path: str | Path) -> Path:
    """Convert the name of a file or folder to a path.

    Args:
        path: Name as entered by the user.

    Raises:
        ConfigError: If the name is empty (a ``Path`` would be the working directory), a URL, or not a valid name.
    """
    if not isinstance(path, str | Path):
        raise ConfigError(f"The name of a file or folder must be a string or Path, got {short_repr(path)}.")
    if "\0" in str(path):
        raise ConfigError(f"{str(path)!r} is not a valid name of a file or folder: it contains a null character.")
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise ConfigError(f"{str(path)!r} is not a valid name of a file or folder: it is not valid Unicode.") from error
    if re.match("[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
        raise ConfigError(f"{path} is a URL, but unskew reads and writes only local files. Use a path on this machine.")
    if isinstance(path, str) and not path.strip():
        raise ConfigError(f"{path!r} is not a name of a file or folder; enter a name, or omit the option.")
    return Path(path)


def user_cache() -> Path:
    """Return the folder of this user's cache for unskew; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "unskew"


def private_folder() -> Path:
    """Return this user's folder for sockets and files of running processes, created if it is missing.

    Raises:
        ConfigError: If others can access it, or it is a link.
    """
    folder = Path(tempfile.gettempdir()) / f"unskew-{os.getuid()}"
    with disk_errors(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
    if about.st_uid != os.getuid() or not stat.S_ISDIR(about.st_mode) or about.st_mode & 0o077:
        raise ConfigError(f"{folder} is not a private folder of this user. Remove it, or set TMPDIR to another folder.")
    return folder


def make_folder(folder: Path) -> list[Path]:
    """Create a folder and its parents, and return the created ones, innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return missing


def make_subfolder(root: Path, *names: str) -> Path:
    """Create folders below ``root`` without following links, and return the innermost one.

    Args:
        root: Existing folder, which may be a link.
        *names: Name of each folder, from the outermost to the innermost one.

    Raises:
        ConfigError: If one of the folders is a link.
    """
    folder = root
    make_folder(root)
    for name in names:
        folder /= name
        with disk_errors(folder):
            folder.mkdir(exist_ok=True)
        check_no_link(folder)
    return folder


def check_no_link(path: Path) -> None:
    """Validate that a path is not a link (raises ``ConfigError`` otherwise)."""
    if path.is_symlink():
        raise ConfigError(f"{path} is a link, and unskew does not write through links. Replace it with a copy.")
