"""FedProx: a proximal term keeps local models near the global one.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", 2018, arXiv:1812.06127,
Equation 2: each client minimizes ``F_k(theta) + mu/2 ||theta - theta^t||^2``. The gradient of the proximal term,
``mu (theta - theta^t)``, is added to the loss gradient without automatic differentiation.

The default ``mu=0.01`` is the value in the FedCOG and Fedssyn papers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.models.execution import Batch, GradFn
from unskew.protocol.rules import ClientRule, Context, Tensors
from unskew.protocol.search_space import Space, log_range


@dataclass(frozen=True)
class FedProx(ClientRule):
    """Proximal local training.

    Attributes:
        mu: Strength of the pull; 0 is FedAvg. 0.01 is from the FedCOG and Fedssyn papers (arXiv:2312.05966,
            arXiv:2306.13263).
    """

    name: ClassVar[str] = "fedprox"
    summary: ClassVar[str] = "proximal term towards the global model"
    paper: ClassVar[str] = "Li et al. 2018, arXiv:1812.06127"
    # The paper's grid is 0.001, 0.01, 0.1, 1.
    spaces: ClassVar[Mapping[str, Space]] = {"mu": log_range(1e-3, 1.0)}

    mu: Annotated[float, Field(ge=0)] = 0.01

    def gradient(self, grad_fn: GradFn, ctx: Context, carry: Tensors) -> GradFn:
        """``g + mu (theta - theta^t)``."""
        if self.mu == 0:
            return grad_fn

        def proximal(v: Tensor, batch: Batch) -> Tensor:
            return grad_fn(v, batch).add(v - ctx.v_global, alpha=self.mu)

        return proximal
