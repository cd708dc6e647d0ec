"""Mime: MimeLite whose local steps are also corrected by the cohort's gradient at the global model.

Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh, "Mime: Mimicking Centralized Stochastic Algorithms in Federated
Learning", 2020, arXiv:2008.03606, Algorithm 1, for SGD with momentum. In each round, with the received model ``theta`` and
the batch ``B`` of a step::

    exchange  c = mean_S grad f_k(theta)                               before training
    client    g = grad f(theta_k; B) - grad f(theta; B) + c
              theta_k <- theta_k - lr (beta m + (1 - beta) g)
    server    m <- beta m + (1 - beta) c

Initially ``m = 0``. The average is uniform. In the exchange, clients of the round receive the model and compute their full
gradients in one more pass over their data; then they receive ``c`` and ``m``, but not the model again. Each step computes two
gradients; normalization buffers are updated in the pass of ``theta_k`` only. Only simulations have this exchange.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.methods.mimelite import MimeLite
from unskew.models.execution import Batch, GradFn
from unskew.models.spec import ModelSpec
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.rules import ClientRule, Context, Shape, SurveyTime, Tensors, Updates


@dataclass(frozen=True)
class Mime(MimeLite):
    """Momentum of full gradients, with a correction of local steps.

    Attributes:
        beta: Share of the momentum in a local step; 0 is the correction alone, which is SVRG with the gradient of the
            cohort.
    """

    name: ClassVar[str] = "mime"
    summary: ClassVar[str] = "mimelite with local steps corrected by the cohort's gradient"
    survey_at: ClassVar[SurveyTime | None] = "asked"

    def acts_before(self, other: ClientRule) -> bool:
        """Return whether the other rule adds a vector to the gradient, which would cancel in the difference of gradients."""
        return other.shifts_gradient

    def server_init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Initialize ``m = 0`` and ``c = 0``."""
        return {"m": torch.zeros_like(v), "c": torch.zeros_like(v)}

    def download_shapes(self, spec: ModelSpec, plan: RoundPlan) -> Mapping[str, Shape]:
        """Return the shapes of ``m`` and ``c``."""
        return dict.fromkeys(("c",) if self.beta == 0 else ("m", "c"), (spec.size,))

    def download(self, state: Tensors, client: int) -> Tensors:
        """Send ``m``, unless it has no share, and ``c``."""
        return {"c": state["c"]} if self.beta == 0 else {"m": state["m"], "c": state["c"]}

    def begin(self, ctx: Context) -> Tensors:
        """Return ``theta``."""
        return {"theta": ctx.last_received()}

    def gradient(self, grad_fn: GradFn, ctx: Context, carry: Tensors) -> GradFn:
        """``beta m + (1 - beta) (grad f(theta_k; B) - grad f(theta; B) + c)``."""
        c = ctx.download["c"]

        def corrected(v: Tensor, batch: Batch) -> Tensor:
            g = grad_fn(v, batch) - grad_fn(carry["theta"], batch.untracked()) + c
            return g if self.beta == 0 else self.beta * ctx.download["m"] + (1 - self.beta) * g

        return corrected

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """In the exchange before training, upload ``w_k grad f_k(theta)``."""
        if not carry:
            super().end(ctx, carry, v)

    def server_update(self, state: Tensors, updates: Updates) -> Tensors:
        """After the exchange ``c = mean_S grad f_k(theta)``, after training ``m <- beta m + (1 - beta) c``."""
        gradients = updates.aggregate.upload.get(self.name)
        if gradients is not None:
            return {**state, "c": gradients["gradient"] / updates.aggregate.weight}
        return {**state, "m": self.beta * state["m"] + (1 - self.beta) * state["c"]}
