"""Functions shared by all figures."""

from __future__ import annotations

import errno
import io
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unskew.errors import ConfigError
from unskew.filesystem import create_file, disk_errors, make_folder, temporary_path, write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#808080")
"""Colors that color-blind readers can distinguish, on white and on black (Okabe and Ito 2008, and gray).

A method has the color at its position in the list of methods, in every figure and report.
"""
MARKERS = "osD^vPX*<>"


def new_figure(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Any, Any]:
    """Create a figure and its axes ``[rows][columns]``, without a display.

    Args:
        width: Width in inches.
        height: Height in inches.
        columns: Number of columns of axes.
        rows: Number of rows of axes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display and without pyplot's global state
    return figure, figure.subplots(rows, columns, squeeze=False)


def set_round_axis(axis: Any) -> None:
    """Label the x-axis as communication rounds, with integer ticks."""
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel("communication round")


def literal_text(text: str, most: int | None = None) -> str:
    """Return text that matplotlib shows literally, without math mode, cut to ``most`` characters.

    Args:
        text: Text to show.
        most: Maximum number of characters; None does not cut.

    >>> literal_text("to $10", 3)
    'to…'
    """
    shown = text if most is None or len(text) <= most else text[: most - 1] + "…"
    return shown.replace("$", r"\$")


def check_ending(figure: Any, path: Path) -> None:
    """Validate that the suffix of a file is a known image format.

    Args:
        figure: The figure.
        path: File to write.

    Raises:
        ConfigError: If it is not.
    """
    endings = figure.canvas.get_supported_filetypes()
    if path.suffix.lower()[1:] not in endings:
        raise ConfigError(f"{path} has no known suffix of an image; use one of {', '.join(sorted(endings))}.")


def check_place(path: Path) -> None:
    """Validate that a figure can be written, before the work for it is done.

    Args:
        path: File to write.

    Raises:
        ConfigError: If the suffix is not a known image format.
        CheckpointError: If the file cannot be written.
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


def save_or_return(figure: Any, path: str | Path | None) -> Path | Figure:
    """Write a figure and return the path; without a path, return the figure, which notebooks display as an image.

    Args:
        figure: The figure.
        path: Image file to write, or None.

    Raises:
        ConfigError: If the suffix is not a known image format.
    """
    if path is not None:
        return save_figure(figure, Path(path))
    figure._repr_png_ = partial(encode_figure, figure, "png")  # notebooks show other figures only if pyplot is set up
    shown: Figure = figure
    return shown


def encode_figure(figure: Any, form: str) -> bytes:
    """Return a figure as an image file. The same figure gives the same bytes.

    Args:
        figure: The figure.
        form: Format of the image, such as ``png``.
    """
    from matplotlib import rc_context

    data = io.BytesIO()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
    with rc_context({"svg.hashsalt": "unskew"}):  # constant identifiers instead of random ones
        figure.savefig(data, dpi=130, format=form, metadata=undated)
    return data.getvalue()


def save_figure(figure: Any, path: Path) -> Path:
    """Write a figure; the suffix of ``path`` determines the format. The same figure gives the same file.

    Args:
        figure: The figure.
        path: Image file to write.

    Raises:
        ConfigError: If the suffix is not a known image format.
    """
    check_ending(figure, path)
    make_folder(path.parent)
    write_atomic(path, encode_figure(figure, path.suffix.lower()[1:]))
    return path
