"""Standardization of regression targets with global statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from unskew.data.column_statistics import ColumnMoments, column_totals
from unskew.errors import DataError
from unskew.sums.base import ClientRows
from unskew.sums.exchange import SimulatedExchange
from unskew.tasks.regression import Regression


def fit_target_scaling(
    clients: Callable[[], Iterable[np.ndarray]], names: Sequence[str], targets: int
) -> tuple[Regression, np.ndarray]:
    """Fit the scale of ``T`` regression targets on the clients' training samples.

    Args:
        clients: Function that returns the training targets ``[n_k, T]`` of each client.
        names: Names of the targets; their indices if empty.
        targets: Number of targets ``T``.

    Returns:
        The regression task with its scale, and the bytes that each client sent and received, ``[K, 2]``.
    """
    names = tuple(names) or tuple(str(t) for t in range(targets))
    exchange = SimulatedExchange(lambda: (ClientRows(target_names=names, targets=part) for part in clients()))
    found = column_totals(exchange, (), names)
    return task_with_moments(found.targets), exchange.traffic + [0, found.result_bytes]


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
