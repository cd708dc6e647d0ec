"""Consensus distance of each layer (Gholami and Seferoglu 2024, arXiv:2404.11754, Figure 1)."""

from __future__ import annotations

import torch

from unskew.measurements.base import Diagnostic
from unskew.models.layer_groups import layer_groups
from unskew.simulation.server import Server


class Consensus(Diagnostic):
    """Consensus distance of every layer just before averaging.

    ``consensus/LAYER`` is ``(1/K) sum_k ||theta_k^l - mean_j theta_j^l||^2`` over the clients of the round. It uses
    their full models, even if some parameters are not sent. Layers are groups in order of depth
    (``unskew.models.layer_groups``).

    Args:
        server: Server of the run, whose updates are collected from now on.
    """

    def __init__(self, server: Server):
        super().__init__(server)
        self.groups = layer_groups(server.setup.spec)

    def metrics(self) -> dict[str, float]:
        """Return the distance of each layer."""
        models = torch.stack(self.models())
        squares = (models - models.mean(0)).square().mean(0)
        return {
            f"consensus/{group.name}": float(torch.stack([squares[span].sum() for span in group.slices]).sum())
            for group in self.groups
        }
