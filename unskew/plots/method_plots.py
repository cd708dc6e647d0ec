"""Plots of single methods, by name of the server rule, from the metrics of all rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

History = Sequence[dict[str, Any]]


def draw_coefficients(history: History, folder: Path) -> None:
    """Plot the numbers of positive and negative coefficients per round as ``coefficients.png`` (Feddle, Figure 6).

    Args:
        history: Metrics of each round.
        folder: Run folder.
    """
    from unskew.plots.curves import plot_signs
    from unskew.plots.figure import new_figure, save_figure

    names = ("round", "coefficients/positive", "coefficients/negative")
    rows = [row for row in history if names[1] in row]
    if rows:
        figure, ((axis,),) = new_figure(6, 3.4)
        plot_signs(axis, *([row[name] for row in rows] for name in names))
        save_figure(figure, folder / "coefficients.png")


METHOD_PLOTS: dict[str, Callable[[History, Path], None]] = {"feddle": draw_coefficients}
"""Functions that draw the plots of a method into the run folder, by name of the server rule."""
