"""FLoRA: exact averages of LoRA updates of any rank, merged into the weights in every round.

Wang, Shen, He, Sun, Wang, Lyu, Li, "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank
Adaptations", 2024, arXiv:2409.05976, Section 3 and Algorithm 1. A weight of the model is ``W + s B A``, ``s = alpha / r``.
In every round, client ``k`` draws a new ``A_k [r_k, in]``, sets ``B_k [out, r_k]`` to 0, trains both and sends them. The
server stacks them::

    A = [p_1 A_1; ...; p_K A_K]     B = [B_1, ..., B_K]
    W <- W + s B A = W + s sum_k p_k B_k A_k

This is the mean of the clients' models, unlike the product of the mean factors. Ranks may differ between clients; ``s`` is
the same for all, as in the authors' code (ATP-1010/FederatedLLM: ``lora_alpha`` is twice the rank). Other trained parameters,
such as a classifier's head, are averaged.

Clients receive ``W``. The authors send ``A`` and ``B``, which is smaller if ``sum_k r_k`` is small, but needs every client in
every round.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from unskew.errors import ConfigError
from unskew.methods.lora_factors import ADAPTER, lora_layers
from unskew.methods.lora_ranks import WEIGHT, RankedFactors, components, first_components, model_rank
from unskew.models.execution import Batch
from unskew.models.spec import ModelSpec, mask_slices
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.rules import START, Combined, Context, Shape, Slices, Tensors, Updates
from unskew.seeding import fold, uniform

PURPOSE = 7
"""Separates the draws of ``A`` from other draws with a client's key."""


@dataclass(frozen=True)
class FLoRA(RankedFactors):
    """Exact averages of LoRA updates, also with different ranks.

    Attributes:
        ranks: Ranks of the clients' factors, separated by slashes, at most the ``r`` of the model. Client ``k`` has
            rank number ``k`` modulo their count. Empty for ``r`` at all clients. The scale ``s`` of the model is the
            same for all ranks.
    """

    name: ClassVar[str] = "flora"
    summary: ClassVar[str] = "averages LoRA updates exactly, also of different ranks"
    paper: ClassVar[str] = "Wang et al. 2024, arXiv:2409.05976"
    successive_models_differ: ClassVar[bool] = True
    changes_start: ClassVar[bool] = True
    conflict: ClassVar[str] = "flora's clients train new LoRA factors in each round"

    ranks: str = ""

    def adapt(self, module: nn.Module, head: str) -> tuple[nn.Module, str]:
        """Add products of factors to the weights, because clients start with ``B = 0``.

        Args:
            module: Model with LoRA factors.
            head: Name of its head.
        """
        module, head = super().adapt(module, head)
        layers: list[Any] = [layer for layer in module.modules() if ADAPTER in getattr(layer, "lora_A", ())]
        with torch.no_grad():
            for layer in layers:
                layer.get_base_layer().weight += layer.get_delta_weight(ADAPTER)
                layer.lora_B[ADAPTER].weight.zero_()
        return module, head

    def rank_of(self, client: int, spec: ModelSpec) -> int:
        """Return the rank of a client's factors.

        Args:
            client: Client number.
            spec: Layout of the model.
        """
        listed = self.listed_ranks or [model_rank(spec)]
        return listed[client % len(listed)]

    def exchanged_slices(
        self, state: Tensors, round: int, client: int, last: int | None, spec: ModelSpec
    ) -> tuple[Slices, Slices]:
        """Send everything but the factors to clients, and everything but the weights ``W`` to the server."""
        return without_factors(spec), first_components(spec, self.rank_of(client, spec))

    def server_init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Store the ranks, if the clients have their own."""
        return {"ranks": v.new_tensor(self.listed_ranks)} if self.ranks else {}

    def download_shapes(self, spec: ModelSpec, plan: RoundPlan) -> Mapping[str, Shape]:
        """Return the shape of the rank."""
        return {"rank": ()} if self.ranks else {}

    def download(self, state: Tensors, client: int) -> Tensors:
        """Send the client's rank, if the clients have their own."""
        return {"rank": state["ranks"][client % len(state["ranks"])]} if state else {}

    def begin(self, ctx: Context) -> Tensors:
        """Start with a new random ``A``, as peft draws it, and with ``B = 0``."""
        values = list(torch.split(ctx.v_global, ctx.spec.sizes))
        for number, layer in enumerate(lora_layers(ctx.spec)):
            draws = uniform(fold(fold(ctx.key, PURPOSE), number), (ctx.spec.sizes[layer.a],)).to(ctx.v_global)
            values[layer.a] = (2 * draws - 1) * ctx.spec.shapes[layer.a][1] ** -0.5
            values[layer.b] = torch.zeros_like(values[layer.b])
        start = torch.cat(values)
        rows = components(ctx.spec).to(start.device)
        rank = ctx.download.get("rank", model_rank(ctx.spec))
        unused = (rows >= rank) & (rows < WEIGHT)
        return {START: torch.where(unused, 0.0, start), "trained": rows < rank}

    def trainable_mask(self, ctx: Context, carry: Tensors, batch: Batch) -> Tensor:
        """Return the mask of what the client sends: factors of its rank, and parameters without factors."""
        return carry["trained"]

    def combine(self, state: Tensors, updates: Updates) -> tuple[Tensors, Combined]:
        """Add the mean of the products to the weights, and average parameters without factors.

        Args:
            state: State of the rule, which is empty.
            updates: Factors and updates of the clients.

        Raises:
            ConfigError: If the model has products of factors, which clients did not receive.
        """
        spec = updates.spec
        parts = torch.split(updates.v_global, spec.sizes)
        if any(parts[layer.b].any() for layer in lora_layers(spec)):
            raise ConfigError(
                "The run in start_from has trained LoRA factors, which flora does not send to clients. Start from a run of "
                "flora, or from the exported model of that run."
            )
        delta = updates.aggregate.delta
        values = list(torch.split(delta, spec.sizes))
        # Updates are differences to the server's factors, which are not sent and do not change.
        sent = [torch.split(updates.v_global + update.delta, spec.sizes) for update in updates]
        shares = [update.weight / updates.aggregate.weight for update in updates]
        for layer in lora_layers(spec):
            a = torch.cat([p * own[layer.a].view(spec.shapes[layer.a]) for p, own in zip(shares, sent, strict=True)])
            b = torch.cat([own[layer.b].view(spec.shapes[layer.b]) for own in sent], dim=1)
            values[layer.weight] = layer.change(b @ a)
            values[layer.a] = torch.zeros_like(values[layer.a])
            values[layer.b] = torch.zeros_like(values[layer.b])
        return state, Combined(torch.cat(values), changed=~factors_mask(spec).to(delta.device))


def factors_mask(spec: ModelSpec) -> Tensor:
    """Return the mask of the entries of all factors, boolean ``[d]``.

    Args:
        spec: Layout of a model that ``FactorProducts.adapt`` returned.
    """
    rows = components(spec)
    return (rows >= 0) & (rows < WEIGHT)


@lru_cache(maxsize=16)
def without_factors(spec: ModelSpec) -> Slices:
    """Return the slices of everything but the factors, which clients download.

    Args:
        spec: Layout of a model that ``FactorProducts.adapt`` returned.
    """
    return mask_slices(~factors_mask(spec))
