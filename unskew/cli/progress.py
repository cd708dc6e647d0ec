"""Progress display in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Timer
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from unskew.cli.tables import columns_table
from unskew.cli.verbosity import LOUDNESS, log_event
from unskew.comparison.references import trains_global_model
from unskew.data.federation import Federation
from unskew.progress import PATIENCE, report_progress_to
from unskew.records.recorder import Callback, Row
from unskew.tasks.formatting import value_text
from unskew.tasks.primary_metric import metric_info, validation_metric_name


@contextmanager
def make_progress(console: Console, transient: bool = False) -> Iterator[Progress]:
    """Context manager for a live display with one line per run, which appears with the first line.

    Args:
        console: Console to print to.
        transient: Whether the display disappears at the end.

    Yields:
        The display.
    """
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        refresh_per_second=4,
        disable=LOUDNESS.quiet,
        transient=transient,
    )
    try:
        yield progress
    finally:
        if progress.live.is_started:
            progress.stop()


@contextmanager
def progress_while_waiting(title: str) -> Iterator[None]:
    """Context manager that shows progress of operations longer than two seconds, if standard error is a terminal."""
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        refresh_per_second=4,
        disable=LOUDNESS.quiet or not console.is_terminal,
        transient=True,
    )
    if progress.disable:
        yield
        return
    line = progress.add_task(title, total=None)  # the total may remain unknown
    timer = Timer(PATIENCE, progress.start)
    timer.daemon = True
    before = [""]

    def follow(text: str, done: float, total: float) -> None:
        if text != before[0]:
            progress.reset(line, description=f"{title}: {text}", total=total)
            before[0] = text
        progress.update(line, completed=done)

    timer.start()
    try:
        with report_progress_to(follow, after=0):
            yield
    finally:
        timer.cancel()
        timer.join()
        progress.stop()


@dataclass(eq=False)
class ProgressLine(Callback):
    """Callback that shows a run as one line of a live display.

    Attributes:
        progress: Live display.
        title: Text before the bar.
        transient: Remove the line when the run ends.
        warnings: Print the warnings of the run.
        named: Print the title before a warning, to distinguish several runs.
        columns: Print the role of each column of a table.
        held_out: Show the objective on the clients' held-out samples instead of metrics on the test set.
    """

    progress: Progress
    title: str
    transient: bool = False
    warnings: bool = True
    named: bool = False
    columns: bool = False
    held_out: bool = False

    def __post_init__(self) -> None:
        self.making: TaskID | None = None
        self.global_model = True

    def loaded(self, federation: Federation) -> None:
        """Print the roles of a table's columns."""
        if self.columns and federation.columns:
            self.progress.console.print(columns_table(federation.columns))

    def start(self, config: dict[str, Any], rounds_done: int) -> None:
        """Add the line to the display."""
        log_event("start", run=self.title, rounds=config["rounds"], rounds_done=rounds_done)
        self.judge = metric_info(config["objective"])
        self.global_model = trains_global_model(str(config.get("method", "")))
        self.progress.start()
        if self.making is not None:
            self.progress.remove_task(self.making)
            self.making = None
        self.line = self.progress.add_task(self.title, total=config["rounds"], completed=rounds_done, accuracy="")
        if rounds_done and not LOUDNESS.quiet:
            self.progress.console.print(f"{self.title}: resuming after round {rounds_done}", markup=False)

    def prepare(self, text: str, done: float, total: float) -> None:
        """Show a progress line for preparations before the first round."""
        self.progress.start()
        if self.making is None:
            self.making = self.progress.add_task(self.title, total=total, accuracy="")
        self.progress.update(self.making, description=f"{self.title}: {text}", completed=done, total=total)

    def round(self, row: Row) -> None:
        """Advance the line and show the metric of the round."""
        log_event("round", run=self.title, **row)
        judge = self.judge
        name, where = (validation_metric_name(judge.name), "held-out") if self.held_out else (judge.name, "test")
        if row.get(name) is not None and self.global_model:
            text = f"{where} {judge.title} {value_text(judge, row[name])}"
            self.progress.update(self.line, accuracy=text)
        self.progress.update(self.line, completed=row["round"])
        if LOUDNESS.verbose:
            usual = ("accuracy", "r2", "loss")
            own = dict.fromkeys([*(f"validation_{metric}" if self.held_out else metric for metric in usual), name])
            names = (*own, "train_loss") if self.global_model else ("train_loss",)
            values = (f"{metric} {row[metric]:.4f}" for metric in names if row.get(metric) is not None)
            text = f"{self.title}: round {row['round']}, {', '.join(values)}, {row['seconds']:.1f} s"
            self.progress.console.print(text, markup=False, highlight=False)

    def warn(self, text: str) -> None:
        """Print a warning."""
        log_event("warning", run=self.title, text=text)
        if self.warnings and not LOUDNESS.log_json:
            whose = f"{self.title}: " if self.named else ""
            self.progress.console.print(whose + text, style="yellow", markup=False, highlight=False)

    def end(self, summary: dict[str, Any]) -> None:
        """Keep the line with the final metric, or remove it if it is transient."""
        log_event("end", run=self.title)
        if self.transient:
            self.progress.remove_task(self.line)
