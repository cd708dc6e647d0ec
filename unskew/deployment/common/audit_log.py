"""Audit logs of a deployed run and of a site: one JSON line per event, chained by SHA-256."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from unskew.errors import CheckpointError
from unskew.filesystem import disk_errors, open_to_append, read_file

FILE = "audit.jsonl"
FIRST = "0" * 64
"""Value of ``previous`` in the first line."""


class AuditLog:
    """Appends events to a log. Several threads may use it.

    Args:
        folder: Folder of the log. A line that a killed process left incomplete is removed.
        file: Name of the log.
    """

    def __init__(self, folder: Path, file: str = FILE):
        self.path = folder / file
        self._lock = threading.Lock()
        self._last = FIRST
        with disk_errors(self.path):
            self._file = open_to_append(self.path)
            os.fchmod(self._file, 0o600)
            complete_lines = self.path.read_bytes().rpartition(b"\n")[0]
            os.ftruncate(self._file, len(complete_lines) + 1 if complete_lines else 0)
        if complete_lines:
            self._last = hashlib.sha256(complete_lines.splitlines()[-1]).hexdigest()

    def add(self, event: str, round: int | None, **fields: Any) -> None:
        """Append one event; omit fields that are empty or None.

        Args:
            event: Name of the event.
            round: Number of the round, from 0; None if the event belongs to none.
            **fields: Further fields.
        """
        known = {"round": round, "event": event, **fields}
        known = {name: value for name, value in known.items() if value not in (None, "")}
        with self._lock, disk_errors(self.path):
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            entry = {"time": when, **known, "previous": self._last}
            line = json.dumps(entry).encode()
            os.write(self._file, line + b"\n")
            self._last = hashlib.sha256(line).hexdigest()

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_events(path: Path, verify: bool = False) -> tuple[list[dict[str, Any]], str]:
    """Read an audit log; with ``verify``, check that each line contains the SHA-256 of the previous one.

    Args:
        path: The log.
        verify: Whether to check the chain of digests.

    Returns:
        The events, and the SHA-256 of the last line.

    Raises:
        CheckpointError: If the file cannot be read, or a line was changed, removed or inserted.
    """
    previous, events = FIRST, []
    try:
        for number, line in enumerate(read_file(path).splitlines(), 1):
            event = json.loads(line)
            if not isinstance(event, dict) or (verify and event.get("previous") != previous):
                raise CheckpointError(
                    f"{path} was modified: line {number} does not contain the hash of the line before it."
                )
            previous = hashlib.sha256(line).hexdigest()
            events.append(event)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as an audit log ({error}).") from error
    return events, previous
