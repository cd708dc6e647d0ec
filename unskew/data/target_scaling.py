"""Standardization of regression targets with global statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from unskew.data.column_statistics import MOMENTS, ColumnMoments, counts_and_sums, global_moments, sums_of_squares
from unskew.errors import DataError
from unskew.tasks.regression import Regression


def fit_target_scaling(
    clients: Callable[[], Iterable[np.ndarray]], names: Sequence[str]
) -> tuple[Regression, np.ndarray]:
    """Fit the scale of ``T`` regression targets on the clients' training samples.

    Args:
        clients: Function that returns the training targets ``[n_k, T]`` of each client.
        names: Names of the targets; their indices if empty.

    Returns:
        The regression task with its scale, and the bytes that each client sent and received, ``[K, 2]``.
    """
    first = [counts_and_sums(part) for part in clients()]
    names = names or [str(t) for t in range(len(first[0][0]))]
    moments = global_moments(first, lambda mean: (sums_of_squares(part, mean) for part in clients()), names)
    return task_with_moments(moments), target_scaling_bytes(len(first), len(names))


def task_with_moments(found: ColumnMoments) -> Regression:
    """Return the regression task for targets with the given moments.

    Args:
        found: Mean and standard deviation of each target.

    Raises:
        DataError: If the targets are too large for a finite mean and standard deviation.
    """
    if not (np.isfinite(found.mean).all() and np.isfinite(found.std).all()):
        raise DataError(
            "The targets are too large: their mean or standard deviation is not finite. Divide them by a power of ten."
        )
    return Regression(mean=tuple(found.mean.tolist()), std=tuple(found.std.tolist()))


def target_scaling_bytes(clients: int, targets: int) -> np.ndarray:
    """Compute the bytes that each client sends and receives for target scaling, ``[K, 2]``.

    Args:
        clients: Number of clients.
        targets: Number of regression targets.
    """
    return np.full((clients, 2), MOMENTS * targets, np.int64)
