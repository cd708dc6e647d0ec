"""Recording of a run's metrics: one line per round, warnings, and the summary at the end."""

from __future__ import annotations

import copy
import json
import math
import os
import platform
import re
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unskew.errors import CheckpointError
from unskew.filesystem import append_text, disk_errors, open_to_append, parse_json, write_atomic
from unskew.tasks.primary_metric import MetricInfo, primary_metric_name
from unskew.tasks.registry import objective_metric
from unskew.version import __version__

if TYPE_CHECKING:
    import torch

Row = dict[str, Any]


class Callback:
    """Base class of objects that are notified during a run, as in ``unskew.run(..., callbacks=[...])``.

    Override the hooks that you need; the others do nothing. Progress bars and trackers are callbacks. Hooks are called in the
    process that started the run: ``prepare`` and ``loaded``, then ``start``, ``round`` after each round, and ``end``.
    """

    def prepare(self, text: str, done: float, total: float) -> None:
        """Called during slow work before the first round: reading data, fitting generators.

        Args:
            text: Description of the work.
            done: Finished part of ``total``.
            total: Size of the work, in any unit.
        """

    def loaded(self, federation: Any) -> None:
        """Called when the data are loaded and partitioned, before training, with the ``Federation``."""

    def start(self, config: dict[str, Any], rounds_done: int) -> None:
        """Called before the first round, or when the run is resumed.

        Args:
            config: Fields of the configuration; ``objective`` is the metric that judges the run, also if it is ``auto``.
            rounds_done: Rounds that were finished before; 0 for a new run.
        """

    def round(self, row: Row) -> None:
        """Called after each round with a copy of its line of ``metrics.jsonl``."""

    def warn(self, text: str) -> None:
        """Called with each warning of the run; if no callback overrides this, ``warnings.warn`` is called instead."""

    def end(self, summary: dict[str, Any]) -> None:
        """Called at the end of the run with a copy of ``summary.json``; not after an error or an interruption."""


def callback_hooks(callbacks: Sequence[Callback], name: str) -> list[Callable[..., None]]:
    """Return the callbacks' own hooks of a name; objects that do not inherit from ``Callback`` may lack hooks.

    Args:
        callbacks: Objects that are notified during the run.
        name: Name of the hook.
    """
    hooks = [getattr(callback, name, None) for callback in callbacks]
    return [
        hook for hook in hooks if hook is not None and getattr(hook, "__func__", None) is not getattr(Callback, name)
    ]


def notify_warning(callbacks: Sequence[Callback], text: str) -> None:
    """Send a warning to the callbacks that handle warnings, or issue a Python warning if none does.

    Args:
        callbacks: Objects that are notified during the run.
        text: The warning.
    """
    listeners = callback_hooks(callbacks, "warn")
    for listener in listeners:
        listener(text)
    if not listeners:
        warnings.warn(text, stacklevel=3)


def strip_warning_prefix(line: str) -> str:
    """Return a line of ``warnings.txt`` without its time and round.

    >>> strip_warning_prefix("2026-01-31T12:00:00Z after round 3: The rate is high.")
    'The rate is high.'
    """
    return re.sub(r"^\S+Z after round \d+: ", "", line)


