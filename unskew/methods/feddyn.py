"""FedDyn: a linear term aligns the clients' optima with the global one.

Acar, Zhao, Matas, Mattina, Whatmough, Saligrama, "Federated Learning Based on Dynamic Regularization", 2021,
arXiv:2111.04263, Algorithm 1::

    client:  minimize f_k(theta) - <g_k, theta> + alpha/2 ||theta - theta^t||^2;   g_k <- g_k - alpha (theta_k - theta^t)
    server:  h <- h - (alpha/K) sum_S (theta_k - theta^t);   theta <- mean_S theta_k - h / alpha

``g_k = h = 0`` at first; ``K`` counts all clients, so ``h`` stays the mean of all ``g_k``. The average is uniform. The paper
clips gradients at 10: set ``clip_grad_norm=10`` in the run. Fedssyn's code uses the norm in the quadratic term; this is
its square.

Where a part of the model is sent only every so many rounds (FedALS), ``theta^t`` of that part is what the client last
received, and ``g_k`` of it is renewed when it is sent, so ``h`` stays the mean also if clients miss an average.

With other weights the objective is ``F = sum_k p_k f_k``, where ``p_k = w_k / sum_j w_j`` over all clients, and ``h`` counts
clients as ``F`` does::

    h <- h - alpha sum_S p_k (theta_k - theta^t),    so that always    h = sum_k p_k g_k

A client rests where ``g_k = grad f_k``. Where nothing changes any more all ``theta_k`` are ``theta``, so ``h = 0``, which is
``grad F(theta) = 0``, whoever takes part. The weighted mean of the cohort's updates is over the cohort's weights, so it
enters ``h`` with their part of all weights, ``sum_S w_k / sum_j w_j``; that is ``|S| / K`` only if clients count alike.
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
        alpha: Strength of the regularization.
    """

    name: ClassVar[str] = "feddyn"
    summary: ClassVar[str] = "dynamic regularization aligns local optima"
    paper: ClassVar[str] = "Acar et al. 2021, arXiv:2111.04263"
    # The paper's grid is 0.001, 0.01, 0.1.
    spaces: ClassVar[Mapping[str, Space]] = {"alpha": log_range(1e-3, 0.1)}
    weights: ClassVar[Weights | None] = "uniform"

    alpha: Annotated[float, Field(gt=0)] = 0.01

    def begin(self, ctx: Context) -> Tensors:
        """The client's linear term."""
        g_k = ctx.state.get("g")
        return {"g": torch.zeros_like(ctx.v_global) if g_k is None else g_k, "start": ctx.last_received()}

    def gradient(self, grad_fn: GradFn, ctx: Context, carry: Tensors) -> GradFn:
        """``g - g_k + alpha (theta - theta^t)``."""

        def regularized(v: Tensor, batch: Batch) -> Tensor:
            return grad_fn(v, batch) - carry["g"] + self.alpha * (v - carry["start"])

        return regularized

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """``g_k <- g_k - alpha (theta_k - theta^t)``."""
        ctx.state["g"] = carry["g"] - self.alpha * ctx.sent_since(carry["start"], v)

    def init(self, v: Tensor, facts: FederationInfo) -> Tensors:
        """``h = 0``."""
        total = torch.tensor(facts.total_weight(), dtype=v.dtype)
        return {"v": v, "h": torch.zeros_like(v), "total": total}

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """``h <- h - alpha sum_S p_k delta_k``; ``theta <- mean theta_k - h/alpha``."""
        delta = updates.aggregate.delta
        h = state["h"] - self.alpha * updates.aggregate.weight / state["total"] * delta
        return {**state, "v": state["v"] + delta - h / self.alpha, "h": h}
