"""State of runs that may be in progress. Files are read as they grow; their content is external input, validated here."""

from __future__ import annotations

import math
import os
import stat
import time
from array import array
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unskew.comparison.benefit import client_label
from unskew.comparison.client_records import read_clients
from unskew.comparison.references import OF_CLIENTS, is_local, trains_global_model, without_global_model
from unskew.comparison.summary_statistics import is_usable_number
from unskew.config.loader import load_yaml
from unskew.config.metrics import AUTO, metric_name
from unskew.errors import CheckpointError, UnskewError
from unskew.folder_locks import is_locked
from unskew.records.recorder import parse_rows
from unskew.records.result import read_summary
from unskew.reporting.chart_data import EVALUATED, axis_title, client_metrics, evenly_spaced
from unskew.reporting.run_reader import PER_ROUND
from unskew.runs.cost import duration
from unskew.tasks.formatting import format_megabytes, value_text
from unskew.tasks.primary_metric import MetricInfo, metric_info
from unskew.tasks.registry import task_of

POINTS = 300
"""Maximum number of points of a curve."""
MOST_CURVES = 100
RECENT = 20
"""Number of the last rounds from which the time left is estimated."""
CHUNK, LONGEST_LINE = 1 << 20, 16 << 20
LOGS = ("audit.jsonl", "warnings.txt")
LARGEST = {"config.yaml": 1 << 18, "summary.json": 16 << 20, "clients.jsonl": 64 << 20, "metrics.jsonl": 4 << 30}
LARGEST |= dict.fromkeys(LOGS, 4 << 30)
"""Files of a run that are read, with their maximum size in bytes."""
LOG_BYTES, LOG_LINES = 16 << 10, 30
SILENCE = 60.0
"""Seconds without a round after which a run counts as stopped, if the system does not say whether its folder is locked."""


