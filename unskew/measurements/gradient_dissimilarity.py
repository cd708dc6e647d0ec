"""Gradient dissimilarity of clients over the rounds, the central quantity of Fedssyn's theory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from unskew.data.federation import ClientData, Federation, take_rows
from unskew.measurements.base import Diagnostic
from unskew.measurements.gradient_probe import GradientProbe
from unskew.measurements.heterogeneity import MeasurementScope, measure, selected_samples
from unskew.simulation.server import Server


class _FirstSamples(Sequence[ClientData]):
    """Clients restricted to their first samples, which are their own samples before synthetic ones were added."""

    def __init__(self, clients: Sequence[ClientData], sizes: Sequence[int]):
        self.clients, self.sizes = clients, sizes

    def __len__(self) -> int:
        return len(self.clients)

    def __getitem__(self, k: int) -> ClientData:  # type: ignore[override]
        return _largest_batches(self.clients[k], 0, self.sizes[k])


def _largest_batches(client: ClientData, first: int, end: int) -> ClientData:
    index = torch.arange(first, end, device=client.y.device)
    return replace(client, x=take_rows(client.x, index), y=client.y[index])


class Gradients(Diagnostic):
    """Gradient dissimilarity and noise at the server's model after a round.

    Metrics: ``gradients/zeta2``, ``gradients/norm2`` (of the mean gradient), ``gradients/sigma2_mean`` and
    ``gradients/sigma2_max``. They are computed on the training data, so with
    a method that adds synthetic data they describe the mixture. If every client received synthetic data, there are also
    ``gradients/zeta2_real`` and ``gradients/sigma2_real`` of the original data, and ``gradients/delta2``, the squared
    distance of the mean gradients on synthetic and original data (Fedssyn's Lemma 1). At most 100 clients with at most
    1000 samples each are measured, the same in every round.

    Args:
        server: Server of the run.
        federation: Data that the clients train on.
        original: Data before the method added any.
    """

    def __init__(self, server: Server, federation: Federation, original: Federation):
        super().__init__(server)
        self.federation = federation
        self.scope = replace(MeasurementScope(), curvature=False, seed=server.setup.seed, shares=())
        before, after = original.sizes, federation.sizes
        added = len(before) == len(after) and bool((after > before).all())
        self.federation_before = (
            replace(federation, clients=_FirstSamples(federation.clients, before.tolist())) if added else None
        )

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name."""
        server = self.server
        state, objective = server.state, self.federation.objective
        probe = GradientProbe(server.setup.spec, objective, self.federation, state.v, state.b)
        values = measure(probe, self.federation, self.scope).metrics
        names = {"zeta2": "zeta2", "norm2": "gradient2", "sigma2_mean": "sigma2_mean", "sigma2_max": "sigma2_max"}
        metrics = {f"gradients/{name}": float(values[key] or 0.0) for name, key in names.items()}
        if self.federation_before is not None:
            apart = measure(probe, self.federation_before, self.scope, self._added).metrics
            names = {"zeta2_real": "zeta2", "sigma2_real": "sigma2_mean", "delta2": "delta2"}
            metrics |= {f"gradients/{name}": float(apart[key] or 0.0) for name, key in names.items()}
        return metrics

    def _added(self, k: int) -> tuple[Tensor, Tensor]:
        assert self.federation_before is not None
        client = self.federation.clients[k]
        return selected_samples(
            _largest_batches(client, self.federation_before.clients[k].num_samples, client.num_samples), self.scope
        )
