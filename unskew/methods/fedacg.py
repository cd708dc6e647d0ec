"""FedACG: clients start from the model that the server's momentum anticipates.

Kim, Kim, Han, "Communication-Efficient Federated Learning with Accelerated Client Gradient", 2024, arXiv:2201.03172::

    broadcast  phi_t = theta_t + beta m_t                                       m_0 = 0
    client     minimizes  F_k(theta_k) + mu/2 ||theta_k - phi_t||^2,  from phi_t
    server     m_{t+1} = beta m_t + Delta_t,    theta_{t+1} = theta_t + m_{t+1} = phi_t + Delta_t

``Delta_t`` is the mean of ``theta_k - phi_t``. The broadcast model is the server's state, and ``theta`` is the model that is
evaluated. ``mu`` and ``beta`` are those of FedProx and FedAvgM: the broadcast models are those of
``fedprox+fedavgm:nesterov=true``, which evaluates the broadcast model. In the authors' code, the term is ``0.001
||theta_k - phi_t||^2`` without the factor 1/2, so the default is ``mu=0.002``; its average is uniform.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.methods.fedprox import FedProx
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.rules import EVALUATED, ServerRule, Tensors, Updates, Weights
from unskew.protocol.search_space import Space, log_range, one_of


@dataclass(frozen=True)
class FedACG(FedProx, ServerRule):
    """Proximal local training from the anticipated model, and momentum at the server.

    Attributes:
        weights: Client weighting with ``client_weighting=auto``; None if the method does not choose one.
        mu: Strength of the pull towards the received model; 0 leaves the momentum alone.
        beta: Momentum; 0 is FedProx.
    """

    name: ClassVar[str] = "fedacg"
    summary: ClassVar[str] = "clients start from the model that the server's momentum anticipates"
    paper: ClassVar[str] = "Kim et al. 2024, arXiv:2201.03172"
    weights: ClassVar[Weights | None] = "uniform"
    # Around the authors' values; beta in the grid of Hsu et al. 2019 (arXiv:1909.06335).
    spaces: ClassVar[Mapping[str, Space]] = {"mu": log_range(1e-4, 0.1), "beta": one_of(0.7, 0.85, 0.9, 0.97)}

    mu: Annotated[float, Field(ge=0)] = 0.002
    beta: Annotated[float, Field(ge=0, lt=1)] = 0.85

    def init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Initialize the momentum to zero."""
        return {"v": v, "m": torch.zeros_like(v), EVALUATED: v}

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """``m <- beta m + delta``; ``theta <- v + delta``; ``v <- theta + beta m``."""
        m = self.beta * state["m"] + updates.aggregate.delta
        theta = state["v"] + updates.aggregate.delta
        return {"v": theta + self.beta * m, "m": m, EVALUATED: theta}
