"""Output of ``unskew diagnose``: the advice and its validation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from unskew.cli.progress import ProgressLine, make_progress
from unskew.tasks.formatting import format_number

if TYPE_CHECKING:
    from unskew.config.experiment import Experiment
    from unskew.diagnosis.advice import Advice
    from unskew.diagnosis.successive_halving import AdviceTrial
    from unskew.records.recorder import Callback


class HalvingRound(ProgressLine):
    """Progress line without the message that a run is resumed, because every run of a trial is."""

    def start(self, config: dict[str, Any], rounds_done: int) -> None:
        """Add the line to the display."""
        super().start(config, 0)
        self.progress.update(self.line, completed=rounds_done)


def print_advice(console: Console, advice: Advice, command: str) -> None:
    """Print the ranked methods with reasons, incompatible methods, notes, and a command that compares the methods.

    Args:
        console: Console to print to.
        advice: Advice on methods.
        command: Command that compares the suggested methods.
    """
    from unskew.diagnosis.evidence import reliability
    from unskew.runs.cost import duration

    def say(text: str, indent: int = 0, style: str | None = None) -> None:
        from rich.padding import Padding
        from rich.text import Text

        console.print(Padding(Text(text, style=style or ""), (0, 0, 0, indent)))

    console.print()
    if advice.caveat:
        say(advice.caveat)
    groups = (
        ("Methods worth comparing with fedavg", advice.suggestions),
        ("On the clients' own data, where each client may have its own model", advice.personal),
    )
    for title, suggestions in groups:
        if not suggestions:
            continue
        say(title, style="italic")
        has_costs = any(suggestion.seconds is not None for suggestion in suggestions)
        for number, suggestion in enumerate(suggestions, 1):
            time = ", time not estimated" if has_costs else ""
            if suggestion.seconds is not None:
                time = f", about {duration(suggestion.seconds)} ({suggestion.cost:.2g} × fedavg)"
            sent = "" if suggestion.megabytes is None else f", {suggestion.megabytes:.3g} MB in total"
            say(f"{number}. {suggestion.method}{time}{sent}", style="bold")
            for text in (suggestion.reason, *suggestion.cautions):
                say(text, 3)
    if advice.suggestions and not advice.caveat:
        say(f"{reliability('global')} See docs/advice.md.")
    if advice.excluded:
        say("Not applicable", style="italic")
        for left in advice.excluded:
            # A reason often starts with the method's name.
            name = left.method.partition(":")[0]
            text = left.reason if left.reason.startswith(name) else f"{left.method}: {left.reason}"
            say(text, 3)
    for text in advice.notes:
        say(text)
    if len(advice.methods) > 1:
        say("To compare the best methods with fedavg:", style="italic")
        console.print(command, highlight=False, soft_wrap=True)


@contextmanager
def follower(console: Console) -> Iterator[Callable[[str, Experiment], Sequence[Callback]]]:
    """Context manager for a live display with one line per run."""
    with make_progress(console) as progress:
        yield lambda name, config: [
            HalvingRound(progress, f"{name} to round {config.rounds}", transient=True, warnings=False)
        ]


def print_trial(console: Console, trial: AdviceTrial) -> None:
    """Print one row per advised method, and a summary of how often the advice was right.

    Args:
        console: Console to print to.
        trial: Result of validating the advice.
    """
    from unskew.diagnosis.successive_halving import VERDICTS

    table = Table(title="Validation of the advice", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("method", "rounds", f"test {trial.figure}", "fedavg's", "advice"):
        table.add_column(name, justify="left" if name in ("method", "advice") else "right", overflow="fold")
    for tried in trial.tried:
        values = (format_number(value) for value in (tried.accuracy, tried.baseline))
        table.add_row(tried.method, str(tried.rounds), *values, VERDICTS[tried.held])
    console.print(table)
    console.print(trial.verdict(), highlight=False)
