"""State of runs that may be in progress. Files are read as they grow; their content is external input, validated here."""

from __future__ import annotations

import math
import os
import stat
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unskew.comparison.benefit import client_label
from unskew.comparison.client_records import read_clients
from unskew.comparison.references import is_local, without_global_model
from unskew.comparison.summary_statistics import is_usable_number
from unskew.config.loader import load_yaml
from unskew.config.metrics import AUTO, metric_name
from unskew.errors import CheckpointError, UnskewError
from unskew.filesystem import NOFOLLOW, parse_json
from unskew.folder_locks import is_locked
from unskew.records.recorder import parse_rows
from unskew.records.result import read_summary
from unskew.reporting.chart_data import EVALUATED, axis_title, client_metrics, evenly_spaced
from unskew.reporting.run_reader import PER_ROUND
from unskew.runs.cost import duration
from unskew.tasks.formatting import format_megabytes, value_text
from unskew.tasks.primary_metric import (
    KNOWN_METRICS,
    METRIC_PREFIXES,
    SCORES,
    MetricInfo,
    client_metric_name,
    metric_info,
    primary_metric_name,
    validation_metric_name,
)

POINTS = 300
"""A curve stores at most twice this number of points."""
SMALL_CURVE = 40
"""Maximum number of points of the small curve in the table of runs."""
MOST_CURVES = 100
RECENT = 20
"""Number of the last rounds from which the time left is estimated."""
CHUNK = 1 << 20
LONGEST_LINE = 16 << 20
LARGEST = {"config.yaml": 1 << 18, "summary.json": 16 << 20, "clients.jsonl": 64 << 20}
"""Files that are read as a whole, with their maximum size in bytes."""
LOGS = ("audit.jsonl", "warnings.txt")
LOG_BYTES, LOG_LINES = 16 << 10, 30
SILENCE = 60.0
"""Seconds without a round after which a run counts as stopped, on systems that do not say whether its folder is locked."""
LONGEST_TEXT = 300


class Curve:
    """Values of a metric over rounds, of which evenly spaced ones are stored."""

    def __init__(self) -> None:
        self.rounds = array("d")
        self.values = array("d")
        self.last = self.lowest = self.highest = (0, math.nan)
        self._step = 1
        self._count = 0

    def add(self, number: int, value: float) -> None:
        """Add the value of a round."""
        self.last = (number, value)
        if not self._count or value < self.lowest[1]:
            self.lowest = self.last
        if not self._count or value > self.highest[1]:
            self.highest = self.last
        if self._count % self._step == 0:
            self.rounds.append(number)
            self.values.append(value)
        self._count += 1
        if len(self.rounds) > 2 * POINTS:
            del self.rounds[1::2], self.values[1::2]
            self._step *= 2

    def points(self, factor: float = 1, most: int = 2 * POINTS) -> list[tuple[int, float]]:
        """Return rounds and values, including the first and the last.

        Args:
            factor: Factor of the values.
            most: Maximum number of points.
        """
        stored = [(int(number), factor * value) for number, value in zip(self.rounds, self.values, strict=True)]
        if stored[-1][0] != self.last[0]:
            stored.append((self.last[0], factor * self.last[1]))
        return [stored[index] for index in evenly_spaced(len(stored), most)]


