"""FedBABU: only the body is trained and averaged; the head keeps its random initial values until clients fine-tune.

Oh, Kim, Yun, "FedBABU: Towards Enhanced Representation for Federated Image Classification", 2021, arXiv:2106.06042,
Algorithm 1. With the initial head ``h_0`` at all clients::

    every round       phi_k <- phi_k - lr grad_phi f_k(phi_k, h_0);   phi <- sum_k p_k phi_k
    after the rounds  each client trains ``tune`` of (phi, h_0), which gives its personal model

The average is weighted by samples, as in the paper. The fine-tuning is one more local training with the run's budget; the
authors' is 5 epochs (``ft_ep`` of jhoon-oh/FedBABU).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.methods.partial_sharing import PartialSharing
from unskew.models.execution import Batch
from unskew.models.spec import ModelSpec, slices_mask
from unskew.protocol.rules import ClientRule, Context, Slices, Tensors
from unskew.protocol.search_space import Space, one_of


@dataclass(frozen=True)
class FedBABU(ClientRule, PartialSharing):
    """Shared body under a fixed random head, with fine-tuning at the end.

    Attributes:
        tune: Part of the model that clients fine-tune: ``full``, ``head`` or ``body``.
    """

    name: ClassVar[str] = "fedbabu"
    summary: ClassVar[str] = "averages the body under a fixed random head, then clients fine-tune"
    paper: ClassVar[str] = "Oh et al. 2021, arXiv:2106.06042"
    needs = ("final_training",)
    # The three choices that the paper compares.
    spaces: ClassVar[Mapping[str, Space]] = {"tune": one_of("full", "head", "body")}

    tune: Literal["full", "head", "body"] = "full"

    def shared_slices(self, spec: ModelSpec) -> Slices:
        """Return the slices of the body. No slices are personal, because all clients have the initial head."""
        return tuple(spec.parts["body"])

    def begin(self, ctx: Context) -> Tensors:
        """Store the position of the part that is trained."""
        part = self.tune if ctx.final else "body"
        if part == "full":
            return {"trains": torch.ones_like(ctx.v_global, dtype=torch.bool)}
        return {"trains": slices_mask(ctx.spec.parts[part], ctx.spec.size).to(ctx.v_global.device)}

    def trainable_mask(self, ctx: Context, carry: Tensors, batch: Batch) -> Tensor:
        """Return the mask of the body in the rounds, and of the tuned part in the final training."""
        return carry["trains"]
