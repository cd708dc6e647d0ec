"""Targets of regression on one scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from unskew.data.statistics import MOMENTS, moments
from unskew.tasks.regression import Regression


def standardised(
    y: Tensor, offsets: np.ndarray, splits: np.ndarray, names: Sequence[str]
) -> tuple[Regression, np.ndarray]:
    """The task of predicting ``y [n, T]``, scaled by what each client has to train on; and bytes, ``[K, 2]``.

    Args:
        y: Targets of all clients, client by client.
        offsets: Where each client's begin.
        splits: Where those begin that it holds out.
        names: Of the targets, for the error.
    """
    values = y.numpy()

    def clients() -> Iterator[np.ndarray]:
        return (values[start:stop] for start, stop in zip(offsets[:-1], splits, strict=True))

    found = moments(clients, names or [str(t) for t in range(values.shape[1])])
    told = np.full((len(splits), 2), MOMENTS * values.shape[1], np.int64)
    return Regression(mean=tuple(found.mean.tolist()), std=tuple(found.std.tolist())), told
