"""MimeLite: local steps with a momentum of gradients at the global model, which does not change within a round.

Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh, "Mime: Mimicking Centralized Stochastic Algorithms in Federated
Learning", 2020, arXiv:2008.03606, Algorithm 1, for SGD with momentum::

    client:  theta_k <- theta_k - lr (beta m + (1 - beta) g)           every local step
    server:  m <- beta m + (1 - beta) mean_S grad f_k(theta)           theta: the model that clients received

Initially ``m = 0``. The average is uniform. A client computes its full gradient in one more pass over its data and sends
it, so the server needs only sums, and clients keep no state. ``mime`` also corrects local steps with the mean gradient of the
same cohort.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.methods.global_momentum import GlobalMomentum
from unskew.protocol.rules import Context, Tensors, Updates, Weights
from unskew.protocol.search_space import Space, uniform_range


@dataclass(frozen=True)
class MimeLite(GlobalMomentum):
    """Momentum of full gradients.

    Attributes:
        weights: Client weighting with ``client_weighting=auto``; None if the method does not choose one.
        beta: Share of the momentum in a local step; 0 is FedAvg.
    """

    name: ClassVar[str] = "mimelite"
    summary: ClassVar[str] = "momentum of full gradients, fixed within a round, in every local step"
    paper: ClassVar[str] = "Karimireddy et al. 2020, arXiv:2008.03606"
    uploads: ClassVar[bool] = True
    weights: ClassVar[Weights | None] = "uniform"
    needs = ("full_gradient", "whole_updates")
    # Around the default.
    spaces: ClassVar[Mapping[str, Space]] = {"beta": uniform_range(0.5, 0.99)}

    beta: Annotated[float, Field(ge=0, lt=1)] = 0.9

    @property
    def share(self) -> float:
        """``beta``."""
        return self.beta

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """Upload ``w_k grad f_k(theta)``."""
        assert ctx.full_gradient is not None
        ctx.upload["gradient"] = ctx.weight * ctx.full_gradient

    def server_update(self, state: Tensors, updates: Updates) -> Tensors:
        """``m <- beta m + (1 - beta) mean_S grad f_k(theta)``."""
        mean = updates.aggregate.upload[self.name]["gradient"] / updates.aggregate.weight
        return {"m": self.beta * state["m"] + (1 - self.beta) * mean}
