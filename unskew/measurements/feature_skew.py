"""Feature skew: differences of clients' inputs within a class."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def feature_skew(pairs: Callable[[int], Pair], ids: Sequence[int]) -> float | None:
    """Share of the variance of inputs of one class that lies between clients: ``omega^2`` of an analysis of variance.

    Per class, with ``K`` clients that hold two of its samples at least, ``SSB`` the scatter between their means, ``SSW``
    that within, and ``MSW = SSW / (n - K)``::

        omega^2 = (SSB - (K - 1) MSW) / (SSB + SSW + MSW)

    which is 0 in expectation where clients draw their inputs alike, and 1 where every client has one input per class. The
    mean over classes, weighted by their samples; never below 0. None where inputs are not numbers, targets are not one class
    a sample, or no class is at two clients.

    Args:
        pairs: Inputs ``x [n, ...]`` and classes ``y [n]`` of a client.
        ids: The clients that are looked at.
    """
    first_x, first_y = pairs(ids[0])
    if first_x.dtype == torch.int64 or first_y.dim() != 1 or first_y.dtype.is_floating_point:
        return None
    sums: dict[int, list[tuple[int, Tensor, float]]] = {}  # per class: samples, mean and scatter of each client
    for k in ids:
        x, y = pairs(k)
        flat = x.reshape(len(x), -1).double()
        for c in np.unique(y.cpu().numpy()).tolist():
            rows = flat[y == c]
            if len(rows) > 1:
                mean = rows.mean(0)
                sums.setdefault(c, []).append((len(rows), mean, float((rows - mean).square().sum())))
    weights, shares = [], []
    for client_sums in sums.values():
        n, K = sum(count for count, _, _ in client_sums), len(client_sums)
        if K < 2:
            continue
        center = sum((count * mean for count, mean, _ in client_sums), torch.zeros_like(client_sums[0][1])) / n
        between = sum(count * float((mean - center).square().sum()) for count, mean, _ in client_sums)
        within = sum(scatter for _, _, scatter in client_sums)
        error = within / (n - K)
        total = between + within + error
        weights.append(n)
        shares.append((between - (K - 1) * error) / total if total > 0 else 0.0)
    return max(0.0, float(np.average(shares, weights=weights))) if shares else None
