"""Common functions of all figures."""

from __future__ import annotations

import errno
import io
from pathlib import Path
from typing import Any

from unskew.errors import ConfigError
from unskew.filesystem import create_file, disk_errors, make_folder, temporary_path, write_atomic

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#808080")
"""Colors that color-blind readers can tell apart, on white and on black (Okabe and Ito 2008, and gray).

A method has the one at its place in the list of methods, in every figure and every report.
"""
MARKERS = "osD^vPX*<>"


def new_figure(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Any, Any]:
    """A figure of so many inches and its axes ``[rows][columns]``, without a screen.

    Args:
        width: Width in inches.
        height: Height in inches.
        columns: Number of columns of axes.
        rows: Number of rows of axes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a screen and without pyplot's global state
    return figure, figure.subplots(rows, columns, squeeze=False)


def set_round_axis(axis: Any) -> None:
    """Communication rounds from left to right; ticks are integers, as rounds are."""
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel("communication round")


def literal_text(text: str, most: int | None = None) -> str:
    """A text that is shown as it is, without formulas, and cut to ``most`` characters.

    Args:
        text: Text to show.
        most: Largest number of characters; None: all.

    >>> literal_text("to $10", 3)
    'to…'
    """
    shown = text if most is None or len(text) <= most else text[: most - 1] + "…"
    return shown.replace("$", r"\$")


def check_ending(figure: Any, path: Path) -> None:
    """Refuse a file of no known kind.

    Args:
        figure: The figure.
        path: File to write.

    Raises:
        ConfigError: The file name does not end with the suffix of an image.
    """
    endings = figure.canvas.get_supported_filetypes()
    if path.suffix.lower()[1:] not in endings:
        raise ConfigError(f"{path} has no known ending for a figure; use one of {', '.join(sorted(endings))}.")


def check_place(path: Path) -> None:
    """Find out whether a figure can be written, before the work for it is done.

    Raises:
        ConfigError: The file name does not end with the suffix of an image.
        CheckpointError: The file cannot be written there.
    """
    check_ending(new_figure(1, 1)[0], path)
    new_folders = make_folder(path.parent)
    fresh = temporary_path(path)
    try:
        with disk_errors(path):
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "it is a folder")
            create_file(fresh).close()
            fresh.unlink()
    finally:
        for folder in new_folders:
            folder.rmdir()


def save_figure(figure: Any, path: Path) -> Path:
    """Write a figure; the ending of ``path`` decides the format.

    Args:
        figure: The figure.
        path: File to write.

    Raises:
        ConfigError: The file name does not end with the suffix of an image.
    """
    check_ending(figure, path)
    make_folder(path.parent)
    data = io.BytesIO()
    figure.savefig(data, dpi=130, format=path.suffix.lower()[1:])
    write_atomic(path, data.getvalue())
    return path
