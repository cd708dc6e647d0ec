"""``unskew report``: write an HTML report on finished runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unskew.cli.common import console_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console


def report(
    runs: list[Path],
    out: Path | None = None,
    images: bool = True,
    title: Annotated[str | None, typer.Option(metavar="TEXT")] = None,
) -> None:
    """Write a report on finished runs as one self-contained HTML file.

    Options:
        runs: Run folders, comparison folders, or folders that contain such folders.
        out: File to write; by default report.html in the folder, or in the current folder for several folders.
        images: Show generated images next to real images of the clients, and test images with their masks.
        title: Title of the page.
    """
    from unskew.cli.progress import progress_while_waiting
    from unskew.reporting.report import report as write

    console = console_for()
    with broken_sections(console), progress_while_waiting("report"):
        file = write(runs, out, images=images, title=title)
    print_report_path(console, file)


@contextmanager
def broken_sections(console: Console) -> Iterator[None]:
    """Context manager that prints the warnings raised while a report is written."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        yield
    for warning in caught:
        console.print(f"Warning: {warning.message}", style="yellow", highlight=False, soft_wrap=True)


def print_report_path(console: Console, file: Path) -> None:
    """Print the path of the report, and a warning if it contains real images.

    Args:
        console: Console to print to.
        file: Path of the report.
    """
    from unskew.reporting.report import shows_real_images

    real = " It contains real images of clients; unskew report --no-images omits them."
    text = f"The report is {file}. Open it in a browser.{real if shows_real_images(file) else ''}"
    console.print(text, highlight=False, soft_wrap=True)


def report_after_runs(console: Console, runs: Sequence[Path], out: Path | None = None) -> None:
    """Write the report after the runs of a command.

    Without plotly and jinja2, only a hint is printed. If the report fails, a warning is printed.

    Args:
        console: Console to print to.
        runs: Run folders.
        out: File to write; None means the default.
    """
    from unskew.cli.progress import progress_while_waiting
    from unskew.errors import UnskewError
    from unskew.reporting.report import report as write
    from unskew.reporting.templating import MISSING

    try:
        if find_spec("plotly") is None or find_spec("jinja2") is None:
            console.print(MISSING, style="dim", highlight=False, soft_wrap=True)
        else:
            with broken_sections(console), progress_while_waiting("report"):
                file = write(list(runs), out)
            print_report_path(console, file)
    except (UnskewError, OSError) as error:
        console.print(f"Report not written: {error}", style="yellow", highlight=False, soft_wrap=True)
