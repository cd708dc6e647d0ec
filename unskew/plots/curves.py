"""Figures of convergence, coefficients and label distributions."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unskew.plots.figure import MARKERS, PALETTE, literal_text, new_figure, save_or_return, set_round_axis
from unskew.tasks.intervals import wilson_interval
from unskew.tasks.primary_metric import MetricInfo
from unskew.tasks.registry import objective_metric

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = 24
"""Maximum number of characters of a client's name in a figure."""


def rows_of_common_rounds(histories: Sequence[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Return the rows of each seed in the rounds that all seeds have.

    Args:
        histories: Rows of each seed in which a metric is defined.
    """
    by_round = [{row["round"]: row for row in history} for history in histories]
    common = sorted(set(by_round[0]).intersection(*by_round))
    return [[rows[round] for round in common] for rows in by_round]


def plot_convergence(
    runs: Mapping[str, Sequence[list[dict[str, Any]]]],
    path: str | Path | None,
    objective: MetricInfo | None = None,
    without_traffic: Collection[str] = (),
) -> Path | Figure:
    """Plot the objective against rounds and traffic: mean and std over seeds.

    Args:
        runs: History of each seed, by method.
        path: Image file to write; its suffix determines the format. None returns the figure.
        objective: Metric that judges the runs; that of ``objective: auto`` if None.
        without_traffic: Names in ``runs`` that are plotted only against rounds.

    Returns:
        The path of the image, or the figure.
    """
    figure, ((left, right),) = new_figure(10, 4, columns=2)
    names = {name for histories in runs.values() for h in histories for row in h[:1] for name in row}
    shown = objective or objective_metric(dict.fromkeys(names))
    factor = 100 if shown.percent else 1
    title = f"test {shown.title}"
    title = f"{title} (%)" if shown.percent else title
    for number, (name, histories) in enumerate(runs.items()):
        scored = [[row for row in h if row.get(shown.name) is not None] for h in histories]
        scored = rows_of_common_rounds(scored)
        count = len(scored[0])
        if not count:
            continue
        rounds = np.array([row["round"] for row in scored[0]])
        values = factor * np.array([[row[shown.name] for row in h] for h in scored])
        traffic = np.array([[(r["bytes_up"] + r["bytes_down"]) / 1e6 for r in h] for h in scored]).mean(0)
        mean, spread = values.mean(0), values.std(0, ddof=1) if len(values) > 1 else np.zeros(count)
        # Curves often overlap: different markers at different positions keep each of them visible.
        style: dict[str, Any] = {
            "color": PALETTE[number % len(PALETTE)],
            "marker": MARKERS[number % len(MARKERS)],
            "markevery": (number % max(1, count // 8), max(1, count // 8)),
        }
        for axis, x in ((left, rounds), (right, traffic)):
            if axis is right and name in without_traffic:
                continue
            axis.plot(x, mean, label=literal_text(name), linewidth=1.4, markersize=5, alpha=0.9, **style)
            axis.fill_between(x, mean - spread, mean + spread, alpha=0.1, color=style["color"], linewidth=0)
    set_round_axis(left)
    right.set_xlabel("traffic, up and down (MB)")
    for axis in (left, right):
        axis.set_ylabel(literal_text(title))
        axis.grid(alpha=0.3)
    if left.lines:
        left.legend(frameon=False)
    else:  # for example if a class of the objective has no test samples
        left.set_title("undefined in every round")
    return save_or_return(figure, path)


def plot_signs(axis: Any, rounds: Sequence[int], above: Sequence[float], below: Sequence[float]) -> None:
    """Plot an upward bar for the number of positive coefficients and a downward bar for negative ones, per round.

    Args:
        axis: Axes to draw into.
        rounds: Rounds, ``[T]``.
        above: Numbers of positive coefficients, ``[T]``.
        below: Numbers of negative coefficients, ``[T]``.
    """
    width = min((b - a for a, b in pairwise(rounds)), default=1)
    axis.bar(rounds, above, width, color="C0", label="above zero")
    axis.bar(rounds, [-n for n in below], width, color="C3", label="below zero")
    axis.axhline(0, color="black", linewidth=0.6)
    axis.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    set_round_axis(axis)
    axis.set_ylabel("coefficients")
    axis.legend(frameon=False, fontsize=8)


def prevalence(counts: np.ndarray) -> tuple[int, np.ndarray, float]:
    """Return the rarer of two classes, its share at each client with the ends of Wilson's 95 % interval, and over all.

    Args:
        counts: Number of samples, ``[K, 2]``.

    Returns:
        The number of the class; share, lower and upper end in rows, ``[3, K]``, NaN without samples; and the share of all.
    """
    rare = 0 if counts[:, 0].sum() < counts[:, 1].sum() else 1
    rows = [
        (hits / max(1, n), *(wilson_interval(hits, n) or (math.nan,) * 2))
        for hits, n in zip(counts[:, rare], counts.sum(1), strict=True)
    ]
    return rare, np.array(rows, float).T, float(counts[:, rare].sum() / max(1, counts.sum()))


def plot_clients_by_class(
    counts: np.ndarray,
    class_names: Sequence[str],
    path: Path | None = None,
    title: str = "",
    most: int = 60,
    client_names: Sequence[str] = (),
    exclusive: bool = True,
) -> Path | Figure:
    """Plot the label distribution: one dot per client and class, its area proportional to the number of samples.

    Of two classes, the share of the rarer one at each client is plotted, with its 95 % interval.

    Args:
        counts: Number of samples, ``[K, C]``.
        class_names: Names of the classes.
        path: Image file to write. None returns the figure, which notebooks display.
        title: Title, such as the partition and its seed.
        most: Maximum number of clients; if there are more, evenly spaced ones are shown.
        client_names: Names of the clients; if empty, their numbers are shown.
        exclusive: Whether each sample has a single class.
    """
    total = len(counts)
    shown = np.arange(total) if total <= most else np.linspace(0, total - 1, most).round().astype(int)
    counts = counts[shown]
    height = max(3.0, 0.28 * counts.shape[1] + 1.5) + bool(client_names)
    figure, ((axis,),) = new_figure(max(4.0, 0.28 * len(shown) + 2), height)
    if exclusive and counts.shape[1] == 2:
        rare, (share, low, high), pooled = prevalence(counts)
        bars = 100 * np.array([share - low, high - share])
        axis.errorbar(range(len(shown)), 100 * share, yerr=bars, fmt="o", markersize=4, linewidth=1)
        axis.axhline(100 * pooled, color="gray", linestyle="--", linewidth=1)
        what = "95 % interval; dashed: all clients shown"
        axis.set_ylabel(f"share of class {literal_text(list(class_names)[rare], NAME)}, %")
    else:
        client, label = np.nonzero(counts)
        sizes = counts[client, label]
        axis.scatter(client, label, s=220 * sizes / max(1, counts.max()), alpha=0.75, linewidths=0)
        step = max(1, counts.shape[1] // 40)
        axis.set_yticks(range(0, counts.shape[1], step), [literal_text(name) for name in list(class_names)[::step]])
        what = "area of a dot: number of training samples"
        axis.set_ylabel("class")
    if client_names:
        axis.set_xticks(range(len(shown)), [literal_text(client_names[k], NAME) for k in shown], rotation=90)
    else:
        ticks = np.arange(0, len(shown), max(1, len(shown) // 20))
        axis.set_xticks(ticks, [str(shown[t]) for t in ticks])
    axis.set_xlabel("client" + (f" ({len(shown)} of {total} shown)" if len(shown) < total else ""))
    axis.set_title(literal_text(title) + ("\n" if title else "") + what, fontsize=9)
    axis.grid(alpha=0.25)
    return save_or_return(figure, path)
