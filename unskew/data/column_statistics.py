"""Column statistics that the server computes from client sums: means, standard deviations, and the traffic for them.

A first pass of sums gives the mean, a second pass the standard deviation, as exactly as from pooled rows. No row leaves
a client.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from unskew.data.normalization import is_constant
from unskew.errors import DataError
from unskew.sums.base import SumRequest
from unskew.sums.columns import decode_values
from unskew.sums.exchange import Exchange

NUMBER = 8
"""Size of a sum or a count, in bytes."""


class ColumnMoments(NamedTuple):
    """Statistics of each column over all clients, ``[f]`` each: number of values, mean and standard deviation."""

    counts: np.ndarray
    mean: np.ndarray
    std: np.ndarray


class ColumnTotals(NamedTuple):
    """Statistics of columns and targets over all clients.

    Attributes:
        columns: Moments of the numeric columns.
        targets: Moments of the targets.
        values: Values of each categorical column, sorted, by its name.
        result_bytes: Bytes of the results, which each client receives.
    """

    columns: ColumnMoments
    targets: ColumnMoments
    values: dict[str, tuple[str, ...]]
    result_bytes: int


def column_totals(
    exchange: Exchange, columns: Sequence[str], targets: Sequence[str] = (), coded: Sequence[str] = ()
) -> ColumnTotals:
    """Compute moments and categories over all clients, in two exchanges of sums.

    Args:
        exchange: Asks all clients for sums.
        columns: Names of numeric columns.
        targets: Names of targets.
        coded: Names of categorical columns.

    Raises:
        DataError: If no client has a value in some column, or a target is constant.
    """
    args, names = {"columns": [*columns], "targets": [*targets]}, [*columns, *targets]
    requests = [SumRequest("moments", args)] if names else []
    requests += [SumRequest("categories", {"columns": [*coded]})] if coded else []
    first = exchange(requests) if requests else []
    named = zip(coded, first[-1].values(), strict=True) if coded else ()
    values = {name: tuple(sorted(decode_values(tensor))) for name, tensor in named}
    counts, mean, std = np.zeros(0, np.int64), np.zeros(0), np.zeros(0)
    if names:
        counts = first[0]["counts"].numpy()
        if not counts.all():
            name = names[int(np.argmin(counts))]
            raise DataError(f"No client has a value in the column {name!r}. Exclude this column.")
        mean = first[0]["sums"].numpy() / counts
        (second,) = exchange([SumRequest("squares", args, {"mean": torch.from_numpy(mean)})])
        std = np.sqrt(second["squares"].numpy() / counts)
        constant = is_constant(mean, std)
        if constant[len(columns) :].any():
            name = targets[int(np.argmax(constant[len(columns) :]))]
            raise DataError(
                f"The target {name!r} has the same value in all training rows, so there is nothing to predict. Choose "
                "another label."
            )
        std = np.where(constant, 1.0, std)
    moments = [ColumnMoments(counts[at], mean[at], std[at]) for at in (slice(len(columns)), slice(len(columns), None))]
    return ColumnTotals(
        moments[0], moments[1], values, 2 * NUMBER * len(names) + sum(map(category_bytes, values.values()))
    )


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
