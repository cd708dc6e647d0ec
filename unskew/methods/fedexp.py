"""FedExP: the server extrapolates beyond the average, the further the more the updates disagree.

Jhunjhunwala, Wang, Joshi, "FedExP: Speeding Up Federated Averaging via Extrapolation", 2023, arXiv:2301.09604,
Algorithm 1::

    eta_g = max{1, sum_k p_k ||Delta_k||^2 / (2 (||sum_k p_k Delta_k||^2 + epsilon))}
    theta <- theta + eta_g sum_k p_k Delta_k

The server needs only sums: each client uploads one more number, its weighted squared norm. Where only slices of the model
are sent (FedALS), ``Delta_k`` is what is sent: these slices, since they were last received. The paper evaluates the mean of
the last two server iterates (``evaluate="mean"``, the default); ``evaluate="last"`` takes the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.rules import ClientRule, Context, ServerRule, Tensors, Updates, Weights
from unskew.protocol.search_space import Space, log_range


@dataclass(frozen=True)
class FedExP(ClientRule, ServerRule):
    """Extrapolated averaging.

    Attributes:
        epsilon: Keeps the step finite where updates cancel.
        evaluate: The mean of the last two iterates, as in the paper, or the last.
    """

    name: ClassVar[str] = "fedexp"
    summary: ClassVar[str] = "server step extrapolates where updates disagree"
    paper: ClassVar[str] = "Jhunjhunwala et al. 2023, arXiv:2301.09604"
    # Around the 1e-3 of the paper.
    spaces: ClassVar[Mapping[str, Space]] = {"epsilon": log_range(1e-4, 0.1)}
    weights: ClassVar[Weights | None] = None

    epsilon: Annotated[float, Field(gt=0)] = 1e-3
    evaluate: Literal["mean", "last"] = "mean"

    def begin(self, ctx: Context) -> Tensors:
        """Store the reference of the update: the broadcast, also of earlier rounds."""
        return {"start": ctx.last_received()}

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """Upload ``w_k ||Delta_k||^2``."""
        ctx.upload["square"] = ctx.weight * ctx.sent_since(carry["start"], v).square().sum()

    def init(self, v: Tensor, facts: FederationInfo) -> Tensors:
        """Both iterates are the initial model."""
        return {"v": v, "before": v, "eta": torch.ones((), dtype=v.dtype)}

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """``theta <- theta + eta_g delta``."""
        delta = updates.aggregate.delta
        square = updates.aggregate.upload[self.name]["square"] / updates.aggregate.weight
        eta = (square / (2 * (delta.square().sum() + self.epsilon))).clamp_min(1.0)
        return {"v": state["v"] + eta * delta, "before": state["v"], "eta": eta}

    def evaluated(self, state: Tensors) -> Tensor:
        """The model that is evaluated and returned."""
        return (state["v"] + state["before"]) / 2 if self.evaluate == "mean" else state["v"]

    def metrics(self, state: Tensors) -> dict[str, float]:
        """The server's step."""
        return {"fedexp_eta": float(state["eta"])}
