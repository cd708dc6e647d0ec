"""Feature skew: differences of clients' inputs within a class."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def feature_skew(pairs: Callable[[int], Pair], ids: Sequence[int]) -> float | None:
    """Return the share of the within-class input variance that lies between clients: ``omega^2`` of an analysis of variance.

    For each class, with ``K`` clients that have at least two of its samples, scatter ``SSB`` between and ``SSW`` within the
    clients' means, and ``MSW = SSW / (n - K)``::

        omega^2 = (SSB - (K - 1) MSW) / (SSB + SSW + MSW)

    This is 0 in expectation if all clients draw inputs from the same distribution, and 1 if each client has a single
    input per class. The result is the mean over classes, weighted by their samples, and at least 0. It is None if
    inputs are token ids, targets are not one class per sample, or no class occurs at two clients.

    Args:
        pairs: Returns inputs ``x [n, ...]`` and classes ``y [n]`` of a client.
        ids: Clients to measure.
    """
    first_x, first_y = pairs(ids[0])
    if first_x.dtype == torch.int64 or first_y.dim() != 1 or first_y.dtype.is_floating_point:
        return None
    sums: dict[int, list[tuple[int, Tensor, float]]] = {}  # by class: samples, mean and scatter of each client
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