class Recorder:
    """History of a run, in memory and, with a folder, in ``metrics.jsonl``.

    Args:
        folder: Run folder; None keeps everything in memory.
        callbacks: Objects that are notified of every round.
    """

    def __init__(self, folder: Path | None, callbacks: Sequence[Callback] = ()):
        self.callbacks = callbacks
        self.history: list[Row] = []
        self._before = 0.0
        self._started = time.perf_counter()
        self._path = None if folder is None else folder / "metrics.jsonl"
        self._file: int | None = None
        self._retries: int | None = None

    @property
    def seconds(self) -> float:
        """Time spent on the run, over all its sessions."""
        return self._before + time.perf_counter() - self._started

    def start_clock(self) -> None:
        """Start measuring time; called when training starts."""
        self._started = time.perf_counter()

    def resume(self, rounds: int, seconds: float) -> None:
        """Return to the state after ``rounds`` rounds: drop later lines, and continue the clock from ``seconds``.

        Args:
            rounds: Number of rounds to keep.
            seconds: Seconds that these rounds took.

        Raises:
            CheckpointError: If lines of these rounds are missing or corrupted.
        """
        self._before = seconds
        if self._path is None:
            return
        text = self._path.read_bytes() if self._path.exists() else b""
        lines = text.splitlines()[:rounds]
        self.history[:] = check_rounds(parse_rows(lines, self._path), self._path, rounds)
        write_atomic(self._path, b"".join(line + b"\n" for line in lines))

    def adopt(self, rows: list[Row], seconds: float) -> None:
        """Start with the history of another run, which this run continues.

        Args:
            rows: Rows of the other run.
            seconds: Time spent on the other run, in seconds.
        """
        self.history[:], self._before = rows, seconds
        if self._path is not None:
            write_atomic(self._path, b"".join((json.dumps(row) + "\n").encode() for row in rows))

    def waited(self, seconds: float) -> None:
        """Subtract seconds in which other runs were trained."""
        self._before -= seconds

    def retried(self, clients: int) -> None:
        """Count clients retrained in this round after a worker or node died; 0 only marks that the engine counts them."""
        self._retries = (self._retries or 0) + clients

    def round(self, row: Row) -> None:
        """Store the metrics of a round and notify the callbacks."""
        row = finite_or_none(row if self._retries is None else {**row, "retries": self._retries})
        self._retries = None
        if self._path is not None:
            data = (json.dumps(row) + "\n").encode()
            self.check_folder()
            with disk_errors(self._path):
                if self._file is None:
                    self._file = open_to_append(self._path)
                while data:  # a disk that becomes full may write only a part
                    data = data[os.write(self._file, data) :]
        self.history.append(row)
        for callback in self.callbacks:
            callback.round(copy.deepcopy(row))

    def warn(self, text: str) -> None:
        """Append a warning to ``warnings.txt`` and notify the user."""
        self.write_warning(text)
        notify_warning(self.callbacks, text)

    def write_warning(self, text: str) -> None:
        """Append a warning that the user has already seen to ``warnings.txt``."""
        if self._path is not None:
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            line = f"{when} after round {len(self.history)}: {' '.join(text.split())}\n"
            append_text(self._path.with_name("warnings.txt"), line)

    def check_folder(self) -> None:
        """Check that the run folder is still the one in which the run started.

        Raises:
            CheckpointError: If the folder or its ``metrics.jsonl`` was removed, moved or replaced.
        """
        if self._path is None:
            return
        try:
            same = self._file is None or os.path.samestat(os.fstat(self._file), self._path.stat())
        except FileNotFoundError:
            same = False
        if not same or not self._path.parent.is_dir():
            raise CheckpointError(
                f"The run folder {self._path.parent}, or a file in it, was removed, moved or replaced during the run, so the "
                "run stopped. If the folder was moved, resume the run there; otherwise run it again."
            )

    def sync(self) -> None:
        """Write the lines so far to disk, so that they survive a power failure; called before each checkpoint."""
        self.check_folder()
        if self._file is not None and self._path is not None:
            with disk_errors(self._path):
                os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


MEASURED = ("loss", "bytes_up", "bytes_down", "setup_seconds", "train_seconds")
"""Metrics of every round that the summary reads."""
SCALARS = {
    *(*MEASURED, "accuracy", "r2", "updates", "skipped", "late", "retries", "seconds", "seconds_simulated", "epsilon")
}
"""Metrics with a single value."""


def parse_rows(lines: Iterable[bytes], path: Path) -> list[Row]:
    """Parse the lines of ``metrics.jsonl``.

    Args:
        lines: Lines of the file.
        path: Path of the file, for error messages.

    Raises:
        CheckpointError: If a line is corrupted.
    """
    try:
        rows = [parse_json(line) for line in lines]
    except ValueError as error:
        raise CheckpointError(
            f"{path} is corrupted; without its history the run can neither be resumed nor reported."
        ) from error
    for row in rows:
        known = isinstance(row, dict) and {*MEASURED, primary_metric_name(row)} <= set(row)
        if not known or not isinstance(row.get("round"), int) or not all(map(_is_figure, row, row.values())):
            raise CheckpointError(f"{path} is corrupted: a line does not have the metrics of a round.")
    return rows


