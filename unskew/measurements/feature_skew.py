"""Feature skew: differences of clients' inputs within a class, from sums over the clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from unskew.sums.base import ClientRows, SumRequest, Sums
from unskew.sums.exchange import SimulatedExchange
from unskew.sums.skew import has_class_means
from unskew.sums.statistics import Metrics, Statistic, skew_metrics

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class FeatureSkew(Statistic):
    """Share of the within-class input variance that lies between clients: ``omega^2`` of an analysis of variance.

    For each class, with ``K`` clients that have at least two of its samples, scatter ``SSB`` between and ``SSW`` within the
    clients' means, and ``MSW = SSW / (n - K)``::

        omega^2 = (SSB - (K - 1) MSW) / (SSB + SSW + MSW)

    This is 0 in expectation if all clients draw inputs from the same distribution, and 1 if each client has a single
    input per class. The result is the mean over classes, weighted by their samples, and at least 0. It is None if no class
    occurs at two clients.

    Attributes:
        classes: Number of classes.
        inputs: Number of inputs of a sample.
    """

    classes: int
    inputs: int

    def first(self) -> list[SumRequest]:
        """Return the request for the means of each class."""
        return [SumRequest("class_means", {"classes": self.classes, "inputs": self.inputs})]

    def second(self, first: Sequence[Sums]) -> list[SumRequest]:
        """Return the request for the scatter of the clients' means."""
        means = first[0]["sums"] / first[0]["counts"].clamp(min=1)[:, None]
        return [SumRequest("class_scatter", {"classes": self.classes, "inputs": self.inputs}, {"means": means})]

    def metrics(self, first: Sequence[Sums], second: Sequence[Sums]) -> Metrics:
        """Return ``feature_skew``."""
        n, K, within, between = (
            tensor.double().numpy()
            for tensor in (first[0]["counts"], first[0]["clients"], first[0]["scatter"], second[0]["scatter"])
        )
        shared = K > 1
        if not shared.any():
            return {"feature_skew": None}
        n, K, within, between = n[shared], K[shared], within[shared], between[shared]
        error = within / (n - K)
        total = between + within + error
        shares = np.divide(between - (K - 1) * error, total, where=total > 0, out=np.zeros_like(total))
        return {"feature_skew": max(0.0, float(np.average(shares, weights=n)))}


def feature_skew(pairs: Callable[[int], Pair], ids: Sequence[int], classes: int) -> float | None:
    """Compute ``FeatureSkew`` in a simulation; None if inputs are token ids or targets are not one class per sample.

    Args:
        pairs: Returns inputs ``x [n, ...]`` and classes ``y [n]`` of a client.
        ids: Clients to measure.
        classes: Number of classes.
    """
    first_x, first_y = pairs(ids[0])
    if not has_class_means(first_x, first_y):
        return None

    def clients() -> Iterator[ClientRows]:
        for k in ids:
            x, y = pairs(k)
            yield ClientRows(x=x, y=y)

    statistic = FeatureSkew(classes, first_x[:1].numel())
    return skew_metrics(SimulatedExchange(clients), [statistic])["feature_skew"]
