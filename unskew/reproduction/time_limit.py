"""Time limit of a table: which runs may start, when a run stops, and how long the other runs will take."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from unskew.config.experiment import Experiment
from unskew.records.recorder import Callback, Row
from unskew.reproduction.outcomes import experiment_hash
from unskew.runs.cost import check_budget, duration
from unskew.simulation.round_loop import RunInterrupted


class TimeIsOverError(RunInterrupted):
    """Raised by the callback of a run when the time of its table is over; the run saves its last round."""


@dataclass
class TimeLimit:
    """Time in which a table's runs are executed, from the creation of this object.

    Attributes:
        minutes: Length of the time.
        clock: Returns the current time in seconds.
    """

    minutes: float
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        check_budget(self.minutes)
        self._end = self.clock() + 60 * self.minutes
        self.begin()

    def begin(self) -> None:
        """Note the time that is left for runs, after the data were loaded."""
        self._whole = self.remaining

    @property
    def remaining(self) -> float:
        """Remaining time in seconds."""
        return self._end - self.clock()

    def admits(self, seconds: float | None) -> bool:
        """Return whether a new run may start: if it ends in time, or is longer than the whole time for runs.

        Args:
            seconds: Expected duration of the run; None if it is unknown.
        """
        left = self.remaining
        return left > 0 and (seconds is None or seconds <= left or seconds > self._whole)


class StopInTime(Callback):
    """Callback that ends a run after a round if the next round, taking as long, would not end in time."""

    def __init__(self, limit: TimeLimit):
        self.limit = limit

    def prepare(self, text: str, done: float, total: float) -> None:
        """Stop the preparation of a run."""
        if self.limit.remaining <= 0:
            raise TimeIsOverError

    def start(self, config: dict[str, Any], rounds_done: int) -> None:
        """Start to measure the duration of rounds."""
        self.rounds: int = config["rounds"]
        self.before = self.limit.remaining

    def round(self, row: Row) -> None:
        """Stop the run, unless this was its last round."""
        left = self.limit.remaining
        took, self.before = self.before - left, left
        if left <= took and row["round"] < self.rounds:
            raise TimeIsOverError


@dataclass
class RunSpeeds:
    """Seconds per round of runs that were executed on this machine, finished or not."""

    _known: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, config: Experiment, parent: Experiment | None, rounds: int, seconds: float) -> None:
        """Add a run, or the rounds of it that are finished.

        Args:
            config: Configuration of the run.
            parent: Configuration of the run that it starts from, or None.
            rounds: Number of its own rounds.
            seconds: Duration of these rounds.
        """
        if rounds > 0 and seconds > 0:
            for key in ("", config.method, _setting(config, parent)):
                self._known[key].append(seconds / rounds)

    def seconds(self, config: Experiment, parent: Experiment | None, rounds: int, guess: bool = False) -> float | None:
        """Return the expected duration of rounds of a run, or None if it is unknown.

        It is that of runs that differ only in the seed; without any, of runs of the same method.

        Args:
            config: Configuration of the run.
            parent: Configuration of the run that it starts from, or None.
            rounds: Number of rounds.
            guess: Whether the mean of all runs is used if there are no such runs.
        """
        keys = (_setting(config, parent), config.method, *([""] if guess else []))
        found = next((self._known[key] for key in keys if key in self._known), None)
        return None if found is None else rounds * fmean(found)


def _setting(config: Experiment, parent: Experiment | None) -> str:
    """Return an identity of a run that does not depend on its seed."""
    first = {"seed": 0}
    return experiment_hash(config.model_copy(update=first), parent and parent.model_copy(update=first))


@dataclass(frozen=True)
class TableProgress:
    """State of a table's runs.

    Attributes:
        finished: Number of finished runs.
        in_progress: Finished rounds and all rounds of interrupted runs, by title.
        not_started: Number of runs that have not started.
        seconds: Expected duration of the rest; None if it is unknown.
    """

    finished: int
    in_progress: dict[str, tuple[int, int]]
    not_started: int
    seconds: float | None

    @property
    def is_complete(self) -> bool:
        """Whether all runs are finished."""
        return not self.in_progress and not self.not_started

    def __str__(self) -> str:
        text = f"Finished: {self.finished} of {self.finished + len(self.in_progress) + self.not_started} runs."
        if self.in_progress:
            runs = (f"{title} ({done} of {rounds} rounds)" for title, (done, rounds) in self.in_progress.items())
            text += f" In progress: {'; '.join(runs)}."
        text += f" Not started: {self.not_started}." if self.not_started else ""
        if self.is_complete:
            return text
        rest = (
            " How long they take is not known yet."
            if self.seconds is None
            else f" About {duration(self.seconds)} left."
        )
        return text + rest
