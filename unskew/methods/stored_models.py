"""Shared base of methods whose server stores the last model of every client."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from unskew.errors import ConfigError
from unskew.methods.own_models import OwnModels
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.rules import Context, Tensors, Updates
from unskew.protocol.run_context import PreRunContext

LARGEST = 4_000_000_000
"""Largest number of bytes of the models at the server."""


class StoredModels(OwnModels):
    """Base of methods in which clients send their own model, and the server stores the last one of each client."""

    needs: Collection[str] = ("individual",)

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate that the server can store the clients' models.

        Args:
            run: Run to check, with its configuration, federation and model.

        Raises:
            ConfigError: If the models are too large.
        """
        clients = len(run.federation.clients)
        needed = run.spec.dtype.itemsize * clients * self.numbers_per_client(run.spec.size, clients)
        if needed > LARGEST:
            raise ConfigError(
                f"{self.name} stores a model for each client at the server, which needs {needed / 1e9:.0f} GB here. Use "
                "fewer clients or a smaller model."
            )
        return super().check(run)

    def numbers_per_client(self, size: int, clients: int) -> int:
        """Return how many numbers the server stores per client.

        Args:
            size: Number of parameters of the model.
            clients: Number of clients.
        """
        return size

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """Upload the model, ``[1, d]``: of vectors ``[d]`` only the exchanged slices are sent."""
        ctx.upload["model"] = v[None]

    def server_init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Create space for the clients' models, ``[K, d]``, and a mask of the known ones on the CPU, ``[K]``.

        Hooks read the mask for each client.
        """
        clients = federation_info.clients
        return {"models": v.new_zeros(clients, len(v)), "known": torch.zeros(clients, dtype=torch.bool)}

    def server_update(self, state: Tensors, updates: Updates) -> Tensors:
        """Store the models of the round."""
        new = {name: tensor.clone() for name, tensor in state.items()}
        for update in updates:
            new["models"][update.client] = update.upload[self.name]["model"][0]
            new["known"][update.client] = True
        return new