class LiveRun:
    """A run folder, whose files are read again when they have changed.

    Args:
        folder: Run folder.
        name: Name of the run on the page.
        number: Number of the run in requests of the page.
    """

    def __init__(self, folder: Path, name: str, number: int):
        self.folder, self.name, self.number = folder, name, number
        self.version = 0
        self.state = ""
        self.unread = False
        self.notes: dict[str, str] = {}
        self._found: dict[str, tuple[int, ...]] = {}
        self._config: dict[str, Any] = {}
        self._own: dict[str, str] = {}
        self._clients: list[dict[str, Any]] = []
        self._forget_rounds()

    def _forget_rounds(self) -> None:
        self._offset, self._inode = 0, 0
        self._line = b""
        self._curves: dict[str, tuple[array[float], array[float]]] = {}  # rounds and values
        self._last: dict[str, Any] = {}
        self._task = task_of(())
        self._seconds: deque[float] = deque(maxlen=RECENT + 1)
        self.notes.pop("metrics.jsonl", None)

    def update(self, until: float) -> bool:
        """Read what has changed, and return whether anything has.

        Args:
            until: Time of ``time.monotonic`` after which the rest of a long history is left to the next call.
        """
        found, before = {name: file_state(self.folder / name) for name in LARGEST}, self._found
        if found == before and not self.unread and self._current_state() == self.state:
            return False
        self._found = found
        changed = {name for name in found if found[name] != before.get(name)}
        if {"config.yaml", "summary.json"} & changed:
            self._config = self._read("summary.json", lambda path: read_summary(path.parent), {})
            self._config = self._config or self._read("config.yaml", load_yaml, {})
            own = self._config.get("own_metrics")  # directions of custom metrics, only known at the end of the run
            self._own = own if isinstance(own, dict) else {}
        if "clients.jsonl" in changed:
            rows = self._read("clients.jsonl", read_clients, [])
            self._clients = [self._without_global_model(row) for row in rows]
        if self.unread or "metrics.jsonl" in changed:
            self.unread = self._read("metrics.jsonl", lambda path: self._read_rounds(path, until), False)
        self.state = self._current_state()
        return True

    def _read(self, name: str, read: Callable[[Path], Any], default: Any) -> Any:
        """Read a file of the run; if it is missing, or not valid, return a default, and note the reason."""
        path = self.folder / name
        if name != "metrics.jsonl":  # a note on one of its lines remains
            self.notes.pop(name, None)
        try:
            if not self._found[name]:
                raise FileNotFoundError
            mode, _, size, _ = self._found[name]
            if not stat.S_ISREG(mode):
                raise CheckpointError(f"{path} is not read, because it is a link, folder, pipe or device.")
            if size > LARGEST[name]:
                raise CheckpointError(f"{path} is not read, because it is larger than {LARGEST[name] >> 10} KiB.")
            return read(path)
        except FileNotFoundError:
            if name == "metrics.jsonl":
                self._forget_rounds()
        except (UnskewError, OSError) as error:
            self.notes[name] = str(error)
        return default

    def _read_rounds(self, path: Path, until: float) -> bool:
        """Read new lines, and return whether there are more."""
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._forget_rounds()  # a resumed run replaces the file
                self._inode = status.st_ino
            file.seek(self._offset)
            while data := file.read(CHUNK):
                self._offset += len(data)
                *lines, self._line = (self._line + data).split(b"\n")
                for line in lines:
                    self._add(line, path)
                if len(self._line) > LONGEST_LINE:
                    self._offset, self._line = status.st_size, b""
                    raise CheckpointError(f"{path} has a line of more than {LONGEST_LINE >> 20} MiB.")
                if time.monotonic() > until:
                    break
        return self._offset < status.st_size

    def _add(self, line: bytes, path: Path) -> None:
        try:
            (row,) = parse_rows([line], path)
            if not all(is_usable_number(row.get(name)) for name in PER_ROUND):
                raise CheckpointError(f"{path} is corrupted: a line lacks its round, traffic or time.")
        except CheckpointError as error:
            self.notes[path.name] = str(error)
            return
        row = self._without_global_model(row)
        self._last = {name: row[name] for name in PER_ROUND}
        self._task = task_of(row)
        self._seconds.append(row["seconds"])
        for name in row.keys() - {*PER_ROUND}:
            stored = name in self._curves or len(self._curves) < MOST_CURVES
            if stored and is_usable_number(row[name]):
                rounds, values = self._curves.setdefault(name, (array("d"), array("d")))
                rounds.append(row["round"])
                values.append(row[name])

    def _without_global_model(self, row: dict[str, Any]) -> dict[str, Any]:
        method = self._text("method")
        return row if trains_global_model(method) else without_global_model(row, self._own, is_local(method))

    def _text(self, name: str) -> str:
        value = self._config.get(name)
        return value if isinstance(value, str) else ""

    def _current_state(self) -> str:
        try:
            locked = is_locked(self.folder)
        except OSError:
            locked = None
        if locked is None:
            since = time.time() - (self._found.get("metrics.jsonl") or (0,))[-1] / 1e9
            locked = since < max(SILENCE, 3 * self._pace()) and not self._found.get("summary.json")
        if locked:
            return "running"
        if self._found.get("summary.json"):
            return "finished, diverged" if self._config.get("diverged") is True else "finished"
        return "failed" if os.path.lexists(self.folder / ".lock") else "stopped"

    def _pace(self) -> float:
        """Return the mean seconds of a recent round."""
        if len(self._seconds) > 1:
            return max(0.0, (self._seconds[-1] - self._seconds[0]) / (len(self._seconds) - 1))
        return self._seconds[0] / max(1, self._last["round"]) if self._seconds else 0.0

    def _metric(self, name: str) -> MetricInfo:
        return metric_info(name, self._own, self._text("positive") or None)

    def objective(self) -> MetricInfo:
        """Return the metric that judges the run."""
        name = metric_name(self._text("objective") or AUTO)
        return self._metric(self._task.judged_by if name == AUTO else name)

    def row(self) -> list[str]:
        """Return the texts of a run in the table of runs, in the order of its columns in ``watch.html``."""
        judge, done = self.objective(), self._last.get("round", 0)
        total = self._config.get("max_rounds", self._config.get("rounds"))
        total = total if isinstance(total, int) and is_usable_number(total) else 0
        left = best = latest = ""
        if self.state == "running" and done:
            left = duration(self._pace() * (total - done)) if total > done else "final evaluation"
        if judge.name in self._curves:
            rounds, values = self._curves[judge.name]
            latest, extreme = value_text(judge, values[-1]), (min if judge.lower_is_better else max)(values)
            best = f"{value_text(judge, extreme)} (round {rounds[values.index(extreme)]:.0f})"
        elif self._last and not trains_global_model(self._text("method")):
            scored = self._task.client_metric_name(judge.name)
            mean = self._config.get(f"{OF_CLIENTS}{scored}_mean")  # of summary.json
            latest = "no global model"
            if is_usable_number(mean):
                latest = f"{value_text(self._metric(scored), mean)} (mean of personal models)"
        if judge == MetricInfo(judge.name, judge.name, percent=False) and judge.name not in self._own:
            best = ""  # its direction is not known
        return [
            *(self.state + " (see notes)" * bool(self.notes), self._text("method"), self._text("data")),
            *(f"{done} of {total}" if total else str(done), judge.title, latest, best, left),
            duration(self._last["seconds"]) if self._last else "",
            *(format_megabytes(self._last.get(name)) for name in ("bytes_up", "bytes_down")),
        ]

    def curves(self, most: int) -> dict[str, list[tuple[int, float]]]:
        """Return the points of each metric by its title, those of the objective first.

        Args:
            most: Maximum number of points of a curve.
        """
        judge, curves = self.objective().name, {}
        order = (judge, f"validation_{judge}", "loss", "train_loss")
        for name in dict.fromkeys((*order, *sorted(self._curves))):
            if name in self._curves:
                title = EVALUATED.get(name) or axis_title(self._metric(name))
                (rounds, values), factor = self._curves[name], 100 if title.endswith("(%)") else 1
                shown = evenly_spaced(len(rounds), most)
                curves[title] = [(int(rounds[index]), factor * values[index]) for index in shown]
        return curves

    def client_table(self) -> tuple[list[str], list[list[str]]]:
        """Return the columns and rows of the table of clients, the worst client first; empty before the evaluation."""
        metrics = client_metrics(self._clients, self._own, self._text("positive") or None)
        scored = self._task.client_metric_name(self.objective().name)
        metrics = dict(sorted(metrics.items(), key=lambda pair: pair[0] != scored)[:MOST_CURVES])

        def rank(row: dict[str, Any]) -> float:
            return self._metric(scored).rank(row[scored]) if is_usable_number(row.get(scored)) else math.inf

        titles = [("personal " if name.startswith("personal_") else "") + info.title for name, info in metrics.items()]
        rows = []
        for row in sorted(self._clients, key=rank):
            values = [(info, row.get(name)) for name, info in metrics.items()]
            texts = [value_text(info, value) if is_usable_number(value) else "" for info, value in values]
            label = client_label(row) + " (unseen)" * ("unseen" in row)
            rows.append([label, str(row["samples"]), str(row.get("num_held_out", "")), *texts])
        return ["client", "samples", "held-out samples", *titles], rows

    def log(self) -> list[str]:
        """Return the last lines of the logs of the run: events of a deployed run, and warnings."""
        return [line for name in LOGS for line in self._read(name, last_lines, [])]


def last_lines(path: Path) -> list[str]:
    """Return the last lines of a file."""
    with path.open("rb") as file:
        file.seek(-min(LOG_BYTES, path.stat().st_size), os.SEEK_END)
        return file.read(LOG_BYTES).decode(errors="replace").splitlines()[-LOG_LINES:]


def file_state(path: Path) -> tuple[int, ...]:
    """Return mode, inode, size and time in nanoseconds of a file, without following links; empty if it does not exist."""
    try:
        status = os.lstat(path)
    except OSError:
        return ()
    return status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns
