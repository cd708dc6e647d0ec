"""FedSAM: sharpness-aware local training, which prefers flat minima.

Qu, Li, Duan, Liu, Tang, Lu, "Generalized Federated Learning via Sharpness Aware Minimization", 2022, arXiv:2206.02618,
Algorithm 1: with ``epsilon = rho g / ||g||`` (norm over all parameters) a client steps along the gradient at
``theta + epsilon`` instead of ``theta``. Each step computes two gradients. Normalization buffers are updated in the first
pass only.

The default ``rho=0.5`` is from the text of the FedCOG paper; its authors' code has 0.05.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.models.execution import Batch, GradFn
from unskew.protocol.rules import ClientRule, Context, Tensors
from unskew.protocol.search_space import Space, log_range


@dataclass(frozen=True)
class FedSAM(ClientRule):
    """Sharpness-aware local training.

    Attributes:
        rho: Radius of the perturbation; 0 is FedAvg. The default is from the text of the FedCOG paper; its authors'
            code uses 0.05.
    """

    name: ClassVar[str] = "fedsam"
    summary: ClassVar[str] = "sharpness-aware local training"
    paper: ClassVar[str] = "Qu et al. 2022, arXiv:2206.02618"
    # FedCOG's text has 0.5, its code 0.05; the smallest value in the FedSAM paper is 0.01.
    spaces: ClassVar[Mapping[str, Space]] = {"rho": log_range(0.01, 0.5)}

    rho: Annotated[float, Field(ge=0)] = 0.5

    def gradient(self, grad_fn: GradFn, ctx: Context, carry: Tensors) -> GradFn:
        """Compute the gradient at ``theta + rho g / ||g||``."""
        if self.rho == 0:
            return grad_fn

        def sharpness_aware(v: Tensor, batch: Batch) -> Tensor:
            g = grad_fn(v, batch)
            # The lower bound of the norm keeps the perturbation zero if the gradient is zero.
            epsilon = g * (self.rho / torch.linalg.vector_norm(g).clamp_min(1e-12))
            return grad_fn(v + epsilon, batch.untracked())

        return sharpness_aware
