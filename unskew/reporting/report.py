"""Implementation of ``unskew.report``, which writes one page about run folders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from unskew.comparison.comparison_result import Comparison
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
"""Marker near the start of every report; a file without it is not overwritten."""
REAL_IMAGES = ('<table data-name="beside">', '<table data-name="masks">')
"""Starts of the tables that show real images next to generated ones, or with their masks."""


def report(
    runs: str | Path | Result | Comparison | Sequence[str | Path | Result | Comparison],
    out: str | Path | None = None,
    *,
    images: bool = True,
    title: str | None = None,
) -> Path:
    """Write a report on runs as one HTML file that needs no network.

    Args:
        runs: One or several run folders, folders of comparisons, folders that contain such folders, or results of
            ``unskew.run`` and ``unskew.compare``.
        out: Output file; None for ``report.html`` in the folder, or in the working directory for several folders.
        images: Whether to include images: generated ones, real ones next to them, and test images with their masks, if the
            data are available.
        title: Title of the page; None for data, partition, clients and model.

    Returns:
        Path of the file.

    Raises:
        ConfigError: If a folder does not exist or contains no finished run, plotly is not installed, or ``out`` exists
            and is not a report.
        CheckpointError: If a file of a run is corrupted, or the disk is full.
    """
    plotly_script()  # report missing packages before the work
    folders = [_folder(source) for source in (runs if isinstance(runs, list | tuple) else [runs])]
    if not folders:
        raise ConfigError("Name at least one run folder, or a folder that contains run folders.")
    file = parse_path(out) if out is not None else Path(NAME) if len(folders) > 1 else folders[0] / NAME
    check_report_file(file)
    runs_read, notes = read_runs(folders)
    parts, more = group_runs(runs_read)
    make_folder(file.parent)
    # A name may contain surrogates, which cannot be encoded.
    write_atomic(file, render_report(parts, [*notes, *more], images, title).encode(errors="replace"))
    return file


def _folder(source: Any) -> Path:
    if isinstance(source, Result | Comparison):
        if source.folder is None:
            raise ConfigError(
                "A report reads the folder of a run, but this run was not written to a folder. Run it with out=..."
            )
        return source.folder
    if not isinstance(source, str | Path):
        raise ConfigError(f"A report needs folders, or results of run and compare, not {short_repr(source)}.")
    return parse_path(source)


def check_report_file(file: Path) -> None:
    """Validate that a file may be written: it does not exist, or is a report.

    Args:
        file: File to write.

    Raises:
        ConfigError: If the file exists and is something else.
    """
    if file.is_dir():
        raise ConfigError(f"{file} is a folder. Name the file of the report, such as {file / NAME}.")
    if file.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"A report is an HTML file: {file} must end with .html.")
    if file.exists():
        with file.open("rb") as existing_file:
            if MARK not in existing_file.read(4000):
                raise ConfigError(f"{file} exists and is not a report. Choose another file with --out.")


def shows_real_images(file: Path) -> bool:
    """Return whether a report contains real images of clients."""
    text = file.read_text(encoding="utf-8", errors="replace")
    return any(start in text for start in REAL_IMAGES)


def render_report(
    parts: Sequence[RunGroup], notes: Iterable[str], images: bool = True, title: str | None = None
) -> str:
    """Render the page; a method has the same color in all groups.

    Args:
        parts: Groups of runs.
        notes: Notes above the groups.
        images: Whether the page may contain images.
        title: Title of the page; None for a title based on the groups.
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
