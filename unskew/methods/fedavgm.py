"""FedAvgM: server momentum.

Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019,
arXiv:1909.06335: ``m <- beta m + (theta - sum_k p_k theta_k)``, ``theta <- theta - eta m``. Here ``m`` has the sign of an
update, ``m <- beta m + delta`` and ``theta <- theta + eta m``, which is equivalent.

The default ``beta=0.9`` is the value in the code of FedCOG (arXiv:2312.05966) and of FedDecorr (arXiv:2210.00226,
``run_scripts/cifar10_fedavgm.sh``), and in Flower's baseline for Hsu et al., who try values up to 0.997. The text of FedCOG
has ``beta=0.1``, which was the default here before. ``nesterov=True`` steps along ``delta + beta m`` instead, as FedCOG's
code does (without its extra division by ``1 + beta``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.rules import ServerRule, Tensors, Updates
from unskew.protocol.search_space import Space, log_range, one_of


@dataclass(frozen=True)
class FedAvgM(ServerRule):
    """Server momentum.

    Attributes:
        beta: Momentum; 0 is FedAvg. The default is that of the code of FedCOG and FedDecorr, which compare with this
            method; the text of the FedCOG paper (arXiv:2312.05966) has 0.1. Hsu et al. try values up to 0.997.
        eta: Server learning rate.
        nesterov: Nesterov momentum, as in the FedCOG authors' code, but without its extra division by ``1 + beta``.
    """

    name: ClassVar[str] = "fedavgm"
    summary: ClassVar[str] = "momentum at the server"
    paper: ClassVar[str] = "Hsu et al. 2019, arXiv:1909.06335"
    # beta: grid of Hsu et al.; eta: within the grid of Reddi et al. 2020 (arXiv:2003.00295), 1e-3 to 10.
    spaces: ClassVar[Mapping[str, Space]] = {"beta": one_of(0.0, 0.7, 0.9, 0.97, 0.99), "eta": log_range(0.01, 3.0)}
    idle_options = (({"beta": 0}, ("nesterov",)),)

    beta: Annotated[float, Field(ge=0, lt=1)] = 0.9
    eta: Annotated[float, Field(gt=0)] = 1.0
    nesterov: bool = False

    def init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Initialize the momentum to zero."""
        return {"v": v, "m": torch.zeros_like(v)}

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """``m <- beta m + delta``; ``v <- v + eta m``."""
        delta = updates.aggregate.delta
        m = self.beta * state["m"] + delta
        direction = delta + self.beta * m if self.nesterov else m
        return {"v": state["v"].add(direction, alpha=self.eta), "m": m}
