"""A run's progress on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
from unskew.cli.verbosity import LOUDNESS
from unskew.comparison.references import is_local
from unskew.config.metrics import AUTO, metric_name
from unskew.data.federation import Federation
from unskew.progress import PATIENCE, report_progress_to
from unskew.records.recorder import Callback, Row
from unskew.tasks.formatting import value_text
from unskew.tasks.primary_metric import SCORES, metric_info, primary_metric_name, validation_metric_name


@contextmanager
def make_progress(console: Console, transient: bool = False) -> Iterator[Progress]:
    """A live display with one line per run; it appears with the first, and goes at the end if it is ``transient``.

    Args:
        console: Console that prints.
        transient: Whether the display disappears at the end.
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
    """Context manager that shows progress of operations longer than two seconds, with the time left, on standard error.

    Nothing is shown in a pipe.
    """
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
    line = progress.add_task(title, total=None)  # some work has no parts that could be counted
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


class ProgressLine(Callback):
    """A callback: one line of a live display.

    Args:
        progress: The display.
        title: Text before the bar.
        transient: Remove the line when the run ends.
        warnings: Print what the run warns of.
        named: Say the title before a warning, as one of several runs.
        columns: Show what is done to each column of a table.
        held_out: Show what clients hold out, by which a run is judged, and nothing of the test set.
    """

    def __init__(
        self,
        progress: Progress,
        title: str,
        transient: bool = False,
        warnings: bool = True,
        named: bool = False,
        columns: bool = False,
        held_out: bool = False,
    ):
        self.progress, self.title, self.transient = progress, title, transient
        self.warnings, self.named, self.columns, self.held_out = warnings, named, columns, held_out
        self.making: TaskID | None = None
        self.objective = AUTO
        self.global_model = True

    def loaded(self, federation: Federation) -> None:
        """Print which columns of a table are used."""
        if self.columns and federation.columns:
            self.progress.console.print(columns_table(federation.columns))

    def start(self, config: dict[str, Any], rounds_done: int) -> None:
        """Show the line."""
        self.objective = metric_name(config.get("objective", AUTO))
        self.global_model = not is_local(str(config.get("method", "")))
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
        """Advance it."""
        judge = metric_info(primary_metric_name(row) if self.objective == AUTO else self.objective)
        if "perplexity" in row and judge.name in SCORES and not self.held_out:
            judge = metric_info("loss")
        name, where = (validation_metric_name(judge.name), "held-out") if self.held_out else (judge.name, "test")
        if row.get(name) is not None and self.global_model:
            text = f"{where} {judge.title} {value_text(judge, row[name])}"
            self.progress.update(self.line, accuracy=text)
        self.progress.update(self.line, completed=row["round"])
        if LOUDNESS.verbose:
            usual = ("accuracy", "r2", "loss")
            own = dict.fromkeys([*(f"validation_{metric}" if self.held_out else metric for metric in usual), name])
            names = (*own, "train_loss") if self.global_model else ("train_loss",)
            figures = (f"{metric} {row[metric]:.4f}" for metric in names if row.get(metric) is not None)
            text = f"{self.title}: round {row['round']}, {', '.join(figures)}, {row['seconds']:.1f} s"
            self.progress.console.print(text, markup=False, highlight=False)

    def warn(self, text: str) -> None:
        """Something the user should know."""
        if self.warnings:
            whose = f"{self.title}: " if self.named else ""
            self.progress.console.print(whose + text, style="yellow", markup=False, highlight=False)

    def end(self, summary: dict[str, Any]) -> None:
        """Leave the final figures, or remove the line."""
        if self.transient:
            self.progress.remove_task(self.line)
