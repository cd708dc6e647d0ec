"""Record on a site's disk of the statistics that it has sent: replies, hashes of the data, grids and privacy losses."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load

from unskew.deployment.common.audit_log import AuditLog, read_events
from unskew.errors import CheckpointError
from unskew.filesystem import read_file, write_atomic
from unskew.folder_locks import file_lock
from unskew.json_models import JsonModel, read_model, write_model
from unskew.protocol.client_state_files import encode_tensors
from unskew.protocol.messages import Tensors

FOLDER = "statistics"
"""Folder of the record in the folder of a site's states."""
LOG = "statistics.jsonl"
"""Log of the replies, next to that folder."""
SECONDS = 60.0
"""Seconds to wait for another process that uses the record."""
FORGOTTEN = "forgotten"
"""Event of the log."""
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Loss = Annotated[float, Field(ge=0)]


class StoredReply(JsonModel):
    """Reply to one request."""

    request: Digest
    """Digest of the request, and of the names of the label columns if the sums depend on them."""
    data: Digest
    """Data from which it was computed."""
    epsilon: Loss | None
    """Setting ``epsilon`` of its noise."""
    sums: Digest
    """File of its tensors, before small counts are removed."""


class StatisticsRecords(JsonModel):
    """Content of the file."""

    key: Digest = Field(default_factory=lambda: secrets.token_hex(32))
    """Secret key of the hashes of rows."""
    spent: Loss = 0.0
    """Sum of the privacy losses of all replies; remains when replies are forgotten."""
    grids: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    """Grid on which the values of a column were counted."""
    fixed: dict[str, Digest] = Field(default_factory=dict)
    """Digest of the only value that the site accepts for a list of classes or a constant of requests, by its name."""
    data_schema: str = ""
    """Digest of the data schema with which inputs were prepared for sums and gradients."""
    data: tuple[Digest, ...] = ()
    """Files with the hashes of the rows from which replies were computed."""
    replies: tuple[StoredReply, ...] = ()


class StatisticsLedger:
    """Record of the statistics that a site has sent, in files that survive a restart. It belongs to the site's data.

    A file of tensors is named by the SHA-256 of its content and never changes. A reply counts as sent as soon as
    ``ledger.json`` names its file, which is before the reply leaves the site.

    Args:
        state: Folder of the site's states.
    """

    def __init__(self, state: Path):
        self.state, self.folder = state, state / FOLDER
        self.path = self.folder / "ledger.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Context manager in which no other process uses the record; creates its folder."""
        for folder in (self.state, self.folder):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
        with file_lock(self.folder / ".lock", SECONDS):
            yield

    def read(self) -> StatisticsRecords:
        """Return the record; at the first use, create it.

        Raises:
            CheckpointError: If it is corrupted, or was removed.
        """
        remedy = (
            "Restore it from a backup. Without it, statistics could be compared with earlier ones. If you accept that, run "
            "unskew deploy forget with the site.yaml."
        )
        if os.path.lexists(self.path):
            return read_model(self.path, StatisticsRecords, remedy)
        if (self.state / LOG).exists():
            raise CheckpointError(f"{self.path} is missing, but {LOG} shows that statistics were sent. {remedy}")
        records = StatisticsRecords()
        self.write(records)
        return records

    def write(self, records: StatisticsRecords) -> None:
        """Replace the record."""
        write_model(self.path, records)
        self.path.chmod(0o600)

    def tensors(self, digest: str) -> Tensors:
        """Read a file of tensors.

        Args:
            digest: SHA-256 of the file.

        Raises:
            CheckpointError: If it is missing or corrupted.
        """
        path = self.folder / f"{digest}.safetensors"
        try:
            data = read_file(path)
            if hashlib.sha256(data).hexdigest() == digest:
                return load(data)
        except (OSError, SafetensorError):
            pass
        raise CheckpointError(
            f"{path} is missing or corrupted. Restore it from a backup, or run unskew deploy forget with the site.yaml."
        )

    def write_tensors(self, tensors: Tensors) -> str:
        """Write a file of tensors, and return its SHA-256."""
        data = encode_tensors(tensors)
        digest = hashlib.sha256(data).hexdigest()
        path = self.folder / f"{digest}.safetensors"
        if not path.exists():
            write_atomic(path, data)
            path.chmod(0o600)
        return digest

    def log(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Append events to the log.

        Args:
            events: Fields of each event.
        """
        log = AuditLog(self.state, LOG)
        try:
            for fields in events:
                log.add(round=None, **fields)
        finally:
            log.close()

    def forget(self) -> StatisticsRecords:
        """Forget everything but the privacy losses, and return what was forgotten.

        Raises:
            CheckpointError: If neither the record nor the log can be read.
        """
        with self.locked():
            try:
                records = self.read()
            except CheckpointError:
                events, _ = read_events(self.state / LOG, verify=True)
                records = StatisticsRecords(spent=sum(float(event.get("epsilon", 0)) for event in events))
            self.log([{"event": FORGOTTEN, "replies": len(records.replies), "data_sets": len(records.data)}])
            self.write(StatisticsRecords(spent=records.spent))
            for path in self.folder.glob("*.safetensors"):
                path.unlink()
        return records
