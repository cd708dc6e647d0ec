"""Stored outcomes of finished runs: lines of JSON Lines files, identified by the run's configuration.

Each table has its own file, to which its runs are appended, or files of single runs. A run is found wherever it is stored,
because tables share runs. A process that is killed leaves at most an incomplete last line, which readers ignore and the next
writer removes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import pydantic
import torch

from unskew.comparison.folder_name import folder_name
from unskew.config.experiment import Experiment
from unskew.errors import DataError, first_problem
from unskew.filesystem import disk_errors, make_subfolder, open_to_append, parse_json, read_file, write_atomic
from unskew.folder_locks import file_lock
from unskew.runs.resume import RESUMABLE

ELSEWHERE = {*RESUMABLE, "data_path", "server_data_path", "start_from"} - {"rounds"}
"""Fields that do not change the numbers of a run."""
ALWAYS = {"": {"data", "method", "seed", "rounds"}, "network": {"drop", "delay", "delay_per"}}
"""Fields that are included even if they have their defaults: of every run, and of sections. Hashes depend on them."""
CURVES = (
    *("accuracy", "perplexity", "local_", "consensus/", "generalization/", "gradients/"),
    *("coefficients/", "surrogate/", "updates/"),
)
"""Prefixes of metrics that are stored for every evaluated round."""
PATIENCE = 60.0
"""Seconds to wait for another process that appends to the same file."""
EARLIER = "earlier "
"""Prefix of the keys of outcomes that stand in for a run."""
Outcome = dict[str, Any]


@dataclass(frozen=True)
class StoredOutcome:
    """Outcome with its location.

    Attributes:
        path: File that contains it.
        line: Number of its line, starting with 1.
        outcome: Identity of the run (``run``), its results, and the versions it was made with.
    """

    path: Path
    line: int
    outcome: Outcome


class _Scores(pydantic.BaseModel):
    """Results of a seed in a unit of a benchmark: metrics, traffic, and whether it diverged."""

    model_config = pydantic.ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, float]

    bytes: float
    diverged: bool


class _Line(pydantic.BaseModel):
    """Line of a file: the outcome of a run, of a unit of a benchmark, or why a unit has none."""

    model_config = pydantic.ConfigDict(strict=True)

    run: dict[str, Any]
    stands_in_for: str = ""
    summary: dict[str, Any] = {}
    curve: dict[str, list[float | None]] = {}
    not_applicable: str = ""
    personal: bool = False
    options: dict[str, Any] = {}
    objective: str = ""
    client_metric: str = ""
    own_metrics: dict[str, Literal["lower", "higher"]] = {}
    summaries: list[_Scores] = []
    rounds: list[int] = []
    bytes: list[float] | list[list[float | None]] = []
    curves: list[list[float | None]] = []
    seconds: float = 0.0
    seconds_simulated: list[list[float | None]] = []
    trials: dict[str, int] = {}
    validation: dict[str, float | None] = {}

    @pydantic.model_validator(mode="after")
    def _one_of_each_seed(self) -> Self:
        rounds, seeds = len(self.rounds), self.run.get("seeds")
        count = len(seeds) if isinstance(seeds, list) else len(self.summaries)
        if "summaries" in self.model_fields_set and not count == len(self.summaries) == len(self.curves) > 0:
            raise ValueError("it must have a summary and a curve of each seed")
        # Bytes are those of each seed if they differ.
        sent = {len(own) if isinstance(own, list) else len(self.bytes) for own in self.bytes} or {0}
        if sent | {len(own) for own in (*self.curves, *self.seconds_simulated)} != {rounds}:
            raise ValueError("its rounds, bytes and curves must have equal lengths")
        return self


_OF_UNIT = {"personal", "options", "objective", "client_metric", "summaries", "rounds", "bytes", "curves"}
_RESULTS = {"summary"}, {"not_applicable"}, _OF_UNIT
"""Fields of which a line has all of one kind."""
_parsed: dict[Path, tuple[tuple[int, int], dict[str, StoredOutcome]]] = {}
"""Contents of files that this process has read, with the size and time of change when they were read."""


def run_identity(config: Experiment, parent: Experiment | None = None) -> dict[str, Any]:
    """Return the identity of a run: fields that change its numbers, and the run that it starts from.

    Args:
        config: Configuration of the run.
        parent: Configuration of the run that it starts from, or None.
    """
    fields = {name: value for name, value in config.model_dump(mode="json").items() if name not in ELSEWHERE}
    run = _differing(fields, _defaults(type(config)))
    return run if parent is None else {**run, "begins_with": run_identity(parent)}


def _differing(values: dict[str, Any], defaults: Any, section: str = "") -> dict[str, Any]:
    """Return values that are not defaults, also in sections, so that new fields do not change old identities."""
    run = {}
    for name, value in values.items():
        if name not in defaults or value != defaults[name] or name in ALWAYS.get(section, ()):
            default = defaults.get(name)
            nested = isinstance(value, dict) and isinstance(default, dict)
            run[name] = _differing(value, default, name) if nested else value
    return run


@functools.cache
def _defaults(kind: type[Experiment]) -> dict[str, Any]:
    # The learning rate at the time of the first stored outcomes, which do not contain it.
    return {**kind().model_dump(mode="json"), "lr": 0.01}


def identity_hash(run: dict[str, Any]) -> str:
    """Return the hash of a run's identity."""
    return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:16]


