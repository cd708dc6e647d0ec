"""FedRep: all clients share the body of the model, and each client has its own head.

Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning", 2021,
arXiv:2102.07078, Algorithm 1. A client receives the body ``phi``, keeps its head ``h_k``, and in every round::

    h_k   <- h_k - eta grad_h f_k(phi, h_k)         first steps, the body is frozen
    phi_k <- phi_k - eta grad_phi f_k(phi_k, h_k)   the other steps, the head is frozen
    phi   <- mean_S phi_k

The paper counts epochs: ``E_h`` on the head, then ``E_b`` on the body. Here both share the run's budget: the first
``round(head_share tau)`` of the ``tau`` local steps train the head. The paper's setting is ``local_epochs = E_h + E_b`` with
``head_share = E_h / (E_h + E_b)``. The average is uniform, as in the paper.

The default 2/3 is ``E_h = 10``, ``E_b = 5``, as in six of the seven scripts of the authors' code (lgcollins/FedRep:
``local_ep=15``, ``local_rep_ep=5``). The seventh, CIFAR-10 with 100 clients of two classes, has ``E_b = 1``, that is
``head_share=0.909``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.methods.partial_sharing import PartialSharing
from unskew.models.execution import Batch
from unskew.models.spec import ModelSpec, slices_mask
from unskew.protocol.rules import ClientRule, Context, Slices, Tensors, Weights
from unskew.protocol.search_space import Space, uniform_range


@dataclass(frozen=True)
class FedRep(ClientRule, PartialSharing):
    """Shared body with one head per client.

    Attributes:
        weights: Client weighting with ``client_weighting=auto``; None if the method does not choose one.
        head_share: Share of the local steps that train the head; half a step is rounded up. With 0 no head is trained,
            with 1 no body. The default is ten epochs on the head and five on the body, as in all scripts of the
            authors' code but one: CIFAR-10 with 100 clients of two classes uses 0.909, one epoch on the body.
    """

    name: ClassVar[str] = "fedrep"
    summary: ClassVar[str] = "a shared body and a head of each client's own"
    paper: ClassVar[str] = "Collins et al. 2021, arXiv:2102.07078"
    # Both the head and the body must be trained.
    spaces: ClassVar[Mapping[str, Space]] = {"head_share": uniform_range(0.1, 0.9)}
    weights: ClassVar[Weights | None] = "uniform"

    head_share: Annotated[float, Field(ge=0, le=1)] = 2 / 3

    def shared_slices(self, spec: ModelSpec) -> Slices:
        """Return the slices of the body."""
        return tuple(spec.parts["body"])

    def local_slices(self, spec: ModelSpec) -> Slices:
        """Return the slices of the head."""
        return tuple(spec.parts["head"])

    def begin(self, ctx: Context) -> Tensors:
        """Store the position of the head in the vector, and the number of steps that train it."""
        head = slices_mask(ctx.spec.parts["head"], ctx.spec.size).to(ctx.v_global.device)
        return {"head": head, "steps": torch.floor(self.head_share * ctx.steps + 0.5)}

    def trainable_mask(self, ctx: Context, carry: Tensors, batch: Batch) -> Tensor:
        """Return the mask of the head in the first steps, then that of the body."""
        return carry["head"] == (batch.step < carry["steps"])
