"""Keeps a run's figures: a line a round, the best round, checkpoints, and the summary at the end."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from unskew.errors import CheckpointError
from unskew.simulation.checkpoint import write_atomic

Row = dict[str, Any]


class Callback(Protocol):
    """Follows a run: the progress bar and the trackers are callbacks."""

    def start(self, config: dict[str, Any], rounds_done: int) -> None:
        """The run begins or goes on after ``rounds_done`` rounds."""

    def round(self, row: Row) -> None:
        """A round is finished; ``row`` is its line in ``metrics.jsonl``."""

    def end(self, summary: dict[str, Any]) -> None:
        """The run is finished."""


class Recorder:
    """The history of a run, in memory and (with a folder) in ``metrics.jsonl``.

    Args:
        folder: The run folder, or None to keep everything in memory.
        callbacks: Told of every round.
        target: Accuracy for which the first round is noted.
    """

    def __init__(self, folder: Path | None, callbacks: Sequence[Callback] = (), target: float | None = None):
        self.folder, self.callbacks, self.target = folder, callbacks, target
        self.history: list[Row] = []
        self._before = 0.0
        self._started = time.perf_counter()
        self._file = None
        if folder is not None:
            self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")

    @property
    def seconds(self) -> float:
        """Time spent on the run, over all its sessions."""
        return self._before + time.perf_counter() - self._started

    def resume(self, rounds: int, seconds: float) -> None:
        """Go back to the state after ``rounds`` rounds: later lines are dropped, the clock goes on from ``seconds``."""
        self._before = seconds
        if self.folder is None:
            return
        path = self.folder / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines()[:rounds] if path.exists() else []
        try:
            self.history = [json.loads(line) for line in lines]
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged; the run cannot be resumed with its history.") from error
        if len(self.history) < rounds:
            raise CheckpointError(f"{path} has {len(self.history)} lines, but the checkpoint is of round {rounds}.")
        self.close()
        write_atomic(path, "".join(line + "\n" for line in lines).encode())
        self._file = path.open("a", encoding="utf-8")

    def round(self, row: Row) -> None:
        """Note the figures of a round."""
        self.history.append(row)
        if self._file is not None:
            try:
                self._file.write(json.dumps(_finite(row)) + "\n")
                self._file.flush()
            except OSError as error:
                raise CheckpointError(
                    f"metrics.jsonl could not be written ({error.strerror}); make room and resume the run."
                ) from error
        for callback in self.callbacks:
            callback.round(row)

    def sync(self) -> None:
        """Make sure that the lines so far survive a power cut; called before each checkpoint."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def best(self) -> tuple[float, int]:
        """Best accuracy so far and the round it was reached in (counted from 1)."""
        scored = [(row["accuracy"], -row["round"]) for row in self.history if row["accuracy"] is not None]
        if not scored:
            return math.nan, 0
        accuracy, negative = max(scored)
        return accuracy, -negative

    def rounds_to(self, target: float) -> int | None:
        """The first round whose accuracy is at least ``target``; None if there is none."""
        reached = (r["round"] for r in self.history if r["accuracy"] is not None and r["accuracy"] >= target)
        return next(reached, None)


def _finite(row: Row) -> Row:
    """JSON has no NaN: a figure that is not finite becomes null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Write ``summary.json``."""
    write_atomic(folder / "summary.json", (json.dumps(_finite(summary), indent=2) + "\n").encode())
