"""IFCA: one model per group of clients; a client trains the model with the smallest loss on its data.

Ghosh, Chung, Yin, Ramchandran, "An Efficient Framework for Clustered Federated Learning", 2020, arXiv:2006.04088,
Algorithm 1 with model averaging::

    client:  j = argmin_j F_k(theta_j);   theta_k: local training from theta_j;   sends theta_k - theta_j and j
    server:  theta_j <- mean of theta_k over the clients that chose j;   unchanged if there is none

The average is uniform. The paper draws all models independently. Here the first one is the model ``theta`` of the run, and
the others are ``theta (1 + spread e_j) / sqrt(1 + spread^2)`` with standard normal ``e_j``. This keeps the mean square of
every entry: models of larger weights would have larger losses from the start, and no client would choose them.

After every round the models are sorted by how often they were chosen so far, so the first one, which is the global model, is
that of the largest group. Clients choose anew in every round, so their choices do not depend on the order. In the training
after the last round clients choose among the final models and train no step: this is the model that serves a client.

With ``blocks=true`` a client sends one update for each model, which is zero except for the chosen one, so the server needs
only sums.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.models.execution import Batch
from unskew.models.spec import ModelSpec
from unskew.protocol.client_rule import Forward
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.rules import (
    START,
    ClientRule,
    Context,
    Method,
    ServerRule,
    Shape,
    SurveyTime,
    Tensors,
    Updates,
    Weights,
    WithServerHalf,
)
from unskew.protocol.search_space import Space, one_of
from unskew.protocol.updates import nonzero_divisors
from unskew.seeding import generator


@dataclass(frozen=True)
class IFCA(ClientRule, ServerRule):
    """Iterative clustering of clients by their losses.

    Attributes:
        weights: Client weighting with ``client_weighting=auto``; None if the method does not choose one.
        groups: Number of models; 1 is ``fedavg`` with uniform weights.
        spread: Relative difference of the first models: ``θ_1`` is the model of the run, and ``θ_j = θ_1 (1 + spread
            ε_j) / √(1 + spread²)`` with standard normal ``ε_j`` for the others.
        blocks: Send an update for each model, which is zero except for the chosen one. The server then needs only sums;
            the traffic up is ``(d + 2) groups``.
    """

    name: ClassVar[str] = "ifca"
    summary: ClassVar[str] = "one model per group of clients, which choose by their loss"
    paper: ClassVar[str] = "Ghosh et al. 2020, arXiv:2006.04088"
    successive_models_differ: ClassVar[bool] = True
    changes_start: ClassVar[bool] = True
    supports_delays: ClassVar[bool] = False
    uploads: ClassVar[bool] = True
    final_steps: ClassVar[int | None] = 0
    weights: ClassVar[Weights | None] = "uniform"
    survey_at: ClassVar[SurveyTime | None] = "received"
    # Around the numbers of groups in the paper's experiments.
    spaces: ClassVar[Mapping[str, Space]] = {"groups": one_of(2, 3, 4)}
    idle_options = (({"groups": 1}, ("spread",)),)

    groups: Annotated[int, Field(ge=1)] = 2
    spread: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.5
    blocks: bool = False

    @property
    def needs(self) -> Collection[str]:  # type: ignore[override]
        """Whole updates; single ones, unless updates of all models are sent."""
        return ("final_training", "whole_updates", *(() if self.blocks else ("individual",)))

    @property
    def upload_ranges(self) -> Mapping[str, tuple[float, float]]:  # type: ignore[override]
        """Ranges of the chosen group and of the weights of the groups."""
        return {"group": (0.0, self.groups - 1.0), "weights": (0.0, 1e38), "chosen": (0.0, 1.0)}

    @property
    def acts_last(self) -> bool:  # type: ignore[override]
        """True if ``transform_update`` uploads the update, which other rules change before."""
        return self.blocks

    @property
    def sends_model(self) -> bool:  # type: ignore[override]
        """False if updates of all models are sent instead."""
        return not self.blocks

    # ---- before the run -------------------------------------------------------------------------------------------------

    def conflict_with(self, method: Method) -> str | None:
        """Reject rules that assume one model for all clients."""
        for rule in method.client:
            if rule is self:
                continue
            if type(rule).server_update is not WithServerHalf.server_update or rule.compresses_broadcast:
                return f"{rule.name} assumes one model for all clients, but ifca trains several. Remove one of them."
            if self.blocks and rule.encodes:
                return f"{rule.name} encodes one update, but ifca:blocks=true sends several. Set blocks=false."
        return None

    # ---- at the clients -------------------------------------------------------------------------------------------------

    def models(self, ctx: Context) -> Tensor:
        """Return the received models, ``[P, d]``."""
        return torch.cat([ctx.v_global[None], ctx.download["models"]]) if self.groups > 1 else ctx.v_global[None]

    def survey(self, ctx: Context, v: Tensor, forward: Forward, batch: Batch) -> Tensors:
        """Return the sum of the losses of each model over all predictions, ``[P]``."""
        predictions = ctx.task.predictions(batch.y)
        losses = [ctx.task.losses(forward(model, batch.x).logits, batch.y) for model in self.models(ctx)]
        return {"loss": torch.stack([(own * predictions.to(own.dtype)).sum() for own in losses])}

    def begin(self, ctx: Context) -> Tensors:
        """Start from the model with the smallest loss."""
        group = ctx.survey["loss"].argmin()
        return {START: self.models(ctx)[group], "group": group.to(ctx.v_global.dtype)}

    def transform_update(self, ctx: Context, carry: Tensors, delta: Tensor) -> Tensor:
        """Upload the number of the chosen model, or the weighted update at its position."""
        if not self.blocks:
            ctx.upload["group"] = carry["group"]
            return delta
        chosen = (torch.arange(self.groups, device=delta.device) == carry["group"]).to(delta.dtype)
        ctx.upload["sums"] = chosen[:, None] * (ctx.weight * delta)
        ctx.upload["weights"] = ctx.weight * chosen
        ctx.upload["chosen"] = chosen
        return delta

    # ---- at the server --------------------------------------------------------------------------------------------------

    def server_init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Create the first models, ``[P, d]``."""
        noise = [torch.randn(v.shape, generator=generator(0, "ifca models", client=j)) for j in range(1, self.groups)]
        models = torch.stack([v, *(v * (1 + self.spread * e.to(v)) / math.sqrt(1 + self.spread**2) for e in noise)])
        return {"models": models, "chosen": torch.zeros(self.groups, dtype=torch.int64)}

    def download_shapes(self, spec: ModelSpec, plan: RoundPlan) -> Mapping[str, Shape]:
        """Return the shape of the other models."""
        return {"models": (self.groups - 1, spec.size)} if self.groups > 1 else {}

    def download(self, state: Tensors, client: int) -> Tensors:
        """Send all models but the first, which is the global model."""
        return {"models": state["models"][1:]} if self.groups > 1 else {}

    def server_update(self, state: Tensors, updates: Updates) -> Tensors:
        """``theta_j <- mean of theta_k`` over the clients that chose ``j``; sort by the number of choices so far."""
        models = state["models"]
        total = updates.aggregate.upload[self.name] if self.blocks else self.summed(models, updates)
        new = models + total["sums"] / nonzero_divisors(total["weights"])[:, None]
        chosen = state["chosen"] + total["chosen"].round().to(state["chosen"])
        order = torch.sort(chosen, descending=True, stable=True).indices
        return {"models": new[order.to(models.device)], "chosen": chosen[order]}

    def summed(self, models: Tensor, updates: Updates) -> Tensors:
        """Return the weighted sums of the updates ``[P, d]``, sums of weights and numbers of updates of each model, ``[P]``.

        Args:
            models: Models of the round, ``[P, d]``.
            updates: Updates of the round.
        """
        total = {"sums": torch.zeros_like(models), "weights": models.new_zeros(self.groups)}
        total["chosen"] = models.new_zeros(self.groups)
        for update in updates:
            group = int(update.upload[self.name]["group"])
            total["sums"][group].add_(update.delta, alpha=update.weight)
            total["weights"][group] += update.weight
            total["chosen"][group] += 1
        return total

    def metrics(self, state: Tensors, round: int, spec: ModelSpec) -> dict[str, Any]:
        """Return how often each model has been chosen so far, in descending order."""
        return {"ifca_chosen": state["chosen"].tolist()}

    def init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Create the same models for the server rule; ``v`` is the first."""
        return {"v": v, **self.server_init(v, federation_info)}

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """Update all models; ``v`` is that of the largest group."""
        new = self.server_update(state, updates)
        return {"v": new["models"][0].clone(), **new}
