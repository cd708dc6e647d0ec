"""``unskew report``: run folders in, one page out."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unskew.cli.common import console_for
from unskew.filesystem import parse_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, folders of comparisons, or folders that hold some.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            parser=parse_path,
            metavar="PATH",
            help="The file; report.html in the folder, or here for several folders.",
        ),
    ] = None,
    images: Annotated[
        bool, typer.Option("--images/--no-images", help="Generated images next to real images of the clients.")
    ] = True,
    title: Annotated[str | None, typer.Option("--title", metavar="TEXT", help="Title of the page.")] = None,
) -> None:
    """Write a report on finished runs: one HTML file that needs no network."""
    from unskew.cli.progress import progress_while_waiting
    from unskew.reporting.report import report as write

    console = console_for()
    with broken_sections(console), progress_while_waiting("report"):
        file = write(runs, out, images=images, title=title)
    print_report_path(console, file)


@contextmanager
def broken_sections(console: Console) -> Iterator[None]:
    """Print the warnings that writing a report gives, a line each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        yield
    for warning in caught:
        console.print(f"Warning: {warning.message}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def print_report_path(console: Console, file: Path) -> None:
    """Tell where the report is, and what not everybody should see.

    Args:
        console: Console that prints.
        file: The report.
    """
    from unskew.reporting.report import shows_real_images

    real = " It holds real images of a client's data; unskew report --no-images leaves them out."
    text = f"The report is {file}: open it in a browser; it needs no network.{real if shows_real_images(file) else ''}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def report_after_runs(console: Console, runs: Sequence[Path], out: Path | None = None) -> None:
    """Write the report after the runs of a command.

    Without plotly, print a hint; a failing report does not affect the results.

    Args:
        console: Console that prints.
        runs: Run folders.
        out: File to write; None: the default.
    """
    from unskew.cli.progress import progress_while_waiting
    from unskew.errors import UnskewError
    from unskew.reporting.report import report as write
    from unskew.reporting.templating import MISSING

    try:
        if find_spec("plotly") is None or find_spec("jinja2") is None:
            console.print(MISSING, style="dim", markup=False, highlight=False, soft_wrap=True)
        else:
            with broken_sections(console), progress_while_waiting("report"):
                file = write(list(runs), out)
            print_report_path(console, file)
    except (UnskewError, OSError) as error:
        console.print(f"There is no report: {error}", style="yellow", markup=False, highlight=False, soft_wrap=True)
