"""FedCM: every local step includes the direction in which the global model last moved.

Xu, Wang, Wang, Yao, "FedCM: Federated Learning with Client-level Momentum", 2021, arXiv:2106.10874, Algorithm 2::

    client:  theta_k <- theta_k - lr (alpha g + (1 - alpha) m)         every local step
    server:  m <- -Delta / (lr tau)                                    Delta: the mean update

Initially ``m = 0``, so steps of the first round have size ``alpha lr``, as in the authors' code. The average is uniform.
Clients keep no state.

In the paper all clients take ``tau`` steps at one learning rate. Here ``lr tau`` is the mean of ``sum_t lr_t`` over the
cohort: a client also sends this number, so local epochs, schedules and delays are supported, and the server needs only
sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.methods.global_momentum import GlobalMomentum
from unskew.protocol.rules import Context, Tensors, Updates, Weights
from unskew.protocol.search_space import Space, log_range


@dataclass(frozen=True)
class FedCM(GlobalMomentum):
    """Client-level momentum.

    Attributes:
        weights: Client weighting with ``client_weighting=auto``; None if the method does not choose one.
        alpha: Share of the gradient in a local step; 1 is FedAvg.
    """

    name: ClassVar[str] = "fedcm"
    summary: ClassVar[str] = "adds the last global update to every local step"
    paper: ClassVar[str] = "Xu et al. 2021, arXiv:2106.10874"
    needs = ("whole_updates", "model_changes")
    uploads: ClassVar[bool] = True
    upload_ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"rates": (0.0, 1e38)}
    weights: ClassVar[Weights | None] = "uniform"
    # Around the paper's 0.1.
    spaces: ClassVar[Mapping[str, Space]] = {"alpha": log_range(0.02, 0.5)}

    alpha: Annotated[float, Field(gt=0, le=1)] = 0.1

    @property
    def share(self) -> float:
        """``1 - alpha``."""
        return 1 - self.alpha

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """Upload ``w_k sum_t lr_t``."""
        ctx.upload["rates"] = ctx.weight * ctx.lr * ctx.steps

    def server_update(self, state: Tensors, updates: Updates) -> Tensors:
        """``m <- -Delta / (lr tau)``."""
        mean = updates.aggregate
        return {"m": -mean.delta / (mean.upload[self.name]["rates"] / mean.weight)}
