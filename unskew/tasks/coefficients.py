"""Maximum likelihood of a linear model from sums over clients, by Newton's method (Fisher scoring).

A kind of model is one kind of sum (``unskew.sums.fisher``): it maps the rows of a client and the coefficients to
``score [p]``, ``information [p, p]``, ``log_likelihood`` and ``counts`` (rows, events). The result is that of all rows
together; its covariance is the inverse of the information.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from unskew.errors import EngineError

MOST_STEPS = 20
"""Maximum number of steps until none exceeds ``SMALL``; two more follow."""
SMALL = 1e-3
"""Step, in standard errors, from which Newton's method squares the distance to the maximum."""
DEPENDENT = 1e-10
"""Smallest eigenvalue of the information, scaled to a diagonal of 1, below which columns count as linearly dependent."""


class NoEstimateError(EngineError):
    """The likelihood has no unique finite maximum, it was not found, or a client does not send the sums for it."""


class Estimate(NamedTuple):
    """Maximum likelihood estimate.

    Attributes:
        beta: Coefficients, ``[p]``; 0 for columns that are 0 in all rows.
        covariance: Covariance of the coefficients, ``[p, p]``.
        sums: Sums over all clients at the maximum.
        exchanges: Number of times that such sums were computed.
    """

    beta: np.ndarray
    covariance: np.ndarray
    sums: dict[str, Tensor]
    exchanges: int


def newton(total: Callable[[np.ndarray], dict[str, Tensor]], columns: Sequence[str]) -> Estimate:
    """Maximize a likelihood by Newton's method, starting at 0.

    Args:
        total: Function from the coefficients to the sums over all clients, such as those of the kind ``fisher``.
        columns: Names of the columns, for errors. All but the first one should be centered.

    Raises:
        NoEstimateError: If columns are linearly dependent, or the method does not converge.
    """
    beta, sizes = np.zeros(len(columns)), [math.inf, math.inf]
    for exchange in range(1, MOST_STEPS + 3):
        sums = total(beta)
        information = sums["information"].numpy()
        empty = np.diag(information) == 0
        scale = np.sqrt(np.diag(information) + empty)
        values, vectors = np.linalg.eigh(information / np.outer(scale, scale) + np.diag(empty))
        if exchange == 1:
            first = scale
        elif values[0] < DEPENDENT:
            break
        if values[0] < DEPENDENT:
            names = ", ".join(columns[j] for j in np.flatnonzero(np.abs(vectors[:, 0]) > 1e-3).tolist())
            raise NoEstimateError(f"these columns are linearly dependent in the training rows: {names}. Exclude one.")
        covariance = vectors / values @ vectors.T / np.outer(scale, scale)
        step = covariance @ sums["score"].numpy()
        sizes.append(float(np.abs(step / np.sqrt(np.diag(covariance))).max()))
        beta = beta + step
        # Near a maximum, the distance to it is squared; where there is none, steps become small only slowly.
        if sizes[-3] <= SMALL:
            if any(sizes[k] > max(sizes[k - 1] / 10, 1e-9) for k in (-2, -1)):
                break
            return Estimate(beta, covariance, sums, exchange)
    raise NoEstimateError(
        f"Newton's method did not converge. Probably {columns[int(np.abs(first * beta).argmax())]!r}, alone or with other "
        "columns, separates the classes, so that the likelihood has no maximum. Exclude it, or join rare categories."
    )