def experiment_hash(config: Experiment, parent: Experiment | None = None) -> str:
    """Return the hash of a run's identity, computed from its configuration.

    Args:
        config: Configuration of the run.
        parent: Configuration of the run that it starts from, or None.
    """
    return identity_hash(run_identity(config, parent))


def store_outcome(
    folder: Path,
    table: str,
    config: Experiment,
    parent: Experiment | None,
    history: list[dict[str, Any]],
    summary: dict[str, Any],
    device: str = "cpu",
) -> None:
    """Append the outcome of a finished run to the file of a table.

    Args:
        folder: Folder of the outcomes.
        table: Name of the table, see ``append_outcome``.
        config: Configuration of the run.
        parent: Configuration of the run that it starts from, or None.
        history: Metrics of each round.
        summary: Summary of the run.
        device: Name of the device.
    """
    scored = [row for row in history if row["accuracy"] is not None]
    sent = [row["bytes_up"] + row["bytes_down"] for row in scored]
    curve = {"round": [row["round"] for row in scored], "bytes": sent, **_curves(scored)}
    append_outcome(folder, table, run_identity(config, parent), {"summary": summary, "curve": curve}, device)


def append_outcome(folder: Path, table: str, run: dict[str, Any], result: dict[str, Any], device: str = "cpu") -> None:
    """Append the outcome of a run to the file of a table; several processes may do so at the same time.

    Args:
        folder: Folder of the outcomes.
        table: Name of the table, such as ``fedcog/table-1``, which is stored in ``fedcog/table-1.jsonl``.
        run: Identity of the run.
        result: Result of the run.
        device: Name of the device, such as that of a graphics card; ``cpu`` is not stored.

    Raises:
        CheckpointError: If the file cannot be written.
        ConfigError: If another process locks the file for more than a minute.
    """
    path = _table_file(folder, table)
    with _table_lock(path):
        _append(path, _line(run, result, device))


def write_outcome(folder: Path, table: str, run: dict[str, Any], result: dict[str, Any]) -> None:
    """Write the outcome of a run to a file of its own next to the table's file.

    The file appears at once and complete, so that machines that share the folder need no lock.

    Args:
        folder: Folder of the outcomes.
        table: Name of the table, see ``append_outcome``.
        run: Identity of the run.
        result: Result of the run.

    Raises:
        CheckpointError: If the file cannot be written.
    """
    path = _table_file(folder, table)
    write_atomic(path.with_name(f"{path.stem}.{identity_hash(run)}.jsonl"), _line(run, result))


def merge_outcomes(folder: Path, table: str, order: Sequence[str]) -> None:
    """Move the outcomes of ``write_outcome`` to the file of their table.

    Args:
        folder: Folder of the outcomes.
        table: Name of the table.
        order: Hashes of the runs in the order of their lines; others follow.

    Raises:
        CheckpointError: If a file cannot be read or written.
        ConfigError: If another process locks the file for more than a minute.
    """
    path = _table_file(folder, table)
    pattern = f"{path.stem}.{'[0-9a-f]' * 16}.jsonl"
    if not any(path.parent.glob(pattern)):
        return
    with _table_lock(path), disk_errors(path):
        hashes = {file.suffixes[-2][1:]: file for file in path.parent.glob(pattern)}
        positions = {run: position for position, run in enumerate(order)}
        files = [hashes[run] for run in sorted(hashes, key=lambda run: (positions.get(run, len(positions)), run))]
        known = read_file(path) if path.exists() else b""  # has the lines of a command that was killed here
        lines = []
        for file in files:
            dict(_parse_file(file))  # a corrupted file is reported before anything is moved
            lines += [line + b"\n" for line in _complete_lines(file) if line + b"\n" not in known]
        _append(path, b"".join(lines))
        for file in files:
            file.unlink(missing_ok=True)


