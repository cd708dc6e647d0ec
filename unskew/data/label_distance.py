"""Distances between the label distributions of clients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def label_distances(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the total variation distance of each client's labels from all labels, and their entropy, ``[K]`` each.

    Args:
        counts: Samples per client and class, ``[K, C]``.
    """
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    logs = np.log(shares, where=shares > 0, out=np.zeros_like(shares))
    return 0.5 * np.abs(shares - counts.sum(0) / max(1.0, counts.sum())).sum(1), -(shares * logs).sum(1)


def label_distance_by_chance(shares: np.ndarray, sizes: Sequence[int]) -> float:
    """Return the mean label distance if clients of these sizes drew their labels from the overall class frequencies.

    By the normal approximation, a frequency of ``n`` draws deviates by ``sqrt(2 q (1 - q) / (pi n))`` on average.

    Args:
        shares: Class frequencies ``q [C]`` of all clients together.
        sizes: Number of samples of each client.

    >>> round(label_distance_by_chance(np.full(10, 0.1), [100, 100]), 3)
    0.12
    """
    spread = float(np.sqrt(shares * (1 - shares)).sum())
    return min(1.0, 0.5 * math.sqrt(2 / math.pi) * spread * float(np.mean(1 / np.sqrt(np.maximum(sizes, 1)))))
