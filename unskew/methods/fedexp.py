"""FedExP: the server extrapolates beyond the average, further if the updates disagree more.

Jhunjhunwala, Wang, Joshi, "FedExP: Speeding Up Federated Averaging via Extrapolation", 2023, arXiv:2301.09604,
Algorithm 1::

    eta_g = max{1, sum_k p_k ||Delta_k||^2 / (2 (||sum_k p_k Delta_k||^2 + epsilon))}
    theta <- theta + eta_g sum_k p_k Delta_k

The server needs only sums: each client uploads one additional number, its weighted squared norm. If only slices of the model
are sent (FedALS), ``Delta_k`` is the change of these slices since they were last received. The paper evaluates the mean of
the last two server iterates (``evaluate="mean"``, the default); ``evaluate="last"`` evaluates the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.models.spec import ModelSpec
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.rules import EVALUATED, ClientRule, Context, Method, ServerRule, Tensors, Updates, Weights
from unskew.protocol.search_space import Space, log_range


@dataclass(frozen=True)
class FedExP(ClientRule, ServerRule):
    """Extrapolated averaging.

    Attributes:
        weights: Client weighting with ``client_weighting=auto``; None if the method does not choose one.
        epsilon: Keeps the step finite if updates cancel.
        evaluate: Evaluate the mean of the last two server models, as in the paper, or the ``last`` one. The last one is
            always broadcast.
    """

    name: ClassVar[str] = "fedexp"
    summary: ClassVar[str] = "server step extrapolates where updates disagree"
    paper: ClassVar[str] = "Jhunjhunwala et al. 2023, arXiv:2301.09604"
    needs = ("model_changes",)
    uploads: ClassVar[bool] = True
    upload_ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"square": (0.0, 1e38)}
    # Around the paper's 1e-3.
    spaces: ClassVar[Mapping[str, Space]] = {"epsilon": log_range(1e-4, 0.1)}
    weights: ClassVar[Weights | None] = None

    epsilon: Annotated[float, Field(gt=0)] = 1e-3
    evaluate: Literal["mean", "last"] = "mean"

    def conflict_with(self, method: Method) -> str | None:
        """Reject lossy codes: clients measure the norms of their updates, and the server the norm of the decoded mean."""
        codecs = (rule for rule in method.client if rule.encodes and rule.stage == "compress")
        codec = next((rule.name for rule in codecs if not rule.preserves_norms), None)
        if codec is None:
            return None
        return (
            f"fedexp compares the norms of updates with the norm of their mean, and {codec} changes the updates in between. "
            "Remove one of them."
        )

    def begin(self, ctx: Context) -> Tensors:
        """Store the last received values of each part of the model, the reference of the update."""
        return {"start": ctx.last_received()}

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """Upload ``w_k ||Delta_k||^2``."""
        ctx.upload["square"] = ctx.weight * ctx.sent_since(carry["start"], v).square().sum()

    def init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Start with ``eta_g = 1``; the evaluated mean of two iterates is the initial model."""
        state = {"v": v, "eta": torch.ones((), dtype=v.dtype)}
        return state if self.evaluate == "last" else {**state, EVALUATED: v}

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """``theta <- theta + eta_g delta``."""
        delta = updates.aggregate.delta
        square = updates.aggregate.upload[self.name]["square"] / updates.aggregate.weight
        eta = (square / (2 * (delta.square().sum() + self.epsilon))).clamp_min(1.0)
        v = state["v"] + eta * delta
        new = {"v": v, "eta": eta}
        return new if self.evaluate == "last" else {**new, EVALUATED: (v + state["v"]) / 2}

    def metrics(self, state: Tensors, round: int, spec: ModelSpec) -> dict[str, float]:
        """Return the server learning rate ``eta_g``."""
        return {"fedexp_eta": float(state["eta"])}
