"""FedEx-LoRA: averaged LoRA factors, and a correction of the weights that makes the average of the models exact.

Singhal, Ponkshe, Vepakomma, "Exact Aggregation for Federated and Efficient Fine-Tuning of Foundation Models", 2024,
arXiv:2410.09432. A weight of the model is ``W + s B A``, ``s = alpha / r``. Clients train the factors, and with their means
``A'`` and ``B'`` the server computes::

    W <- W + s (sum_k p_k B_k A_k - B' A')          so that  W + s B' A' = sum_k p_k (W + s B_k A_k)

Other trained parameters, such as a classifier's head, are averaged. The average is uniform, as in the paper.

The authors' code (``fed_agg.py`` of RaghavSinghal10/fedex-lora) adds the transposed correction to every weight, which is
right for layers that store their weight as ``[in, out]`` (GPT-2), and wrong for others. Clients receive ``W``. The rank of
its change is at most that of all clients' factors together, so sending factors would be smaller if few clients take part.
"""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.methods.lora_factors import FactorProducts, lora_layers, weights_mask
from unskew.models.execution import Batch
from unskew.models.spec import ModelSpec, mask_slices
from unskew.protocol.rules import Combined, Context, Slices, Tensors, Updates, Weights


@dataclass(frozen=True)
class FedEx(FactorProducts):
    """Exact averages of LoRA updates, with factors that continue from round to round."""

    name: ClassVar[str] = "fedex"
    summary: ClassVar[str] = "averages LoRA factors, and corrects the weights so that the average is exact"
    paper: ClassVar[str] = "Singhal et al. 2024, arXiv:2410.09432"
    weights: ClassVar[Weights | None] = "uniform"
    conflict: ClassVar[str] = "fedex also changes weights that clients do not send"

    def exchanged_slices(
        self, state: Tensors, round: int, client: int, last: int | None, spec: ModelSpec
    ) -> tuple[Slices, Slices]:
        """Send the whole model to clients, and everything but the weights ``W`` to the server."""
        return (slice(0, spec.size),), without_weights(spec)

    def begin(self, ctx: Context) -> Tensors:
        """Return the mask of the parameters that clients train."""
        return {"trained": ~weights_mask(ctx.spec).to(ctx.v_global.device)}

    def trainable_mask(self, ctx: Context, carry: Tensors, batch: Batch) -> Tensor:
        """Freeze the weights ``W``."""
        return carry["trained"]

    def combine(self, state: Tensors, updates: Updates) -> tuple[Tensors, Combined]:
        """Average what clients send, and add the correction to the weights.

        Args:
            state: State of the rule, which is empty.
            updates: Factors and updates of the clients.
        """
        spec, delta = updates.spec, updates.aggregate.delta
        values = list(torch.split(delta, spec.sizes))
        mean = as_matrices(spec, updates.v_global + delta)
        sent = [as_matrices(spec, updates.v_global + update.delta) for update in updates]
        shares = [update.weight / updates.aggregate.weight for update in updates]
        for layer in lora_layers(spec):
            exact = sum(p * (own[layer.b] @ own[layer.a]) for p, own in zip(shares, sent, strict=True))
            values[layer.weight] = layer.change(exact - mean[layer.b] @ mean[layer.a])
        return state, Combined(torch.cat(values), changed=torch.ones_like(delta, dtype=torch.bool))


def as_matrices(spec: ModelSpec, v: Tensor) -> list[Tensor]:
    """Return the parameters of a model in their shapes, in order.

    Args:
        spec: Layout of the model.
        v: Parameters, ``[d]``.
    """
    return list(spec.parameters(v).values())


@lru_cache(maxsize=16)
def without_weights(spec: ModelSpec) -> Slices:
    """Return the slices of everything but the weights that have factors.

    Args:
        spec: Layout of a model that ``FactorProducts.adapt`` returned.
    """
    return mask_slices(~weights_mask(spec))
