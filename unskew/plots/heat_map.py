"""Heat map of differences between methods and a baseline, over federations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from unskew.plots.figure import literal_text, new_figure, save_figure

LIMIT = 10.0
"""Differences in points from which on colors do not change."""


def plot_heat_map(
    differences: Mapping[str, Mapping[str, float]],
    decided: Mapping[str, Mapping[str, bool]],
    methods: Sequence[str],
    title: str,
    path: Path,
) -> Path:
    """Draw methods as rows and federations as columns; a difference that is not decided has no color.

    Args:
        differences: Difference to the baseline in points, by federation and method.
        decided: Whether the difference is decided, by federation and method.
        methods: Rows, from top to bottom.
        title: Title of the figure.
        path: Image file to write.
    """
    import numpy as np

    federations = list(differences)
    colors = np.full((len(methods), len(federations)), np.nan)
    figure, axes = new_figure(2.4 + 0.5 * len(federations), 1.8 + 0.27 * len(methods))
    axis = axes[0][0]
    for column, federation in enumerate(federations):
        for row, name in enumerate(methods):
            value = differences[federation].get(name)
            if value is None:
                axis.text(column, row, "·", ha="center", va="center", color="0.6", fontsize=7)
                continue
            if decided[federation][name]:
                colors[row, column] = value
            text = f"{value:+.1f}" if abs(value) < 99.5 else f"{value:+.0f}"
            color = "white" if decided[federation][name] and abs(value) > 0.6 * LIMIT else "black"
            axis.text(column, row, text, ha="center", va="center", color=color, fontsize=6.5)
    image = axis.imshow(colors, cmap="PuOr_r", vmin=-LIMIT, vmax=LIMIT, aspect="auto")
    figure.colorbar(image, ax=axis, label="points above the baseline", extend="both")
    axis.set_xticks(range(len(federations)), [literal_text(name) for name in federations], rotation=60, ha="right")
    axis.set_yticks(range(len(methods)), [literal_text(name) for name in methods])
    axis.tick_params(labelsize=7, length=0)
    axis.set_title(title, fontsize=9)
    return save_figure(figure, path)
