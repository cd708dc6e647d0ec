"""FedDyn: dynamic regularization aligns the clients' optima with the global one.

Acar, Zhao, Matas, Mattina, Whatmough, Saligrama, "Federated Learning Based on Dynamic Regularization", 2021,
arXiv:2111.04263, Algorithm 1::

    client:  minimize f_k(theta) - <g_k, theta> + alpha/2 ||theta - theta^t||^2;   g_k <- g_k - alpha (theta_k - theta^t)
    server:  h <- h - (alpha/K) sum_S (theta_k - theta^t);   theta <- mean_S theta_k - h / alpha

Initially ``g_k = h = 0``. ``K`` counts all clients, so ``h`` remains the mean of all ``g_k``. The average is uniform. The
paper clips gradients at 10: set ``clip_grad_norm=10``. Fedssyn's code uses the norm in the quadratic term; this
implementation uses its square, as in the paper's formula above.

If a part of the model is exchanged only every few rounds (FedALS), ``theta^t`` of that part is the value that the client
last received, and its ``g_k`` is updated when the part is sent. So ``h`` remains the mean even if clients miss an average.
A part that is never exchanged (FedBN) has no ``theta^t`` and is not regularized.

With other weights the objective is ``F = sum_k p_k f_k`` with ``p_k = w_k / sum_j w_j`` over all clients, and ``h`` uses the
same weights::

    h <- h - alpha sum_S p_k (theta_k - theta^t),    so that always    h = sum_k p_k g_k

A client is at rest if ``g_k = grad f_k``. At a fixed point all ``theta_k`` equal ``theta``, so ``h = 0``, which means
``grad F(theta) = 0`` for any choice of clients. The weighted mean of the cohort's updates is relative to the cohort's
weights, so it is multiplied in ``h`` by the cohort's share of all weights, ``sum_S w_k / sum_j w_j``. This share is
``|S| / K`` only for uniform weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.models.execution import Batch, GradFn
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.rules import ClientRule, Context, ServerRule, Tensors, Updates, Weights
from unskew.protocol.search_space import Space, log_range


@dataclass(frozen=True)
class FedDyn(ClientRule, ServerRule):
    """Dynamic regularization.

    Attributes:
        weights: Client weighting with ``client_weighting=auto``; None if the method does not choose one.
        alpha: Strength of the regularization.
    """

    name: ClassVar[str] = "feddyn"
    summary: ClassVar[str] = "dynamic regularization aligns local optima"
    paper: ClassVar[str] = "Acar et al. 2021, arXiv:2111.04263"
    needs = ("model_changes",)
    shifts_gradient: ClassVar[bool] = True
    sums_over_rounds: ClassVar[bool] = True
    # The paper's grid is 0.001, 0.01, 0.1.
    spaces: ClassVar[Mapping[str, Space]] = {"alpha": log_range(1e-3, 0.1)}
    weights: ClassVar[Weights | None] = "uniform"

    alpha: Annotated[float, Field(gt=0)] = 0.01

    def begin(self, ctx: Context) -> Tensors:
        """Load the client's linear term ``g_k`` and the last received model."""
        g_k = ctx.state.get("g")
        zero = torch.zeros_like(ctx.v_global)
        carry = {"g": zero if g_k is None else g_k, "start": ctx.last_received()}
        if ctx.received is not None:  # 1 for parameters that the client has received at least once, otherwise 0
            carry["shared"] = torch.where(ctx.received, 1.0, ctx.state.get("shared", zero))
        elif ctx.sent is not None:
            carry["shared"] = torch.ones_like(zero)
        return carry

    def gradient(self, grad_fn: GradFn, ctx: Context, carry: Tensors) -> GradFn:
        """``g - g_k + alpha (theta - theta^t)``."""

        def regularized(v: Tensor, batch: Batch) -> Tensor:
            pull = v - carry["start"]
            if "shared" in carry:
                pull = carry["shared"] * pull
            return grad_fn(v, batch) - carry["g"] + self.alpha * pull

        return regularized

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """``g_k <- g_k - alpha (theta_k - theta^t)``."""
        ctx.state["g"] = carry["g"] - self.alpha * ctx.sent_since(carry["start"], v)
        if "shared" in carry:
            ctx.state["shared"] = carry["shared"]

    def init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Initialize ``h = 0``."""
        total = torch.tensor(federation_info.total_weight(), dtype=v.dtype)
        return {"v": v, "h": torch.zeros_like(v), "total": total}

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """``h <- h - alpha sum_S p_k delta_k``; ``theta <- mean theta_k - h/alpha``."""
        delta = updates.aggregate.delta
        h = state["h"] - self.alpha * updates.aggregate.weight / state["total"] * delta
        return {**state, "v": state["v"] + delta - h / self.alpha, "h": h}
