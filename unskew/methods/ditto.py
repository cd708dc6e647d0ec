"""Ditto: each client also trains a personal model that stays near the global one.

Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", 2020, arXiv:2012.04221,
Algorithm 1. In addition to FedAvg's local training, a client takes the same number of steps on its personal model ``v_k``::

    v_k <- v_k - lr (grad f_k(v_k) + lambda (v_k - theta^t))

``theta^t`` is the received model. Training of the global model is unchanged. ``v_k`` starts from the first model that the
client receives. Each step computes two gradients; the steps on ``v_k`` are plain SGD with the client's learning rate, on the
same batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.models.execution import Batch, GradFn
from unskew.protocol.rules import PERSONAL, ClientRule, Context, Tensors
from unskew.protocol.search_space import Space, log_range


@dataclass(frozen=True)
class Ditto(ClientRule):
    """Personal models near the global one.

    Attributes:
        lam: Strength of the pull towards the global model; 0 is local training only.
    """

    name: ClassVar[str] = "ditto"
    summary: ClassVar[str] = "a personal model near the global one"
    paper: ClassVar[str] = "Li et al. 2020, arXiv:2012.04221"
    has_personal_model: ClassVar[bool] = True
    # One decade on each side of the default.
    spaces: ClassVar[Mapping[str, Space]] = {"lam": log_range(0.01, 1.0)}

    lam: Annotated[float, Field(ge=0)] = 0.1

    def acts_before(self, other: ClientRule) -> bool:
        """Return whether the other rule adds a vector to the gradient: the personal model's objective has none."""
        return other.shifts_gradient

    def begin(self, ctx: Context) -> Tensors:
        """Load the personal model."""
        return {"v": ctx.state[PERSONAL] if PERSONAL in ctx.state else ctx.v_global.clone()}

    def gradient(self, grad_fn: GradFn, ctx: Context, carry: Tensors) -> GradFn:
        """Take a step on the personal model with each step on the global one."""

        def both(v: Tensor, batch: Batch) -> Tensor:
            if batch.track:  # ignore additional gradients of a step
                personal = carry["v"]
                g = grad_fn(personal, batch.untracked()) + self.lam * (personal - ctx.v_global)
                carry["v"] = personal - batch.lr * g
            return grad_fn(v, batch)

        return both

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """Store the personal model at the client."""
        ctx.state[PERSONAL] = carry["v"]
