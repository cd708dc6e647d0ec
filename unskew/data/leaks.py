"""Search for columns of a table that predict the label almost alone, which is often a leak.

The values of a column, or of a pair, divide the rows into cells: categories, or quantiles of numbers. One half of the rows
gives the class shares or the mean of each cell, which predict the other half, and vice versa.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

import numpy as np

from unskew.data.load import load_source_for
from unskew.data.partition.parsing import partition_column
from unskew.data.readers.column_roles import INPUT, LABEL
from unskew.data.remote import with_local_files
from unskew.data.spec import DataSpec, is_table
from unskew.tasks.registry import TASKS

LEAST = {"one_class": ("AUROC", 0.97), "numbers": ("R²", 0.9)}
"""By kind of label: metric, and its value from which a column is reported; of a pair, half the distance from 1 is required.

Cross-validated decision trees on the best single columns of public data stay below (AUROC 0.962 on breast cancer and 0.911
on wine, R² 0.31 on diabetes); a copy of the label with 2 % wrong values is above (0.98).
"""
ROWS, VALUES = 10_000, 5_000_000
"""Maximum numbers of rows, and of values of all columns, in the search."""
BINS, COARSE = 32, 10
"""Numbers of quantiles of a column alone, and of a column in a pair."""
PAIRED, MOST_CELLS = 60, 20_000
"""Maximum numbers of columns whose pairs are searched with two classes, and of cells of a pair, times classes."""
FEWEST = 5
"""Minimum number of rows of a class, and of other classes, in each half."""


def find_leaks(spec: DataSpec) -> list[str]:
    """Return a sentence for each input column, or pair of columns, of a table that predicts a label almost alone.

    Args:
        spec: Data specification.
    """
    if not is_table(spec.data) or spec.image is not None:
        return []
    source = load_source_for(with_local_files(spec))
    task = TASKS[source.task]
    kind = "numbers" if task.numeric_labels else "one_class"
    if not task.numeric_labels and kind not in task.provides:
        return []
    inputs = [column for column, role in source.columns.items() if role.startswith(INPUT)]
    names = [encoder.name for encoder in source.encoders] or list(spec.features) or inputs
    rows = np.random.default_rng(0).permutation(len(source.train))[: min(ROWS, max(200, VALUES // len(names)))]
    values = source.train.x.numpy()[rows].astype(np.float64)
    columns = {name: values[:, j] for j, name in enumerate(names) if name != partition_column(spec.partition)}
    categories = {encoder.name for encoder in source.encoders if encoder.kind == "category"}
    targets = source.train.y.numpy()[rows].reshape(len(rows), -1)
    labels = [column for column, role in source.columns.items() if role == LABEL]
    metric, least = LEAST[kind]
    sentences = []
    for label, y in zip(labels if len(labels) < 2 else source.class_names, targets.T, strict=True):
        classes = 0 if task.numeric_labels else source.classes
        for group, value in search(columns, categories, y, classes, least).items():
            who, it = (f"{group[0]} predicts", "it if it is")
            if len(group) > 1:
                who, it = f"{' and '.join(group)} predict", "them if they are"
            sentences.append(
                f"{who} {label} almost alone ({metric} {100 * value:.1f} %); exclude {it} not known at prediction time"
            )
    return sentences


def search(
    columns: Mapping[str, np.ndarray], categories: Collection[str], y: np.ndarray, classes: int, least: float
) -> dict[tuple[str, ...], float]:
    """Return the score of each column, and of each pair of other columns, that predicts a label almost alone.

    Args:
        columns: Values of each column, ``[n]``; NaN where missing.
        categories: Columns of categories.
        y: Labels, ``[n]``.
        classes: Number of classes; 0 if the labels are numbers.
        least: Minimum score of a column.
    """

    def score(cells: np.ndarray, *group: str) -> float:
        if classes:
            return auroc_of(cells, y, classes)
        return r2_of(cells, [] if {*group} & {*categories} else [columns[name] for name in group], y)

    alone = {name: score(cells_of(values, name in categories, BINS), name) for name, values in columns.items()}
    leaks: dict[tuple[str, ...], float] = {(name,): value for name, value in alone.items() if value >= least}
    others = sorted((name for name in alone if (name,) not in leaks), key=lambda name: -alone[name])
    coarse = {
        name: cells_of(columns[name], name in categories, COARSE) for name in others[: 2 * PAIRED // max(2, classes)]
    }
    pairs: dict[tuple[str, ...], float] = {}
    for first, second in combinations([name for name in columns if name in coarse], 2):
        cells = coarse[first] * (int(coarse[second].max()) + 1) + coarse[second]
        if (cells.max() + 1) * max(1, classes) <= MOST_CELLS:
            value = score(cells, first, second)
            if 2 * (1 - value) <= 1 - max(least, alone[first], alone[second]):
                pairs[first, second] = value
    for pair in sorted(pairs, key=lambda pair: -pairs[pair]):
        if not {*pair} & {name for group in leaks for name in group}:
            leaks[pair] = pairs[pair]
    return leaks


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


def halves(n: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the masks of the rows that are known and of the rows to predict, twice.

    >>> [(known.tolist(), new.tolist()) for known, new in halves(2)]
    [([True, False], [False, True]), ([False, True], [True, False])]
    """
    even = np.arange(n) % 2 == 0
    return [(even, ~even), (~even, even)]


