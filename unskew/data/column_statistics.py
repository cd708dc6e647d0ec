"""Column statistics computed by the server from client sums: means, deviations, categories, and the bytes they cost.

Two rounds of sums give the mean and then the deviation, as exactly as from all rows at one place; no row leaves a client.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from unskew.errors import DataError

NUMBER = 8
"""Bytes of a sum or a count."""
MOMENTS = 3 * NUMBER
"""Bytes that a column's moments cost each client: up a count, a sum and a sum of squares; down a mean, and both results."""
CONSTANT = 1e-6
"""A column whose deviation is below is not divided by it."""


class ColumnMoments(NamedTuple):
    """Statistics of each column ``[f]`` over all clients: number of values, mean and standard deviation."""

    counts: np.ndarray
    mean: np.ndarray
    std: np.ndarray


def counts_and_sums(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute number of values and sum of each column of a client's rows ``[n_k, f]``; NaN is a missing value."""
    return (~np.isnan(rows)).sum(0), np.asarray(np.nansum(rows, 0, dtype=np.float64))


def sums_of_squares(rows: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Sums of squared distances from the mean of all clients, ``[f]``.

    Args:
        rows: Values of a client, ``[n, f]``.
        mean: Mean over all clients, ``[f]``.
    """
    return np.asarray(np.nansum((rows - mean) ** 2, 0, dtype=np.float64))


def global_means(first: Iterable[tuple[np.ndarray, np.ndarray]], names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Compute number of values and mean of each column over all clients; see ``global_moments``.

    Args:
        first: Counts and sums of each client, ``[f]`` each.
        names: Names of the columns.
    """
    count, total = np.zeros(len(names), np.int64), np.zeros(len(names))
    for counts, sums in first:
        count += counts
        total += sums
    if not count.all():
        raise DataError(f"No client has any value in the column {names[int(np.argmin(count))]!r}; exclude it.")
    return count, total / count


def global_moments(
    first: Iterable[tuple[np.ndarray, np.ndarray]],
    second: Callable[[np.ndarray], Iterable[np.ndarray]],
    names: Sequence[str],
) -> ColumnMoments:
    """Means and deviations from the sums of clients.

    Args:
        first: What each client has ``counts_and_sums``.
        second: From the mean to the ``sums_of_squares`` of each client.
        names: Of the columns, for the error.

    Raises:
        DataError: No client has any value of a column.

    >>> rows = [np.array([[1.0], [np.nan]]), np.array([[3.0]])]
    >>> global_moments(map(counts_and_sums, rows), lambda mean: (sums_of_squares(part, mean) for part in rows), ["age"])
    ColumnMoments(counts=array([2]), mean=array([2.]), std=array([1.]))
    """
    count, mean = global_means(first, names)
    apart = np.zeros(len(names))
    for distances in second(mean):
        apart += distances
    std = np.sqrt(apart / count)
    return ColumnMoments(count, mean, np.where(std < CONSTANT, 1.0, std))


def category_bytes(values: Sequence[str]) -> int:
    """Compute the size of a list of categories as JSON, in bytes.

    >>> category_bytes(["a", "bc"])
    10
    """
    return len(json.dumps(list(values), ensure_ascii=False, separators=(",", ":")).encode())


def balanced_class_weights(counts: np.ndarray) -> tuple[float, ...]:
    """Weights of classes from the samples ``[C]`` of all clients together: ``n / (C n_c)``, as in scikit-learn.

    >>> balanced_class_weights(np.array([30, 10]))
    (0.6666666666666666, 2.0)
    """
    there = np.maximum(counts, 1)
    return tuple(np.where(counts > 0, counts.sum() / (len(counts) * there), 1.0).tolist())
