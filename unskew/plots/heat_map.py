"""Heat map of differences between methods and a baseline, over federations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from unskew.plots.figure import literal_text, new_figure, save_figure
from unskew.tasks.formatting import points_text
from unskew.tasks.primary_metric import MetricInfo

LIMIT = 10.0
"""Differences in points from which on colors do not change. For a metric that is not in percent, it is the largest
decided difference of its federation."""


def plot_heat_map(
    differences: Mapping[str, Mapping[str, float]],
    decided: Mapping[str, Mapping[str, bool]],
    methods: Sequence[str],
    title: str,
    path: Path,
    metrics: Mapping[str, MetricInfo] | None = None,
) -> Path:
    """Draw methods as rows and federations as columns; a difference that is not decided has no color.

    Args:
        differences: Difference to the baseline in points, by federation and method.
        decided: Whether the difference is decided, by federation and method.
        methods: Rows, from top to bottom.
        title: Title of the figure.
        path: Image file to write.
        metrics: Metric of each federation; None if all are in percent.
    """
    import numpy as np

    federations = list(differences)
    colors = np.full((len(methods), len(federations)), np.nan)
    figure, axes = new_figure(2.4 + 0.5 * len(federations), 1.8 + 0.27 * len(methods))
    axis = axes[0][0]
    for column, federation in enumerate(federations):
        metric = None if metrics is None else metrics[federation]
        scale = _points_per_unit(differences[federation], decided[federation], metric)
        for row, name in enumerate(methods):
            value = differences[federation].get(name)
            if value is None:
                axis.text(column, row, "·", ha="center", va="center", color="0.6", fontsize=7)
                continue
            if decided[federation][name]:
                colors[row, column] = scale * value
            if metric is not None and not metric.percent:
                text = points_text(metric, value, signed=True)
            else:
                text = f"{value:+.1f}" if abs(value) < 99.5 else f"{value:+.0f}"
            color = "white" if decided[federation][name] and abs(scale * value) > 0.6 * LIMIT else "black"
            axis.text(column, row, text, ha="center", va="center", color=color, fontsize=6.5)
    image = axis.imshow(colors, cmap="PuOr_r", vmin=-LIMIT, vmax=LIMIT, aspect="auto")
    in_percent = metrics is None or all(metrics[name].percent for name in federations)
    label = "points above the baseline" if in_percent else "better than the baseline, scaled by federation"
    figure.colorbar(image, ax=axis, label=label, extend="both")
    axis.set_xticks(range(len(federations)), [literal_text(name) for name in federations], rotation=60, ha="right")
    axis.set_yticks(range(len(methods)), [literal_text(name) for name in methods])
    axis.tick_params(labelsize=7, length=0)
    axis.set_title(title, fontsize=9)
    return save_figure(figure, path)


def _points_per_unit(differences: Mapping[str, float], decided: Mapping[str, bool], metric: MetricInfo | None) -> float:
    """Return the factor of a federation's differences for the colors."""
    if metric is None or metric.percent:
        return 1.0
    largest = max((abs(value) for name, value in differences.items() if decided[name]), default=0.0)
    return LIMIT / largest if largest else 1.0
