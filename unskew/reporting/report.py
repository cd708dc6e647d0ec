"""``unskew.report``: run folders in, one page out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from unskew.comparison.compare import Comparison
from unskew.errors import ConfigError, short_repr
from unskew.filesystem import make_folder, parse_path, write_atomic
from unskew.progress import report_progress
from unskew.records.result import Result
from unskew.reporting.chart_data import method_style
from unskew.reporting.page import plotly_script, render_file
from unskew.reporting.run_groups import RunGroup, group_runs
from unskew.reporting.run_reader import read_runs
from unskew.reporting.sections import group_content, group_sections, summary_line

NAME = "report.html"
MARK = b'<meta name="generator" content="unskew '
"""Marker near the beginning of every report; a file without it is not overwritten."""
REAL_IMAGES = '<table data-name="beside">'
"""Start of the table that holds real images beside generated ones."""


def report(
    runs: str | Path | Result | Comparison | Sequence[str | Path | Result | Comparison],
    out: str | Path | None = None,
    *,
    images: bool = True,
    title: str | None = None,
) -> Path:
    """Write a report on runs: one HTML file that holds everything and needs no network.

    Args:
        runs: Run folders, folders of comparisons, folders that hold some, or what ``unskew.run`` and ``unskew.compare``
            gave, one or several.
        out: The file; if None, ``report.html`` in the folder, or where one works for several folders.
        images: Whether it may hold images: those that clients made, and, where the data of a run are at hand, real ones
            beside them.
        title: Title of the page; data, partition, clients and model if None.

    Returns:
        The file.

    Raises:
        ConfigError: A folder is not there or holds no finished run, plotly is not installed, or ``out`` is another file.
        CheckpointError: A file of a run is corrupted, or the disk is full.
    """
    plotly_script()  # what is missing is told before the work
    folders = [_folder(source) for source in (runs if isinstance(runs, list | tuple) else [runs])]
    if not folders:
        raise ConfigError("Name at least one run folder, or a folder that holds some.")
    file = parse_path(out) if out is not None else Path(NAME) if len(folders) > 1 else folders[0] / NAME
    check_report_file(file)
    runs_read, notes = read_runs(folders)
    parts, more = group_runs(runs_read)
    make_folder(file.parent)
    # A name may hold what no text file can, such as half a character.
    write_atomic(file, render_report(parts, [*notes, *more], images, title).encode(errors="replace"))
    return file


def _folder(source: Any) -> Path:
    if isinstance(source, Result | Comparison):
        if source.folder is None:
            raise ConfigError(
                "A report reads the folder of a run, and this one was written to none: run it with out=..."
            )
        return source.folder
    if not isinstance(source, str | Path):
        raise ConfigError(f"A report is made of folders, or of what run and compare gave, not of {short_repr(source)}.")
    return parse_path(source)


def check_report_file(file: Path) -> None:
    """Refuse to write over what is not a report.

    Raises:
        ConfigError: The file is there and is something else, or is a folder.
    """
    if file.is_dir():
        raise ConfigError(f"{file} is a folder; name the file of the report, such as {file / NAME}.")
    if file.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"A report is an HTML file: {file} must end with .html.")
    if file.exists():
        with file.open("rb") as there:
            if MARK not in there.read(4000):
                raise ConfigError(f"{file} is there and is not a report; choose another file with --out.")


def shows_real_images(file: Path) -> bool:
    """Return whether a report has real images of clients' data."""
    return REAL_IMAGES in file.read_text(encoding="utf-8", errors="replace")


def render_report(
    parts: Sequence[RunGroup], notes: Iterable[str], images: bool = True, title: str | None = None
) -> str:
    """Render the page of these parts; a method has one color in all of them.

    Args:
        parts: Groups of runs.
        notes: Notes above the groups.
        images: Whether the page may contain images.
        title: Title of the page; None: made from the groups.
    """
    labels = list(dict.fromkeys(method_runs.label for part in parts for method_runs in part.series))
    styles = {label: method_style(number) for number, label in enumerate(labels)}
    data = [group_content(part, styles) for part in parts]
    runs = sum(len(method_runs.runs) for part in parts for method_runs in part.series)
    title = title or (f"Report: {parts[0].title}" if len(parts) == 1 else f"Report on {runs} runs")
    entries = []
    for number, (part, shown) in enumerate(zip(parts, data, strict=True)):
        report_progress("parts written", number, len(parts))
        sections = group_sections(part, shown, f"part-{number}", images)
        entries.append({"title": part.title, "summary": summary_line(part), "sections": sections})
    return render_file(title, list(notes), entries, {"parts": data})
