"""Constants of a task from sums over clients: the scale of regression targets, and what a task fits itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from unskew.data.column_statistics import NUMBER, ColumnMoments, column_totals
from unskew.errors import DataError
from unskew.sums.base import ClientRows, SumRequest
from unskew.sums.exchange import Exchange, SimulatedExchange
from unskew.tasks.base import Task
from unskew.tasks.regression import Regression


def fit_task(task: Task, clients: Sequence[Tensor], names: Sequence[str]) -> tuple[Task, np.ndarray]:
    """Fit the constants of a task on the clients' training samples.

    Args:
        task: Task that fits its constants, or standardizes targets.
        clients: Training targets of each client, as ``read`` returns them.
        names: Names of the targets; their indices if empty.

    Returns:
        The task with its constants, and the bytes that each client sent and received, ``[K, 2]``.
    """
    if task.fits:
        exchange = SimulatedExchange(lambda: (ClientRows(y=own) for own in clients))
        fitted, sent = fitted_task(task, exchange)
        return fitted, exchange.traffic + [0, sent]
    names = tuple(names) or tuple(str(t) for t in range(clients[0].shape[1]))
    exchange = SimulatedExchange(lambda: (ClientRows(target_names=names, targets=own.numpy()) for own in clients))
    found = column_totals(exchange, (), names)
    return task_with_moments(found.targets), exchange.traffic + [0, found.result_bytes]


def fitted_task(task: Task, exchange: Exchange) -> tuple[Task, int]:
    """Return a task with constants from sums over clients, and the bytes of the constants, which each client receives.

    Args:
        task: Task that fits its constants.
        exchange: Asks all clients for sums.
    """
    fitted = task.fit(lambda kind, args, tensors: exchange([SumRequest(kind, args, tensors)])[0])
    return fitted, NUMBER * sum(map(len, fitted.constants.values()))


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
