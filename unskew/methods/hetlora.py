"""HetLoRA: LoRA factors of different rank, which are averaged with weights that follow from the size of their products.

Cho, Liu, Xu, Fahrezi, Joshi, "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models", 2024,
arXiv:2401.06432. A weight of the model is ``W + s B A``, ``s = alpha / r``. Client ``k`` has the first ``r_k`` components of
the mean factors: rows of ``A``, columns of ``B``. With ``q = max(1, floor(gamma r_k))``::

    client:  trains on  loss + lam sum_layers ||A[q:]|| ||B[:, q:]||;   sends both factors
             if the penalized sum is smaller than before training:  r_k <- q
    server:  A <- sum_k p_k pad(A_k),   B <- sum_k p_k pad(B_k),   p_k = ||B_k A_k|| / sum_j ||B_j A_j||

``pad`` fills missing components with zeros, and all norms are Frobenius norms; that of the product is over all layers.

Choices where the paper's were not found: Components that no client of the round has do not change, because a component of
zeros would have no gradient. Other trained parameters, such as a classifier's head, are averaged with the weights of the run,
and so are the factors if all products are zero. ``s`` is the same for all ranks. The authors' code was not found, either;
``gamma`` and ``lam`` are those of a reimplementation (PabloE-KAIST/FedLoRA-public).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.methods.lora_factors import lora_layers
from unskew.methods.lora_ranks import RankedFactors, components, first_components, model_rank
from unskew.models.execution import Batch, LossFn
from unskew.models.spec import ModelSpec
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.rules import START, Combined, Context, Shape, Slices, Tensors, Updates
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, log_range, one_of
from unskew.protocol.updates import nonzero_divisors


@dataclass(frozen=True)
class HetLoRA(RankedFactors):
    """Averages of LoRA factors of different rank, which clients can reduce.

    Attributes:
        ranks: Ranks of the clients' factors at first, separated by slashes, at most the ``r`` of the model. Client ``k``
            has rank number ``k`` modulo their count. Empty for ``r`` at all clients.
        weighting: Weights of the clients' factors: the norms of their products (``norm``), or those of the run
            (``clients``).
        gamma: Share of the components without a penalty, to which a client can reduce its rank; 1 for constant ranks.
        lam: Strength of the penalty on the other components.
    """

    name: ClassVar[str] = "hetlora"
    summary: ClassVar[str] = "averages LoRA factors of different rank, weighted by the norm of their products"
    paper: ClassVar[str] = "Cho et al. 2024, arXiv:2401.06432"
    changes_start: ClassVar[bool] = True
    uploads: ClassVar[bool] = True
    upload_ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"pruned": (0.0, 1.0)}
    merges: ClassVar[bool] = False
    conflict: ClassVar[str] = "hetlora's clients have factors of different rank"
    # From constant ranks to those that halve; from a penalty without influence to one that dominates.
    spaces: ClassVar[Mapping[str, Space]] = {"gamma": one_of(0.5, 0.85, 0.99), "lam": log_range(1e-4, 1e-1)}
    idle_options = (({"gamma": 1}, ("lam",)),)

    ranks: str = ""
    weighting: Literal["norm", "clients"] = "norm"
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.99
    lam: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-3

    @property
    def averaging(self) -> Literal["given", "computed"]:  # type: ignore[override]
        """Return whether the factors have weights of the run, or norms as weights."""
        return "computed" if self.weighting == "norm" else "given"

    @property
    def trains_sub_models(self) -> bool:
        """True if a client has, or can get, factors of a smaller rank than the model's."""
        return bool(self.ranks) or self.gamma < 1

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate the ranks, and that the penalty has an effect."""
        return super().check(run)

    def reduced(self, rank: Tensor) -> Tensor:
        """Return the rank to which a client can reduce its own; a small number makes up for rounding."""
        return torch.floor(self.gamma * rank + 1e-4).clamp_min(1)

    # ---- at the clients -------------------------------------------------------------------------------------------------

    def begin(self, ctx: Context) -> Tensors:
        """Start with zeros in the components that the client does not have; return masks, and the penalized sum."""
        rank = ctx.download["rank"]
        rank = torch.where(rank > 0, rank, float(model_rank(ctx.spec)))
        rows = components(ctx.spec).to(ctx.v_global.device)
        trained, tail = rows < rank, (rows >= self.reduced(rank)) & (rows < rank)
        start = torch.where(trained, ctx.v_global, 0.0)
        return {START: start, "trained": trained, "tail": tail, "before": norm_products(ctx.spec, start, tail)}

    def loss(self, loss_fn: LossFn, ctx: Context, carry: Tensors) -> LossFn:
        """Add ``lam sum_layers ||A[q:]|| ||B[:, q:]||`` to the loss."""
        if self.lam == 0:
            return loss_fn
        return lambda v, batch: loss_fn(v, batch) + self.lam * norm_products(ctx.spec, v, carry["tail"])

    def trainable_mask(self, ctx: Context, carry: Tensors, batch: Batch) -> Tensor:
        """Freeze the components that the client does not have."""
        return carry["trained"]

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """Upload whether the client reduces its rank."""
        ctx.upload["pruned"] = (norm_products(ctx.spec, v, carry["tail"]) < carry["before"]).to(v.dtype)

    # ---- at the server --------------------------------------------------------------------------------------------------

    def server_init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Store the ranks of the clients on the CPU, ``[K]``; 0 for the model's."""
        listed = self.listed_ranks or [0]
        ranks = [listed[client % len(listed)] for client in range(federation_info.clients)]
        return {"ranks": torch.tensor(ranks, dtype=v.dtype)}

    def exchanged_slices(
        self, state: Tensors, round: int, client: int, last: int | None, spec: ModelSpec
    ) -> tuple[Slices, Slices]:
        """Exchange the client's components, and parameters without factors, in both directions."""
        ranks = state["ranks"]
        part = first_components(spec, int(ranks[client % len(ranks)]) or model_rank(spec))
        return part, part

    def download_shapes(self, spec: ModelSpec, plan: RoundPlan) -> Mapping[str, Shape]:
        """Return the shape of the rank."""
        return {"rank": ()}

    def download(self, state: Tensors, client: int) -> Tensors:
        """Send the client's rank."""
        return {"rank": state["ranks"][client % len(state["ranks"])]}

    def combine(self, state: Tensors, updates: Updates) -> tuple[Tensors, Combined]:
        """Average the padded factors, and parameters without factors; reduce ranks.

        Args:
            state: State of the server half.
            updates: Factors and updates of the clients.
        """
        spec, delta, v = updates.spec, updates.aggregate.delta, updates.v_global
        rows, ranks = components(spec).to(delta.device), state["ranks"].clone()
        ranks[ranks == 0] = float(model_rank(spec))
        sums, totals = torch.zeros(2, len(v)).to(v), torch.zeros(2).to(v)  # by the norms, and by the weights of the run
        largest = 0.0
        for update in updates:
            if float(update.upload[self.name]["pruned"]) > 0:
                ranks[update.client] = self.reduced(ranks[update.client])
            rank = float(ranks[update.client])
            largest = max(largest, rank)
            padded = torch.where((rows >= 0) & (rows < rank), v + update.delta, 0.0)
            norm = product_norm(spec, padded) if self.weighting == "norm" else padded.new_zeros(())
            weights = torch.stack([norm, norm.new_tensor(update.weight)])
            sums += weights[:, None] * padded
            totals += weights
        mean = torch.where(totals[0] > 0, sums[0] / nonzero_divisors(totals[0]), sums[1] / totals[1])
        changed = torch.where(rows < largest, mean - v, 0.0)
        return {"ranks": ranks}, Combined(torch.where(rows < 0, delta, changed))

    def metrics(self, state: Tensors, round: int, spec: ModelSpec) -> dict[str, Any]:
        """Return the mean rank of all clients."""
        ranks = state["ranks"]
        return {"hetlora_rank": float(torch.where(ranks > 0, ranks, float(model_rank(spec))).mean())}


