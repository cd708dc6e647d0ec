"""Column statistics that the server computes from client sums: means, standard deviations, and the traffic for them.

A first pass of sums gives the mean, a second pass the standard deviation, as exactly as from pooled rows. No row leaves
a client.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from unskew.errors import DataError

NUMBER = 8
"""Size of a sum or a count, in bytes."""
MOMENTS = 3 * NUMBER
"""Traffic per column and client in each direction, in bytes.

Each client sends a count, a sum and a sum of squares. It receives the mean between the passes and both results at the
end.
"""
CONSTANT = 1e-6
"""Columns with a smaller standard deviation count as constant and are not divided by it."""


class ColumnMoments(NamedTuple):
    """Statistics of each column over all clients, ``[f]`` each: number of values, mean and standard deviation."""

    counts: np.ndarray
    mean: np.ndarray
    std: np.ndarray


def counts_and_sums(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute number and sum of the values in each column of a client's rows ``[n_k, f]``; NaN means missing."""
    return (~np.isnan(rows)).sum(0), np.asarray(np.nansum(rows, 0, dtype=np.float64))


def sums_of_squares(rows: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Compute the sum of squared distances from the global mean for each column, ``[f]``.

    Args:
        rows: Values of a client, ``[n, f]``.
        mean: Mean over all clients, ``[f]``.
    """
    return np.asarray(np.nansum((rows - mean) ** 2, 0, dtype=np.float64))


def global_means(first: Iterable[tuple[np.ndarray, np.ndarray]], names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Compute the number of values and the mean of each column over all clients.

    Args:
        first: ``counts_and_sums`` of each client.
        names: Column names, for error messages.
    """
    count, total = np.zeros(len(names), np.int64), np.zeros(len(names))
    for counts, sums in first:
        count += counts
        total += sums
    if not count.all():
        raise DataError(f"No client has a value in the column {names[int(np.argmin(count))]!r}. Exclude this column.")
    return count, total / count


def global_moments(
    first: Iterable[tuple[np.ndarray, np.ndarray]],
    second: Callable[[np.ndarray], Iterable[np.ndarray]],
    names: Sequence[str],
) -> ColumnMoments:
    """Compute means and standard deviations from client sums.

    Args:
        first: ``counts_and_sums`` of each client.
        second: Function from the global mean to the ``sums_of_squares`` of each client.
        names: Column names, for error messages.

    Raises:
        DataError: If no client has a value in some column.

    >>> rows = [np.array([[1.0], [np.nan]]), np.array([[3.0]])]
    >>> global_moments(map(counts_and_sums, rows), lambda mean: (sums_of_squares(part, mean) for part in rows), ["age"])
    ColumnMoments(counts=array([2]), mean=array([2.]), std=array([1.]))
    """
    count, mean = global_means(first, names)
    squares = np.zeros(len(names))
    for distances in second(mean):
        squares += distances
    std = np.sqrt(squares / count)
    return ColumnMoments(count, mean, np.where(std < CONSTANT, 1.0, std))


def category_bytes(values: Sequence[str]) -> int:
    """Compute the size of a list of categories as JSON, in bytes.

    >>> category_bytes(["a", "bc"])
    10
    """
    return len(json.dumps(list(values), ensure_ascii=False, separators=(",", ":")).encode())


def balanced_class_weights(counts: np.ndarray) -> tuple[float, ...]:
    """Compute class weights ``n / (C n_c)`` from the global class counts ``[C]``, as scikit-learn does.

    Classes without samples have weight 1.

    >>> balanced_class_weights(np.array([30, 10]))
    (0.6666666666666666, 2.0)
    """
    divisors = np.maximum(counts, 1)
    return tuple(np.where(counts > 0, counts.sum() / (len(counts) * divisors), 1.0).tolist())
