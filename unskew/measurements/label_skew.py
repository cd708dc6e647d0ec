"""Label skew and size skew of clients, compared with chance, from sums over the clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from unskew.data.federation import Federation
from unskew.sums.base import ClientRows, SumRequest, Sums
from unskew.sums.exchange import SimulatedExchange
from unskew.sums.skew import SCALARS, SIZES, label_distance_by_chance, label_distances
from unskew.sums.statistics import Metrics, Statistic, skew_metrics


@dataclass(frozen=True)
class LabelSkew(Statistic):
    """Metrics of label skew and quantity skew.

    ``label_distance_mean``: total variation distance, ``1/2 sum_c |q_kc - q_c|``, between the class frequencies of a client
    and of all clients together; ``label_distance_chance``: mean distance expected by chance for clients of these sizes;
    ``label_entropy_gap``: mean Kullback-Leibler divergence between the same frequencies, in nats (0 if equal, ``ln C`` for
    balanced classes and one class per client); ``effective_clients``: ``(sum n_k)^2 / sum n_k^2``, the number of clients if
    sizes are equal; ``effective_classes``: mean exponential of a client's label entropy. ``label_distance_max`` is not a
    function of sums, so it is None.

    With one class per sample, ``label_between``, see ``unskew.measurements.site_differences``, follows as well.

    Attributes:
        classes: Number of classes; 0 without labels that can be counted: only ``effective_clients`` is known then.
        one_class: Whether each sample has one class.
    """

    classes: int
    one_class: bool = True

    def first(self) -> list[SumRequest]:
        """Return the request for the samples of each class."""
        return [SumRequest("class_counts", {"classes": self.classes})] if self.classes else []

    def second(self, first: Sequence[Sums]) -> list[SumRequest]:
        """Return the request for distances from the class frequencies of all clients."""
        counts = first[0]["counts"].double().clamp(min=0) if first else torch.zeros(0, dtype=torch.float64)
        return [SumRequest("site_scalars", {"classes": self.classes}, {"shares": counts / counts.sum().clamp(min=1)})]

    def metrics(self, first: Sequence[Sums], second: Sequence[Sums]) -> Metrics:
        """Return the metrics."""
        sizes = dict(zip(SIZES, second[0]["sizes"].tolist(), strict=True))
        names = ("distance_mean", "distance_max", "distance_chance", "entropy_gap")
        metrics: Metrics = {f"label_{name}": None for name in names}
        metrics["effective_clients"] = effective_clients(sizes["rows"], sizes["rows2"])
        metrics["effective_classes"] = None
        if not first or not second[0]["labels"][0]:
            return metrics
        totals = dict(zip(SCALARS, second[0]["labels"].tolist(), strict=True))
        K = totals["clients"]  # a site with a small class sends no numbers on its labels
        counts = first[0]["counts"].double().clamp(min=0).numpy()  # noise may make them negative
        shares = counts / max(1.0, counts.sum())
        metrics["label_distance_mean"] = totals["distance"] / K
        # Of clients of equal size, a client has the share 1/K of all labels.
        spread = totals["inverse_root"] / K * max(0.0, 1 - 1 / K) ** 0.5
        metrics["label_distance_chance"] = label_distance_by_chance(shares, spread)
        metrics["label_entropy_gap"] = totals["divergence"] / K
        metrics["effective_classes"] = totals["classes"] / K
        if self.one_class:
            scatter = float(counts.sum() * (shares * (1 - shares)).sum())
            metrics["label_between"] = share_between(totals["between"], scatter, scatter, sizes["rows"], K)
        return metrics


def label_skew_metrics(federation: Federation, ids: Sequence[int]) -> Metrics:
    """Compute the metrics of ``LabelSkew`` in a simulation, and ``label_distance_max``.

    Args:
        federation: Data of all clients.
        ids: Clients whose labels are compared; ``effective_clients`` uses the sizes of all.
    """
    task, sizes = federation.objective, federation.sizes
    classes = federation.classes if "counts" in task.provides else 0
    targets = [federation.clients[k].y for k in ids] if classes else []
    counts = [task.counts(y, classes) for y in targets]
    rows = [ClientRows(y=y, class_counts=partial(counts.__getitem__, i)) for i, y in enumerate(targets)]
    metrics = skew_metrics(SimulatedExchange(lambda: rows or [ClientRows()]), [LabelSkew(classes, one_class=False)])
    metrics["effective_clients"] = effective_clients(float(sizes.sum()), float(np.square(sizes.astype(float)).sum()))
    if classes:
        each = torch.stack(counts).double().numpy()
        metrics["label_distance_max"] = float(label_distances(each, each.sum(0) / max(1, each.sum()))[0].max())
    return metrics


def effective_clients(total: float, squares: float) -> float:
    """Return the effective number of clients, ``(sum n_k)^2 / sum n_k^2``; 0 without samples.

    Args:
        total: Sum of the sizes.
        squares: Sum of their squares.
    """
    return total**2 / squares if squares else 0.0


def share_between(
    between: float, scatter: float, variance: float, rows: float, clients: float, parameters: int = 1
) -> float:
    """Return the share of a variance that lies between clients, without the share expected by chance (``omega^2``).

    Args:
        between: Sum of squares between the clients' means.
        scatter: Sum of squares of all samples.
        variance: Sum of squares of the targets.
        rows: Number of samples.
        clients: Number of clients.
        parameters: Number of parameters that were fitted to all samples.
    """
    chance = (clients - 1) * (scatter - between) / max(1.0, rows - clients - parameters + 1)
    return max(0.0, float((between - chance) / variance)) if variance > 0 else 0.0
