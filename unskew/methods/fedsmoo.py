"""FedSMOO: sharpness-aware local training whose perturbations agree between clients, with dynamic regularization.

Sun, Shen, Chen, Ding, Tao, "Dynamic Regularized Sharpness Aware Minimization in Federated Learning: Approaching Global
Consistency and Smooth Landscape", 2023, arXiv:2305.11584, Algorithm 1, as in the authors' code (``client/fedsmoo.py``,
``server/FedSMOO.py`` and ``optimizer/DRegSAM.py`` of woodenchild95/FL-Simulator)::

    every step  r = grad f(theta_k) - mu_k - s;   e = rho r / ||r||;   mu_k <- mu_k + e - s
                theta_k <- theta_k - lr (grad f(theta_k + e) + lam (theta_k - theta + h_k))
    after       h_k <- h_k + theta_k - theta
    server      theta <- mean_S theta_k + h;   h: mean of all h_k;   s <- rho mean_S mu_k / ||mean_S mu_k||

All states start at 0. With ``s`` and ``mu_k`` fixed at 0, this is FedSAM with FedDyn: FedDyn's ``g_k`` is ``-lam h_k``.
The average is uniform. With other weights, the mean of all ``h_k`` uses the same weights relative to all clients, as in
``unskew.methods.feddyn``. Each step computes two gradients; normalization buffers are updated in the first pass only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.models.execution import Batch, GradFn
from unskew.models.spec import ModelSpec
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.rules import ClientRule, Context, ServerRule, Shape, Tensors, Updates, Weights
from unskew.protocol.search_space import Space, log_range


def of_length(v: Tensor, length: float) -> Tensor:
    """Return ``v`` scaled to a length; zero stays zero.

    Args:
        v: Vector, ``[d]``.
        length: Euclidean norm of the result.
    """
    norm: Tensor = torch.linalg.vector_norm(v)
    return v * (length / norm.clamp_min(1e-12))


@dataclass(frozen=True)
class FedSMOO(ClientRule, ServerRule):
    """Dynamic regularization of the model and of its sharpness-aware perturbation.

    Attributes:
        weights: Client weighting with ``client_weighting=auto``; None if the method does not choose one.
        rho: Radius of the perturbation; 0 is ``feddyn:alpha=lam``.
        lam: Strength of the regularization.
    """

    name: ClassVar[str] = "fedsmoo"
    summary: ClassVar[str] = "flat minima that clients agree on: regularized model and perturbation"
    paper: ClassVar[str] = "Sun et al. 2023, arXiv:2305.11584"
    needs = ("whole_updates", "model_changes")
    shifts_gradient: ClassVar[bool] = True
    uploads: ClassVar[bool] = True
    weights: ClassVar[Weights | None] = "uniform"
    # One decade around the authors' 0.1 for both.
    spaces: ClassVar[Mapping[str, Space]] = {"rho": log_range(0.01, 0.5), "lam": log_range(0.01, 1.0)}

    rho: Annotated[float, Field(ge=0)] = 0.1
    lam: Annotated[float, Field(gt=0)] = 0.1

    def begin(self, ctx: Context) -> Tensors:
        """Load the client's two dual variables, and the received model."""
        zero = torch.zeros_like(ctx.v_global)
        return {"h": ctx.state.get("h", zero), "mu": ctx.state.get("mu", zero), "start": ctx.last_received()}

    def gradient(self, grad_fn: GradFn, ctx: Context, carry: Tensors) -> GradFn:
        """``grad f(theta_k + e) + lam (theta_k - theta + h_k)``."""
        s = ctx.download["s"]

        def regularized(v: Tensor, batch: Batch) -> Tensor:
            e = of_length(grad_fn(v, batch) - carry["mu"] - s, self.rho)
            if batch.track:  # ignore additional gradients of a step
                carry["mu"] = carry["mu"] + e - s
            return grad_fn(v + e, batch.untracked()) + self.lam * (v - carry["start"] + carry["h"])

        return regularized

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """Store both dual variables, and upload ``w_k mu_k``."""
        ctx.state["h"] = carry["h"] + v - carry["start"]
        ctx.state["mu"] = carry["mu"]
        ctx.upload["mu"] = ctx.weight * carry["mu"]

    def server_init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Initialize ``s = 0``."""
        return {"s": torch.zeros_like(v)}

    def download_shapes(self, spec: ModelSpec, plan: RoundPlan) -> Mapping[str, Shape]:
        """Return the shape of ``s``."""
        return {"s": (spec.size,)}

    def download(self, state: Tensors, client: int) -> Tensors:
        """Send the common perturbation ``s``."""
        return {"s": state["s"]}

    def server_update(self, state: Tensors, updates: Updates) -> Tensors:
        """``s <- rho mean_S mu_k / ||mean_S mu_k||``."""
        mean = updates.aggregate.upload[self.name]["mu"] / updates.aggregate.weight
        return {"s": of_length(mean, self.rho)}

    def init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Initialize ``h = 0``."""
        return {"v": v, "h": torch.zeros_like(v), "total": torch.tensor(federation_info.total_weight(), dtype=v.dtype)}

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """``h <- h + sum_S p_k (theta_k - theta)``; ``theta <- mean theta_k + h``."""
        delta = updates.aggregate.delta
        h = state["h"] + updates.aggregate.weight / state["total"] * delta
        return {**state, "v": state["v"] + delta + h, "h": h}