@lru_cache(maxsize=16)
def factor_of_entries(spec: ModelSpec) -> Tensor:
    """Return the number of the factor of each entry, ``[d]``: ``2 l`` for ``A`` and ``2 l + 1`` for ``B`` of layer ``l``.

    Entries of other parameters have the number after the last one.

    Args:
        spec: Layout of a model that ``FactorProducts.adapt`` returned.
    """
    pairs = lora_layers(spec)
    numbers = torch.full((len(spec.sizes),), 2 * len(pairs))
    for layer, pair in enumerate(pairs):
        numbers[pair.a], numbers[pair.b] = 2 * layer, 2 * layer + 1
    return numbers.repeat_interleave(torch.tensor(spec.sizes))


def norm_products(spec: ModelSpec, v: Tensor, mask: Tensor) -> Tensor:
    """Return the sum over layers of ``||A|| ||B||``, of the entries in a mask.

    Args:
        spec: Layout of the model.
        v: Parameters, ``[d]``.
        mask: Entries of factors, boolean ``[d]``.
    """
    count = 2 * len(lora_layers(spec))
    squares = v.new_zeros(count + 1).index_add(
        0, factor_of_entries(spec).to(v.device), torch.where(mask, v, 0.0).square()
    )
    # The slope of a root at 0 is infinite; a factor that is 0 has no slope, as that of ``torch.linalg.vector_norm``.
    positive = squares[:count] > 0
    norms = torch.where(positive, torch.where(positive, squares[:count], 1.0).sqrt(), 0.0)
    return norms.view(-1, 2).prod(1).sum()


def product_norm(spec: ModelSpec, v: Tensor) -> Tensor:
    """Return the Frobenius norm of the products ``B A`` of all layers.

    Args:
        spec: Layout of the model.
        v: Parameters, ``[d]``.
    """
    values = torch.split(v, spec.sizes)
    total = v.new_zeros(())
    for pair in lora_layers(spec):
        a, b = values[pair.a].view(spec.shapes[pair.a]), values[pair.b].view(spec.shapes[pair.b])
        total = total + ((b.T @ b) * (a @ a.T)).sum()  # ||B A||^2 without the product
    return total.clamp_min(0).sqrt()
