"""Label skew and size skew of clients, compared with chance."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from unskew.data.federation import Federation

Metrics = dict[str, float | None]


def label_skew_metrics(federation: Federation, ids: Sequence[int]) -> Metrics:
    """Compute metrics of label skew and quantity skew.

    ``label_distance_mean`` and ``label_distance_max``: total variation distance, ``1/2 sum_c |q_kc - q_c|``, between
    the class frequencies of a client and of all clients together; ``label_distance_chance``: mean distance expected by
    chance for clients of these sizes; ``label_entropy_gap``: mean Kullback-Leibler divergence between the same
    frequencies, in nats (0 if equal, ``ln C`` for balanced classes and one class per client); ``effective_clients``:
    ``(sum n_k)^2 / sum n_k^2``, the number of clients if sizes are equal; ``effective_classes``: mean exponential of a
    client's label entropy. Without labels, as for language modeling and regression, only ``effective_clients`` is
    computed, and the others are None.

    Args:
        federation: Data of all clients.
        ids: Clients whose labels are compared; ``effective_clients`` uses the sizes of all.
    """
    task, sizes = federation.objective, federation.sizes.astype(float)
    effective = float(sizes.sum() ** 2 / np.square(sizes).sum())
    if "counts" not in task.provides:
        names = ("distance_mean", "distance_max", "distance_chance", "entropy_gap")
        return {**{f"label_{name}": None for name in names}, "effective_clients": effective, "effective_classes": None}
    counts = np.array([task.counts(federation.clients[k].y, federation.classes).tolist() for k in ids], float)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    total = counts.sum(0) / max(1.0, counts.sum())
    distances, entropies = label_distances(counts)
    with np.errstate(divide="ignore", invalid="ignore"):
        gaps = np.where(shares > 0, shares * np.log(shares / total), 0.0).sum(1)
    return {
        "label_distance_mean": float(distances.mean()),
        "label_distance_max": float(distances.max()),
        "label_distance_chance": label_distance_by_chance(total, counts.sum(1).tolist()),
        "label_entropy_gap": float(gaps.mean()),
        "effective_clients": effective,
        "effective_classes": float(np.exp(entropies).mean()),
    }


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
