"""Search for columns of a table that predict the label almost alone, which is often a leak.

The values of a column, or of a pair, divide the rows into cells: categories, or quantiles of numbers. One half of the rows
gives the class shares or the mean of each cell, which predict the other half, and vice versa.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np

from unskew.data.load import load_source_for
from unskew.data.partition.parsing import partition_column
from unskew.data.readers.column_roles import INPUT, LABEL
from unskew.data.remote import with_local_files
from unskew.data.spec import DataSpec, is_table

LEAST = {"classification": 0.97, "regression": 0.9}
"""AUROC and R² from which a column is reported; of a pair, half the distance from 1 is required.

The best single columns of public data stay below (breast cancer 0.964, wine 0.90; R² of diabetes 0.34), and a copy of the
label with 2 % of its values wrong is above (0.98).
"""
ROWS, VALUES = 10_000, 5_000_000
"""Maximum numbers of rows, and of values of all columns, in the search."""
BINS, COARSE = 32, 10
"""Numbers of quantiles of a column alone, and of a column in a pair."""
PAIRED, PAIRED_CLASSES, MOST_CELLS = 60, 10, 20_000
"""Maximum numbers of columns and of classes with which all pairs are searched, and of cells of a pair, times classes."""
FEWEST = 5
"""Minimum number of rows of a class, and of other classes, in each half."""

Score = Callable[[np.ndarray, Sequence[np.ndarray]], float]
"""Function of the cell of each row, and of the columns themselves, that returns the AUROC or R² of the other half."""


def find_leaks(spec: DataSpec) -> list[str]:
    """Return a sentence for each input column, or pair of columns, of a table that predicts the label almost alone.

    Args:
        spec: Data specification.
    """
    if not is_table(spec.data) or spec.image is not None:
        return []
    source = load_source_for(with_local_files(spec))
    least = LEAST.get(source.task)
    if least is None:
        return []
    inputs = [column for column, role in source.columns.items() if role.startswith(INPUT)]
    names = [encoder.name for encoder in source.encoders] or list(spec.features) or inputs
    categories = {encoder.name for encoder in source.encoders if encoder.kind == "category"}
    limit = min(ROWS, max(200, VALUES // len(names)))
    rows = np.random.default_rng(0).permutation(len(source.train))[:limit]
    values = source.train.x.numpy()[rows].astype(np.float64)
    columns = {name: values[:, j] for j, name in enumerate(names) if name != partition_column(spec.partition)}
    y, halves = source.train.y.numpy()[rows], [np.arange(len(rows)) % 2 == half for half in (0, 1)]
    if source.task == "regression":
        targets = [y] if y.ndim == 1 else list(y.T)

        def score(cells: np.ndarray, parts: Sequence[np.ndarray]) -> float:
            return max(r2_of(cells, parts, target, halves) for target in targets)
    else:

        def score(cells: np.ndarray, parts: Sequence[np.ndarray]) -> float:
            return auroc_of(cells, y, source.classes, halves)

    alone = {
        name: score(cells_of(column, name in categories, BINS), [] if name in categories else [column])
        for name, column in columns.items()
    }
    scores = {(name,): value for name, value in alone.items() if value >= least}
    others = sorted(alone.keys() - {name for (name,) in scores}, key=lambda name: (-alone[name], name))
    others = others[: PAIRED if source.classes <= PAIRED_CLASSES or source.task == "regression" else PAIRED_CLASSES]
    coarse = {name: cells_of(columns[name], name in categories, COARSE) for name in columns if name in others}
    for pair in combinations(coarse, 2):
        size = int(coarse[pair[1]].max()) + 1
        cells = coarse[pair[0]] * size + coarse[pair[1]]
        if (cells.max() + 1) * source.classes <= MOST_CELLS:
            value = score(cells, [] if {*pair} & categories else [columns[name] for name in pair])
            if 2 * (1 - value) <= 1 - max(least, *(alone[name] for name in pair)):
                scores[pair] = value
    labels = ", ".join(name for name, role in source.columns.items() if role == LABEL)
    metric = "R²" if source.task == "regression" else "AUROC"
    sentences, reported = [], set[str]()
    for group, value in sorted(scores.items(), key=lambda item: (len(item[0]), -item[1])):
        if not reported & {*group}:
            reported |= {*group}
            who, it = (group[0], "it if it is") if len(group) == 1 else (" and ".join(group), "them if they are")
            sentences.append(
                f"{who} predict{'s' * (len(group) == 1)} {labels} almost alone ({metric} {100 * value:.1f} %); exclude "
                f"{it} not known at prediction time"
            )
    return sentences


def cells_of(values: np.ndarray, category: bool, bins: int) -> np.ndarray:
    """Return the cell of each value, from 0; missing values have their own.

    Args:
        values: Values of a column, ``[n]``; NaN where missing.
        category: Whether each value is a cell; otherwise only if there are few.
        bins: Number of quantiles.
    """
    missing = np.isnan(values)
    edges = np.unique(values[~missing])
    if not category and len(edges) > bins:
        edges = np.unique(np.quantile(values[~missing], np.arange(1, bins) / bins))
    return np.where(missing, len(edges) + 1, np.searchsorted(edges, values, "right"))


def auroc_of(cells: np.ndarray, y: np.ndarray, classes: int, halves: Sequence[np.ndarray]) -> float:
    """Return the mean one-vs-rest AUROC of predicting each half from the other.

    Args:
        cells: Cell of each row, ``[n]``.
        y: Classes, ``[n]``.
        classes: Number of classes.
        halves: Masks of the two halves.
    """
    size = (int(cells.max()) + 1, classes)
    joint = cells * classes + y
    counts = [np.bincount(joint[half], minlength=size[0] * classes).reshape(size).astype(float) for half in halves]
    totals = np.stack([count.sum(0) for count in counts])
    enough = np.flatnonzero((np.minimum(totals, totals.sum(1, keepdims=True) - totals) >= FEWEST).all(0))
    areas = []
    for known, new in (counts, counts[::-1]):
        # The share of a cell is drawn towards the overall share, so that cells with few rows predict little.
        shares = (known + known.sum(0) / known.sum()) / (known.sum(1, keepdims=True) + 1)
        for c in enough:
            rank = np.unique(shares[:, c], return_inverse=True)[1]
            with_class = np.bincount(rank, new[:, c])
            without = np.bincount(rank, new.sum(1) - new[:, c])
            pairs = with_class.sum() * without.sum()
            areas.append((with_class * (np.cumsum(without) - without / 2)).sum() / pairs)
    return float(np.mean(areas)) if areas else 0.0


def r2_of(cells: np.ndarray, parts: Sequence[np.ndarray], y: np.ndarray, halves: Sequence[np.ndarray]) -> float:
    """Return the R² of predicting each half from the other by the best of several means.

    These are the means of cells and, for numbers, a linear regression on the columns and their product, or the nearest
    values of a single column, between which it interpolates.

    Args:
        cells: Cell of each row, ``[n]``.
        parts: Columns of numbers, ``[n]`` each; empty for categories.
        y: Targets, ``[n]``.
        halves: Masks of the two halves.
    """
    filled = [np.nan_to_num(part, nan=np.nansum(part) / max(1, np.isfinite(part).sum())) for part in parts]
    scaled = [(part - part.mean()) / (part.std() + 1e-300) for part in filled]
    terms = np.column_stack([np.ones(len(y)), *scaled, *([np.prod(scaled, 0)] if len(parts) > 1 else [])])
    squares = np.zeros(3)  # means of cells, linear regression, interpolation
    for known, new in (halves, halves[::-1]):
        rows = np.bincount(cells[known], minlength=cells.max() + 1)
        mean = y[known].mean()
        sums = np.bincount(cells[known], y[known] - mean, minlength=len(rows))
        predicted = [mean + (sums / (rows + 1))[cells[new]]]
        if parts:
            products = terms[known].T @ np.column_stack([terms[known], y[known]])
            predicted.append(terms[new] @ np.linalg.lstsq(products[:, :-1], products[:, -1], rcond=None)[0])
        if len(parts) == 1:
            order = np.argsort(scaled[0][known])
            predicted.append(np.interp(scaled[0][new], scaled[0][known][order], y[known][order]))
        squares[: len(predicted)] += [((y[new] - values) ** 2).sum() for values in predicted]
    spread = ((y - y.mean()) ** 2).sum()
    return float(1 - squares[: len(predicted)].min() / spread) if spread else 0.0