def _table_file(folder: Path, table: str) -> Path:
    """Return the file of a table, in a folder that is created."""
    *folders, name = map(folder_name, table.split("/"))
    return make_subfolder(folder, *folders) / f"{name}.jsonl"


def _line(run: dict[str, Any], result: dict[str, Any], device: str = "cpu") -> bytes:
    """Return the line of an outcome."""
    machine = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    machine |= {} if device == "cpu" else {"device": device}
    line = {"run": run, **result, "made_with": machine}
    _Line.model_validate(line)  # a line that no command could read would make its whole file useless
    return (json.dumps(line) + "\n").encode()


def _table_lock(path: Path) -> AbstractContextManager[None]:
    """Return the lock of a table's file, for which all commands that write to it wait."""
    return file_lock(path.with_name(f".{path.stem}.lock"), PATIENCE)


def _append(path: Path, lines: bytes) -> None:
    """Append lines to the file of a table, which is locked."""
    with disk_errors(path), os.fdopen(open_to_append(path), "ab") as file:
        file.truncate(read_file(path).rfind(b"\n") + 1)  # a killed process may have left an incomplete line
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())


def _complete_lines(path: Path) -> list[bytes]:
    """Return the lines of a file without line breaks; an incomplete last line is still being written."""
    return read_file(path).split(b"\n")[:-1]


def _curves(scored: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Return the curves for figures; rounds before a branch may lack metrics that only the branch has."""
    names = [n for n in dict.fromkeys(n for row in scored for n in row) if n.startswith(CURVES)]
    return {n: [None if row.get(n) is None else round(row[n], 5) for row in scored] for n in names}


def stored_outcomes(folder: Path) -> dict[str, StoredOutcome]:
    """Return all outcomes below a folder by the hash of their run's identity; the last one of a run in a file counts.

    An outcome with the field ``stands_in_for`` was measured before a default of its method changed. It is also found
    under ``earlier `` and the hash of the run with that method.

    Args:
        folder: Folder of the outcomes; unchanged files are not read again.

    Raises:
        DataError: If a line cannot be read.
    """
    outcomes: dict[str, StoredOutcome] = {}
    for path in sorted(folder.rglob("*.jsonl")):
        try:
            state = path.stat()
        except FileNotFoundError:  # merged by another process; the file of the table is read later
            continue
        changed = state.st_size, state.st_mtime_ns
        if path not in _parsed or _parsed[path][0] != changed:
            _parsed[path] = changed, dict(_parse_file(path))
        outcomes.update(_parsed[path][1])
    return outcomes


def _parse_file(path: Path) -> Iterator[tuple[str, StoredOutcome]]:
    """Yield the outcomes of a file with their keys; an incomplete last line is still being written, or never will be."""
    try:
        lines = _complete_lines(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    for number, line in enumerate(lines, 1):
        try:
            outcome: Outcome = parse_json(line)
            run = _Line.model_validate(outcome).run
            if not any(fields <= outcome.keys() for fields in _RESULTS):
                raise ValueError("it has no results")
        except ValueError as error:
            raise DataError(
                f"Line {number} of {path} is corrupted ({first_problem(error)}). Remove the line to repeat its run."
            ) from error
        earlier = {**run, "method": outcome["stands_in_for"]} if "stands_in_for" in outcome else None
        stored = StoredOutcome(path, number, outcome)
        yield identity_hash(run), stored
        if earlier is not None:
            yield EARLIER + identity_hash(earlier), stored


def read_outcome(folder: Path, run: dict[str, Any]) -> Outcome | None:
    """Return the outcome of a run, or None if it is not stored.

    Args:
        folder: Folder of the outcomes.
        run: Identity of the run.

    Raises:
        DataError: If a stored outcome cannot be read.
    """
    stored = stored_outcomes(folder).get(identity_hash(run))
    return None if stored is None else stored.outcome


def stored_outcome(folder: Path, config: Experiment, parent: Experiment | None = None) -> Outcome | None:
    """Return the outcome of a run, or None if it is not stored, see ``read_outcome``.

    Args:
        folder: Folder of the outcomes.
        config: Configuration of the run.
        parent: Configuration of the run that it starts from, or None.
    """
    return read_outcome(folder, run_identity(config, parent))
