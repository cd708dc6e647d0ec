"""Targets of regression on one scale."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from unskew.data.column_statistics import MOMENTS, ColumnMoments, counts_and_sums, global_moments, sums_of_squares
from unskew.errors import DataError
from unskew.tasks.regression import Regression


def fit_target_scaling(
    clients: Callable[[], Iterable[np.ndarray]], names: Sequence[str]
) -> tuple[Regression, np.ndarray]:
    """The task of predicting ``T`` targets, scaled by what each client has to train on; and bytes, ``[K, 2]``.

    Args:
        clients: Gives the targets ``[n_k, T]`` that each client trains on.
        names: Of the targets; by number if empty.
    """
    first = [counts_and_sums(part) for part in clients()]
    names = names or [str(t) for t in range(len(first[0][0]))]
    moments = global_moments(first, lambda mean: (sums_of_squares(part, mean) for part in clients()), names)
    return task_with_moments(moments), target_scaling_bytes(len(first), len(names))


def task_with_moments(found: ColumnMoments) -> Regression:
    """Return the task of predicting numbers with these moments.

    Raises:
        DataError: The numbers are too large for a finite standard deviation.
    """
    if not (np.isfinite(found.mean).all() and np.isfinite(found.std).all()):
        raise DataError(
            "The targets are too large: their mean or their standard deviation is not finite. Divide them by a power of ten."
        )
    return Regression(mean=tuple(found.mean.tolist()), std=tuple(found.std.tolist()))


def target_scaling_bytes(clients: int, targets: int) -> np.ndarray:
    """Compute the bytes per client for the scaling of ``targets`` regression targets, ``[K, 2]``.

    Args:
        clients: Number of clients.
        targets: Number of regression targets.
    """
    return np.full((clients, 2), MOMENTS * targets, np.int64)