def _is_figure(name: str, value: object) -> bool:
    """Return whether a value is a number, None, or, for metrics of methods, a mapping or list of such values."""
    if isinstance(value, dict | list) and (name in SCALARS or name.startswith("validation_")):
        return False
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else (value,)
    return all(isinstance(part, int | float | None) for part in parts)


def check_rounds(rows: list[Row], path: Path, rounds: int) -> list[Row]:
    """Validate that rows are those of the first ``rounds`` rounds, and return them.

    Args:
        rows: Rows of the file.
        path: Path of the file, for error messages.
        rounds: Expected number of rounds.

    Raises:
        CheckpointError: If rounds are missing.
    """
    if [row.get("round") for row in rows] != list(range(1, rounds + 1)):
        raise CheckpointError(f"{path} does not contain all {rounds} rounds of the checkpoint.")
    return rows


def best_value_of(history: Iterable[Row], metric: str, lowest: bool = False) -> tuple[float | None, int]:
    """Return the best value of a metric and the first round that reached it, from 1; None and 0 without a value.

    Args:
        history: Rows of a run.
        metric: Name of the metric.
        lowest: Whether lower values are better.

    >>> best_value_of([{"round": 1, "accuracy": 0.5}, {"round": 2, "accuracy": 0.5}], "accuracy")
    (0.5, 1)
    """
    sign = -1 if lowest else 1
    scored = [(sign * row[metric], -row["round"]) for row in history if row.get(metric) is not None]
    if not scored:
        return None, 0
    value, negative = max(scored)
    return sign * value, -negative


def with_closing(history: Sequence[Row], summary: Mapping[str, Any]) -> Sequence[Row]:
    """Return the rows of a run, followed by the last one again if the final model was changed after it.

    Args:
        history: Rows of a run.
        summary: Summary of the run, which has the metrics of the changed model.
    """
    if not any(name.endswith("_before_closing") for name in summary):
        return history
    return [*history, {**history[-1], **{name: summary[name] for name in history[-1] if name in summary}}]


def first_reaching(history: Iterable[Row], target: float, objective: MetricInfo | None = None) -> Row | None:
    """Return the first round that reaches the target, or None.

    Args:
        history: Rows of a run.
        target: Value of the objective.
        objective: Metric that judges the run; that of ``objective: auto`` if None.

    >>> first_reaching([{"round": 1, "accuracy": None}, {"round": 2, "accuracy": 0.4}], 0.4)
    {'round': 2, 'accuracy': 0.4}
    """
    for row in history:
        judge = objective or objective_metric(row)
        value = row.get(judge.name)
        if value is not None and judge.rank(value) >= judge.rank(target):
            return row
    return None


def finite_or_none(row: Row) -> Row:
    """Replace non-finite metrics by None, because JSON has no NaN.

    >>> finite_or_none({"round": 1, "loss": float("inf")})
    {'round': 1, 'loss': None}
    """
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Write ``summary.json``.

    Args:
        folder: Run folder.
        summary: Summary of the run.
    """
    write_atomic(folder / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())


def write_about(folder: Path, device: torch.device, class_names: Sequence[str]) -> None:
    """Write ``about.json``: software versions, machine, and class names.

    Args:
        folder: Run folder.
        device: Device of the training.
        class_names: Names of the classes.
    """
    import numpy
    import torch

    versions = {"unskew": __version__, "python": platform.python_version()}
    versions |= {"torch": str(torch.__version__), "numpy": numpy.__version__}
    machine = {"system": platform.platform(), "processor": platform.machine(), "cores": os.cpu_count()}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    about = {"versions": versions, "machine": machine | {"device": name}, "classes": list(class_names)}
    write_atomic(folder / "about.json", (json.dumps(about, indent=2) + "\n").encode())


def privacy_sentences(summary: dict[str, Any]) -> list[str]:
    """Return the sentences on privacy guarantees in a summary, one for each mechanism of the run.

    Args:
        summary: Summary of the run.
    """
    named = (value for key, value in summary.items() if key == "privacy" or key.endswith("_privacy"))
    return [value for value in named if isinstance(value, str)]


def write_clients(folder: Path, clients: Sequence[Row]) -> None:
    """Write ``clients.jsonl``.

    Args:
        folder: Run folder.
        clients: One row per client.
    """
    write_atomic(folder / "clients.jsonl", b"".join((json.dumps(row) + "\n").encode() for row in clients))