def auroc_of(cells: np.ndarray, y: np.ndarray, classes: int) -> float:
    """Return the mean one-vs-rest AUROC of predicting each half from the other.

    Args:
        cells: Cell of each row, ``[n]``.
        y: Classes, ``[n]``.
        classes: Number of classes.
    """
    size = int(cells.max()) + 1
    areas = []
    for masks in halves(len(y)):
        known, new = (
            np.bincount(cells[mask] * classes + y[mask], minlength=size * classes).reshape(size, classes)
            for mask in masks
        )
        # The share of a cell is drawn towards the overall share, so that cells with few rows predict little.
        shares = (known + known.sum(0) / known.sum()) / (known.sum(1, keepdims=True) + 1)
        for c in range(classes):
            rank = np.unique(shares[:, c], return_inverse=True)[1]
            inside, outside = np.bincount(rank, new[:, c]), np.bincount(rank, new.sum(1) - new[:, c])
            if min(known[:, c].sum(), inside.sum(), outside.sum()) >= FEWEST:
                areas.append((inside * (np.cumsum(outside) - outside / 2)).sum() / (inside.sum() * outside.sum()))
    return float(np.mean(areas)) if areas else 0.0


def r2_of(cells: np.ndarray, parts: Sequence[np.ndarray], y: np.ndarray) -> float:
    """Return the R² of predicting each half from the other, by the means of cells or, if it is better, from numbers.

    The prediction from numbers is a linear regression on the columns and the product of two, or for one column the
    interpolation between the nearest values.

    Args:
        cells: Cell of each row, ``[n]``.
        parts: One or two columns of numbers, ``[n]`` each; none for categories.
        y: Targets, ``[n]``.
    """
    filled = [np.nan_to_num(part, nan=np.nansum(part) / max(1, np.isfinite(part).sum())) for part in parts]
    terms = np.column_stack([np.ones(len(y)), *filled, *([np.prod(filled, 0)] if len(parts) > 1 else [])])
    terms /= np.abs(terms).max(0) + 1e-300
    squares = np.zeros((1, 3, 2)[len(parts)])
    for known, new in halves(len(y)):
        rows, mean = np.bincount(cells[known], minlength=cells.max() + 1), y[known].mean()
        sums = np.bincount(cells[known], y[known] - mean, minlength=len(rows))
        predicted = [mean + (sums / (rows + 1))[cells[new]]]
        if parts:
            predicted.append(terms[new] @ np.linalg.lstsq(terms[known], y[known], rcond=None)[0])
        if len(parts) == 1:
            order = np.argsort(filled[0][known])
            predicted.append(np.interp(filled[0][new], filled[0][known][order], y[known][order]))
        squares += [((y[new] - values) ** 2).sum() for values in predicted]
    spread = ((y - y.mean()) ** 2).sum()
    return float(1 - squares.min() / spread) if spread else 0.0
