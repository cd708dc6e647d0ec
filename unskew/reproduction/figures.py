"""Plots of a table's numbers: curves over rounds or traffic, or points over columns next to the paper's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unskew.plots.curves import plot_signs
from unskew.plots.figure import MARKERS, PALETTE, new_figure, save_figure, set_round_axis
from unskew.reproduction.outcomes import Outcome
from unskew.reproduction.preset import Preset, PresetCell
from unskew.reproduction.tables import TableEntry, expand_values, value_format

SIGNS = ("coefficients/positive", "coefficients/negative")
"""Values that are drawn together, as bars up and down for each row."""
MARKED = 50
"""Number of points of a curve above which markers would hide it."""


def draw_curves(preset: Preset, runs: Sequence[tuple[PresetCell, Outcome]], path: Path) -> Path:
    """Plot one panel per value and column: mean over seeds against rounds or traffic, standard deviation shaded.

    Values without a curve, such as a sum over the run, are omitted. If a value's ``_min`` and ``_max`` are also shown,
    they bound the shaded area and have no panels.

    Args:
        preset: Preset of the figure.
        runs: Cells with their outcomes.
        path: Image file to write.
    """
    values = expand_values(preset.values, [outcome["summary"] for _, outcome in runs])
    values = [value for value in values if value in SIGNS or any(_points(outcome, value) for _, outcome in runs)]
    banded = {value for value in values if {f"{value}_min", f"{value}_max"} <= set(values)}
    values = [value for value in values if value.removesuffix("_min").removesuffix("_max") not in banded - {value}]
    columns, rows = (list(dict.fromkeys(names)) for names in zip(*((c.column, c.row) for c, _ in runs), strict=True))
    barred = [(column, row) for column in columns for row in rows if set(SIGNS) <= set(values)]
    panels = [(column, value) for column in columns for value in values if value not in SIGNS or not barred]
    count = len(panels) + len(barred)
    wide = min(4, count)
    deep = -(-count // wide)
    figure, axes = new_figure(4.2 * wide, 3.4 * deep, wide, deep)
    for spare in axes.ravel()[count:]:
        spare.set_visible(False)
    for (column, row), axis in zip(barred, axes.ravel()[len(panels) :], strict=False):
        own_outcomes = [o for c, o in runs if (c.column, c.row) == (column, row)]
        (rounds, above), (_, below) = (_over_seeds(own_outcomes, value) for value in SIGNS)
        plot_signs(axis, rounds, above.mean(0).tolist(), below.mean(0).tolist())
        axis.set_title(f"{column}: {row}", fontsize=8)
    lines: dict[str, Any] = {}
    for (column, value), axis in zip(panels, axes.ravel(), strict=False):
        label, factor, _ = value_format(value)
        for of_one_number in (" after the last round", ", mean over rounds"):
            label = label.replace(of_one_number, "")
        for number, row in enumerate(rows):
            own_outcomes = [o for c, o in runs if (c.column, c.row) == (column, row)]
            rounds, points = _over_seeds(own_outcomes, value)
            if not rounds:
                continue
            x = _traffic(own_outcomes, rounds) if preset.curves == "traffic" else rounds
            points = factor * points
            mean, spread = points.mean(0), points.std(0, ddof=1) if len(points) > 1 else np.zeros(len(rounds))
            low, high = mean - spread, mean + spread
            if value in banded:
                low, high = (factor * _over_seeds(own_outcomes, f"{value}_{end}")[1].mean(0) for end in ("min", "max"))
            # By row, so that a row without this value does not shift the colors of the others.
            color = PALETTE[number % len(PALETTE)]
            mark = MARKERS[number % len(MARKERS)] if len(rounds) <= MARKED else None
            (line,) = axis.plot(
                x, mean, label=row, color=color, marker=mark, markersize=3, linewidth=1.5 if mark else 1
            )
            axis.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
            lines.setdefault(row, line)
        axis.set_title(f"{column}: {label}", fontsize=8)
        if preset.curves == "traffic":
            axis.set_xscale("log")  # the traffic of methods differs by factors
            axis.xaxis.set_major_formatter("{x:g}")
            axis.set_xlabel("MB up and down, per client")
        else:
            set_round_axis(axis)
        axis.grid(alpha=0.3)
    shown_rows = [row for row in rows if row in lines]
    axes[0][0].legend([lines[row] for row in shown_rows], shown_rows, frameon=False, fontsize=8)
    return save_figure(figure, path)


def _over_seeds(outcomes: Sequence[Outcome], value: str) -> tuple[list[int], np.ndarray]:
    """Return the ``T`` rounds that all seeds have, and the values there, ``[seeds, T]``."""
    curves = [_points(outcome, value) for outcome in outcomes]
    rounds = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    return rounds, np.array([[curve[t] for t in rounds] for curve in curves])


def _traffic(outcomes: Sequence[Outcome], rounds: Sequence[int]) -> list[float]:
    """Return the MB that a client has sent and received by each round, mean over seeds."""
    sent = [
        [_points(outcome, "bytes")[t] / outcome["summary"]["clients"] / 1e6 for t in rounds] for outcome in outcomes
    ]
    return [float(mb) for mb in np.mean(sent, 0)]


def _points(outcome: Outcome, value: str) -> dict[int, float]:
    curve = outcome["curve"]
    pairs = zip(curve["round"], curve.get(value, []), strict=False)
    return {t: y for t, y in pairs if y is not None}


def draw_points(preset: Preset, entries: Sequence[TableEntry], path: Path) -> Path:
    """Plot one panel per value: mean and standard deviation over seeds, as lines per row over columns, or one over rows.

    Hollow markers are the paper's numbers.

    Args:
        preset: Preset of the table.
        entries: Entries of the table.
        path: Image file to write.
    """
    entries = [e for e in entries if e.against is None]
    values = list(dict.fromkeys(e.value for e in entries))
    figure, axes = new_figure(6 * max(1, len(values)), 4, max(1, len(values)), 1)
    columns = list(dict.fromkeys(e.column for e in entries))
    for value, axis in zip(values, axes[0], strict=False):
        some = [e for e in entries if e.value == value]
        rows = list(dict.fromkeys(e.row for e in some))
        over_columns = len(columns) > 2
        lines, positions = (rows, columns) if over_columns else (columns, rows)
        for number, line in enumerate(lines):
            own_entries = [e for e in some if (e.row if over_columns else e.column) == line]
            x = [positions.index(e.column if over_columns else e.row) for e in own_entries]
            style: dict[str, Any] = {"color": PALETTE[number % len(PALETTE)], "marker": MARKERS[number % len(MARKERS)]}
            axis.errorbar(
                x, [e.mean for e in own_entries], [e.std for e in own_entries], label=line, capsize=3, **style
            )
            papers = [
                (index, e.published)
                for index, e in zip(x, own_entries, strict=True)
                if e.published is not None and not e.setting
            ]
            if papers:
                axis.plot(*zip(*papers, strict=True), linestyle=":", alpha=0.6, markerfacecolor="none", **style)
        axis.set_xticks(range(len(positions)), positions, rotation=30, ha="right", fontsize=8)
        axis.set_ylabel(value_format(value)[0])
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    return save_figure(figure, path)
