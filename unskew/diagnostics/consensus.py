"""How far apart clients are, layer by layer (Gholami and Seferoglu 2024, arXiv:2404.11754, Figure 1)."""

from __future__ import annotations

import torch
from torch import Tensor

from unskew.diagnostics.local_models import local_model
from unskew.methods.rules import Update
from unskew.models.groups import layer_groups
from unskew.models.vector import ModelSpec
from unskew.simulation.server import Server


class Consensus:
    """The consensus distance of every layer just before averaging.

    ``consensus/LAYER`` is ``(1/K) sum_k ||theta_k^l - mean_j theta_j^l||^2`` over the clients of the round, with their whole
    models where a part of them stays at the client. Layers are groups in order of depth (``unskew.models.groups``).

    Args:
        spec: The model's layout.
        server: Whose updates are watched from now on.
    """

    def __init__(self, spec: ModelSpec, server: Server):
        self.spec, self.server, self.groups = spec, server, layer_groups(spec)
        self.models: list[Tensor] = []
        self.start = server.v
        server.watchers.append(self._see)

    def begin(self) -> None:
        """The next round starts from the server's model."""
        self.start = self.server.v
        self.models.clear()

    def _see(self, update: Update) -> None:
        self.models.append(local_model(update, self.start))

    def figures(self) -> dict[str, float]:
        """The distance of each layer in the round that has just ended; nothing if no update came."""
        if not self.models:
            return {}
        models = torch.stack(self.models)
        squares = (models - models.mean(0)).square().mean(0)
        return {
            f"consensus/{group.name}": float(torch.stack([squares[piece].sum() for piece in group.slices]).sum())
            for group in self.groups
        }