class LiveRun:
    """A run folder, read again when a file has changed.

    Args:
        folder: Run folder.
        name: Name of the run on the page.
        number: Number of the run in requests of the page.
    """

    def __init__(self, folder: Path, name: str, number: int = 0):
        self.folder = folder
        self.name = name
        self.number = number
        self.version = 0
        self.state = ""
        self.unread = False
        self._locks_known = True
        self._seen: dict[str, Any] = {}
        self._notes: dict[str, str] = {}
        self._config: dict[str, Any] = {}
        self._summary: dict[str, Any] = {}
        self._clients: list[dict[str, Any]] = []
        self._log: list[str] = []
        self._forget_rounds()

    def _forget_rounds(self) -> None:
        self._offset, self._inode = 0, 0
        self._line = b""
        self._curves: dict[str, Curve] = {}
        self._last: dict[str, Any] = {}
        self._primary, self._language = "accuracy", False
        self._seconds: deque[float] = deque(maxlen=RECENT + 1)
        self._notes.pop("metrics.jsonl", None)

    def update(self, until: float) -> bool:
        """Read what has changed, and return whether anything has.

        Args:
            until: Time of ``time.monotonic`` after which the rest of a long history is left to the next call.
        """
        if not self.unread and self._fingerprint() == self._seen and self._current_state() == self.state:
            return False
        before, self._seen = self._seen, self._fingerprint()
        changed = {name for name in {*before, *self._seen} if self._seen.get(name) != before.get(name)}
        if "summary.json" in changed:
            changed.add("config.yaml")  # which is only read without a summary
        if self.unread:
            changed.add("metrics.jsonl")
        readers: dict[str, Callable[[], None]] = {
            "summary.json": self._read_summary,
            "config.yaml": self._read_config,
            "clients.jsonl": self._read_clients,
            "metrics.jsonl": lambda: self._read_rounds(until),
        }
        for name, read in readers.items():
            if name in changed:
                if name != "metrics.jsonl":  # a note on one of its lines remains
                    self._notes.pop(name, None)
                try:
                    read()
                except (UnskewError, OSError) as error:
                    self._notes[name] = str(error)
                    self.unread = self.unread and name != "metrics.jsonl"
        if changed & {*LOGS}:
            self._read_log()
        state = self._current_state()
        if state == self.state == "failed" and "metrics.jsonl" in changed and before:
            self._locks_known = False  # such as on a file system that keeps the locks of each machine to itself
            state = self._current_state()
        self.state = state
        return True

    def _fingerprint(self) -> dict[str, Any]:
        found = {}
        for name in (*LARGEST, "metrics.jsonl", *LOGS):
            try:
                status = os.lstat(self.folder / name)
            except OSError:
                continue
            found[name] = (status.st_ino, status.st_size, status.st_mtime_ns)
        return found

    def _check(self, name: str) -> bool:
        """Return whether a file exists; reject links, pipes, devices and large files."""
        path = self.folder / name
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not a regular file, so it is not read.")
        if status.st_size > LARGEST[name]:
            raise CheckpointError(f"{path} is not read, because it is larger than {LARGEST[name] >> 10} KiB.")
        return True

    def _read_summary(self) -> None:
        self._summary = {}
        if self._check("summary.json"):
            self._summary = read_summary(self.folder)

    def _read_config(self) -> None:
        self._config = {}
        if not self._summary and self._check("config.yaml"):
            self._config = load_yaml(self.folder / "config.yaml")

    def _read_clients(self) -> None:
        self._clients = []
        if self._check("clients.jsonl"):
            self._clients = read_clients(self.folder / "clients.jsonl")
            if self._local:
                own = self._summary.get("own_metrics", ())
                self._clients = [without_global_model(row, own) for row in self._clients]

    def _open(self, name: str) -> int:
        handle = os.open(self.folder / name, os.O_RDONLY | NOFOLLOW | getattr(os, "O_NONBLOCK", 0))
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise CheckpointError(f"{self.folder / name} is not a regular file, so it is not read.")
        return handle

    def _read_rounds(self, until: float) -> None:
        path = self.folder / "metrics.jsonl"
        if not path.is_symlink() and not path.exists():
            self._forget_rounds()
            return
        with os.fdopen(self._open(path.name), "rb") as file:
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
            self.unread = self._offset < status.st_size

    def _add(self, line: bytes, path: Path) -> None:
        try:
            (row,) = parse_rows([line], path)
            if not all(is_usable_number(row.get(name)) for name in PER_ROUND):
                raise CheckpointError(f"{path} is corrupted: it lacks rounds, or their traffic or times.")
        except CheckpointError as error:
            self._notes[path.name] = str(error)
            return
        self._primary, self._language = primary_metric_name(row), self._language or "perplexity" in row
        if self._local:
            row = without_global_model(row, self._summary.get("own_metrics", ()))
        self._last |= {name: row[name] for name in PER_ROUND}
        self._seconds.append(row["seconds"])
        for name, value in row.items():
            stored = name in self._curves or len(self._curves) < MOST_CURVES
            if stored and name not in PER_ROUND and is_usable_number(value):
                self._curves.setdefault(name, Curve()).add(row["round"], value)

    def _read_log(self) -> None:
        self._log = []
        for name in LOGS:
            if name not in self._seen:
                continue
            try:
                with os.fdopen(self._open(name), "rb") as file:
                    start = max(0, os.fstat(file.fileno()).st_size - LOG_BYTES)
                    file.seek(start)
                    lines = file.read(LOG_BYTES).splitlines()[1 if start else 0 :]
            except (CheckpointError, OSError) as error:
                self._notes[name] = str(error)
                continue
            self._log += [event_text(line) for line in lines[-LOG_LINES:]]

    @property
    def _local(self) -> bool:
        return is_local(self._text("method"))

    def _text(self, name: str) -> str:
        value = self._summary.get(name, self._config.get(name, ""))
        return value[:LONGEST_TEXT] if isinstance(value, str) else ""

    def _current_state(self) -> str:
        try:
            locked = is_locked(self.folder) if self._locks_known else None
        except OSError:
            locked = None
        if locked:
            return "running"
        if "summary.json" in self._seen:
            return "finished, diverged" if self._summary.get("diverged") is True else "finished"
        if locked is None:
            changed = self._seen.get("metrics.jsonl", (0, 0, 0))[2] / 1e9
            return "running" if time.time() - changed < max(SILENCE, 3 * self._pace()) else "stopped"
        return "failed" if os.path.lexists(self.folder / ".lock") else "stopped"

    def _pace(self) -> float:
        """Return the mean seconds of a recent round."""
        if len(self._seconds) > 1:
            return max(0.0, (self._seconds[-1] - self._seconds[0]) / (len(self._seconds) - 1))
        return self._seconds[0] / max(1, self._last["round"]) if self._seconds else 0.0

    def _total(self) -> int:
        total = self._summary.get("max_rounds", self._summary.get("rounds", self._config.get("rounds")))
        return total if isinstance(total, int) and not isinstance(total, bool) else 0

    def _metric(self, name: str) -> MetricInfo:
        return metric_info(name, self._summary.get("own_metrics"), self._text("positive") or None)

    def _objective(self) -> MetricInfo:
        name = metric_name(self._text("objective") or AUTO)
        judge = self._metric(self._primary if name == AUTO else name)
        return self._metric("loss") if self._language and judge.name in SCORES else judge

    def row(self) -> dict[str, Any]:
        """Return the row of the run in the table of runs, whose values are texts except the small curve."""
        judge, total = self._objective(), self._total()
        done, curve = self._last.get("round", 0), self._curves.get(judge.name)
        latest = best = ""
        if curve is not None:
            latest, best = value_text(judge, curve.last[1]), self._best(judge, curve)
        left = duration(self._pace() * (total - done)) if total > done > 0 else "evaluating" if done else ""
        texts = {
            "run": self.name,
            "method": self._text("method"),
            "data": self._text("data"),
            "state": self.state,
            "rounds": f"{done} of {total}" if total else str(done),
            "metric": judge.title,
            "latest": latest,
            "best": best,
            "up": format_megabytes(self._last.get("bytes_up")),
            "down": format_megabytes(self._last.get("bytes_down")),
            "elapsed": duration(self._last["seconds"]) if "seconds" in self._last else "",
            "left": left if self.state == "running" else "",
        }
        texts = {name: text[:LONGEST_TEXT] for name, text in texts.items()}
        small = [] if curve is None else curve.points(100 if judge.percent else 1, SMALL_CURVE)
        return {**texts, "notes": len(self._notes), "curve": small}

    def _best(self, judge: MetricInfo, curve: Curve) -> str:
        """Return the best value with its round, and with that of the summary if the model was changed after the rounds."""
        name = judge.name
        if not _is_known(name) and name not in self._summary.get("own_metrics", {}):
            return ""  # the direction of a custom metric is only known at the end
        number, value = curve.lowest if judge.lower_is_better else curve.highest
        final = self._summary.get(name)
        if is_usable_number(final) and judge.rank(final) > judge.rank(value):
            return f"{value_text(judge, final)} (final model)"
        return f"{value_text(judge, value)} (round {number})"

    def details(self) -> dict[str, Any]:
        """Return curves, clients, log and notes of the run; values in tables are texts."""
        judge = self._objective()
        first = (judge.name, validation_metric_name(judge.name), "loss", "train_loss")
        names = [name for name in dict.fromkeys((*first, *self._curves)) if name in self._curves]
        changed = self._seen.get("metrics.jsonl")
        when = "" if changed is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(changed[2] / 1e9))
        return {
            "about": [
                ["partition", self._text("partition")],
                ["model", self._text("model")],
                ["last round written", when],
            ],
            "curves": [self._curve(name) for name in names],
            "clients": self._client_table(judge),
            "log": [line[:LONGEST_TEXT] for line in self._log],
            "notes": list(self._notes.values()),
        }

    def _curve(self, name: str) -> dict[str, Any]:
        metric = self._metric(name)
        title = EVALUATED.get(name) or (axis_title(metric) if _is_known(name) else name)
        points = self._curves[name].points(100 if title.endswith("(%)") else 1)
        return {"name": name[:LONGEST_TEXT], "title": title[:LONGEST_TEXT], "points": points}

    def _client_table(self, judge: MetricInfo) -> dict[str, Any]:
        """Return the metrics of all clients, the worst client first."""
        own: Mapping[str, str] = self._summary.get("own_metrics", {})
        metrics = client_metrics(self._clients, own, self._text("positive") or None)
        scored = client_metric_name(judge.name, self._primary)
        metrics = dict(sorted(metrics.items(), key=lambda pair: pair[0] != scored)[:MOST_CURVES])

        def rank(row: dict[str, Any]) -> float:
            value = row.get(scored)
            return metrics[scored].rank(value) if is_usable_number(value) else math.inf

        rows = sorted(self._clients, key=rank)
        heads = [
            f"personal {info.title}" if name.startswith("personal_") else info.title for name, info in metrics.items()
        ]
        texts = [
            [client_label(row), str(row["samples"]), str(row.get("num_held_out", ""))]
            + [value_text(info, row[name]) if is_usable_number(row.get(name)) else "" for name, info in metrics.items()]
            for row in rows
        ]
        columns = ["client", "samples", "held-out samples", *heads]
        return {"columns": columns, "rows": [[text[:LONGEST_TEXT] for text in line] for line in texts]}


def _is_known(metric: str) -> bool:
    return metric in KNOWN_METRICS or metric.startswith(METRIC_PREFIXES)


def event_text(line: bytes) -> str:
    """Return a line of a log as text: an event of the audit log without its digest, another line as it is.

    >>> event_text(b'{"time": "12:00", "event": "joined", "previous": "0a"}'), event_text(b"The rate is high.")
    ('time=12:00  event=joined', 'The rate is high.')
    """
    try:
        event = parse_json(line)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        return line.decode(errors="replace")
    return "  ".join(f"{name}={value}" for name, value in event.items() if name != "previous")
