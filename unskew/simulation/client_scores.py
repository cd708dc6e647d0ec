"""Scores of a model, or of personal models, at each client, and their summary over clients."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from unskew.tasks.intervals import clip_interval, interval95, interval_fields
from unskew.tasks.primary_metric import MetricInfo

NAMED = 20
"""Maximum number of clients that a summary names for which a metric is undefined."""


@dataclass(frozen=True)
class ClientScores:
    """Scores of a model, or of personal models, per client.

    Attributes:
        accuracies: Primary metric of each client, ``[K']``.
        measured_on: Description of the evaluated data.
        losses: Mean loss of each client, ``[K']``.
        ids: Client ids, ``[K']``.
        scored: Name of the primary metric, which ``accuracies`` contains.
        others: Further metrics of each client by name, ``[K']``; NaN for undefined values.
        pooled: Further metrics over the samples of all these clients together, by name.
    """

    accuracies: np.ndarray
    measured_on: str
    losses: np.ndarray = field(default_factory=lambda: np.zeros(0))
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    scored: str = "accuracy"
    others: Mapping[str, np.ndarray] = field(default_factory=dict)
    pooled: Mapping[str, float] = field(default_factory=dict)

    def metrics(self, whose: str, metric: MetricInfo, client_names: Sequence[str] = ()) -> dict[str, Any]:
        """Return the mean, standard deviation, worst client and worst decile of a metric over clients, for the summary.

        Clients for which the metric is undefined are counted and named. The variance is divided by the number of clients.
        The mean has the interval of Student's t, within the range of the metric.

        Args:
            whose: Prefix of the keys: ``"client"`` or ``"personal"``.
            metric: Metric to summarize.
            client_names: Names of all clients, to name the worst one; empty if clients have no names.
        """
        name = f"{whose}_{metric.name}"
        nothing: dict[str, Any] = dict.fromkeys(f"{name}_{what}" for what in ("mean", "std", "worst", "worst_decile"))
        values = {self.scored: self.accuracies, "loss": self.losses, **self.others}.get(metric.name)
        if values is None:  # it was not measured, as on test samples weighted by class, or at sites
            return nothing
        finite = np.flatnonzero(np.isfinite(values))
        everyone = self.ids if len(self.ids) else np.arange(len(values))
        without = [client_names[k] if client_names else k for k in np.delete(everyone, finite).tolist()]
        named = {f"{name}_undefined": len(without), f"{name}_undefined_names": without[:NAMED]} if without else {}
        if not len(finite):
            return nothing | named
        values, ids = values[finite], everyone[finite]
        worst = values.argmax() if metric.lower_is_better else values.argmin()
        decile = np.sort(-values if metric.lower_is_better else values)[: max(1, len(values) // 10)].mean()
        return {
            f"{name}_mean": float(values.mean()),
            **interval_fields(f"{name}_mean", clip_interval(interval95(values.tolist()), metric)),
            **named,
            f"{name}_std": float(values.std()),
            f"{name}_worst": float(values[worst]),
            **({f"{name}_worst_name": client_names[int(ids[worst])]} if client_names else {}),
            f"{name}_worst_decile": float(-decile if metric.lower_is_better else decile),
        }

    def by_client(self, prefix: str = "") -> dict[int, dict[str, float]]:
        """Return the metrics of each client, with a prefix of their names for a further model."""
        metrics = {self.scored: self.accuracies, **({"loss": self.losses} if len(self.losses) else {}), **self.others}
        return {
            int(k): {f"{prefix}{name}": float(values[i]) for name, values in metrics.items()}
            for i, k in enumerate(self.ids)
        }

    def without(self, clients: Collection[int]) -> ClientScores:
        """Return the scores of all other clients."""
        others = ~np.isin(self.ids, list(clients))
        if len(self.ids) != len(self.accuracies) or others.all():
            return self
        metrics = {name: values[others] for name, values in self.others.items()}
        losses = self.losses[others] if len(self.losses) else self.losses
        return replace(self, accuracies=self.accuracies[others], losses=losses, ids=self.ids[others], others=metrics)
