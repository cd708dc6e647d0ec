"""Shared base of client rules that add the server's momentum to every local step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from unskew.models.execution import Batch, GradFn
from unskew.models.spec import ModelSpec
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.rules import ClientRule, Context, Shape, Tensors


class GlobalMomentum(ClientRule):
    """Momentum ``m`` that the server computes once per round; every local step uses ``(1 - share) g + share m``."""

    needs: Collection[str] = ("whole_updates",)
    shifts_gradient: ClassVar[bool] = True

    @property
    def share(self) -> float:
        """Share of the momentum in a local step; 0 is FedAvg."""
        raise NotImplementedError

    def server_init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Initialize ``m = 0``."""
        return {"m": torch.zeros_like(v)}

    def download_shapes(self, spec: ModelSpec, plan: RoundPlan) -> Mapping[str, Shape]:
        """Return the shape of the momentum."""
        return {"m": (spec.size,)}

    def download(self, state: Tensors, client: int) -> Tensors:
        """Send the momentum."""
        return {"m": state["m"]}

    def gradient(self, grad_fn: GradFn, ctx: Context, carry: Tensors) -> GradFn:
        """``(1 - share) g + share m``."""
        if self.share == 0:
            return grad_fn
        momentum = self.share * ctx.download["m"]

        def with_momentum(v: Tensor, batch: Batch) -> Tensor:
            return (1 - self.share) * grad_fn(v, batch) + momentum

        return with_momentum
