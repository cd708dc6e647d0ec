"""APFL: a client's personal model is a mixture of its own model and its copy of the global one, with a learned weight.

Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", 2020, arXiv:2003.13461, Algorithm 1 and Equation 4. A
client trains ``theta_k`` as in FedAvg, and with the same batches its own model ``v_k``::

    v'    = alpha v_k + (1 - alpha) theta_k                       all from before the step
    v_k   <- v_k - lr alpha grad f_k(v')
    alpha <- clip(alpha - lr (<v_k - theta_k, grad f_k(v')> + decay alpha), 0, 1)      first step of a round

The personal model is ``v'`` after the last step. ``v_k`` starts from the first model that the client receives and is trained
with plain SGD. ``decay=0.02`` is from the authors' code (``alpha_update`` of MLOPTPSU/FedTorch); the paper has 0. Unlike
here, that code steps on ``theta_k`` before it computes ``v'``, mixes the outputs of the two models instead of their
parameters, and computes the gradient of ``alpha`` from the gradients of the two models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.models.execution import Batch, GradFn
from unskew.protocol.rules import PERSONAL, ClientRule, Context, Tensors
from unskew.protocol.search_space import Space, uniform_range


@dataclass(frozen=True)
class APFL(ClientRule):
    """Mixtures of a global and a client's own model.

    Attributes:
        alpha: Weight of the own model, at first. With 0 and ``adaptive=false``, the personal model is FedAvg's local
            model; with 1, it is trained alone.
        adaptive: Learn the weight.
        decay: Decay of the weight, with ``adaptive``. The default is that of the authors' code; the paper has none.
    """

    name: ClassVar[str] = "apfl"
    summary: ClassVar[str] = "a personal mixture of the global and an own model, with a learned weight"
    paper: ClassVar[str] = "Deng et al. 2020, arXiv:2003.13461"
    has_personal_model: ClassVar[bool] = True
    # The paper compares 0, 0.25, 0.5, 0.75 and 1.
    spaces: ClassVar[Mapping[str, Space]] = {"alpha": uniform_range(0.1, 0.9)}
    idle_options = (({"adaptive": False}, ("decay",)),)

    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    adaptive: bool = True
    decay: Annotated[float, Field(ge=0)] = 0.02

    def acts_before(self, other: ClientRule) -> bool:
        """Return whether the other rule adds a vector to the gradient: the own model's objective has none."""
        return other.shifts_gradient

    def begin(self, ctx: Context) -> Tensors:
        """Load the own model and its weight."""
        if "v" in ctx.state:
            return {"v": ctx.state["v"], "alpha": ctx.state["alpha"]}
        return {"v": ctx.v_global.clone(), "alpha": torch.full_like(ctx.weight, self.alpha)}

    def gradient(self, grad_fn: GradFn, ctx: Context, carry: Tensors) -> GradFn:
        """Take a step on the own model, and on its weight, with each step on the global one."""

        def mixed(theta: Tensor, batch: Batch) -> Tensor:
            if batch.track:  # ignore additional gradients of a step
                own, alpha = carry["v"], carry["alpha"]
                g = grad_fn(alpha * own + (1 - alpha) * theta, batch.untracked())
                carry["v"] = own - batch.lr * alpha * g
                if self.adaptive:
                    slope = torch.dot(own - theta, g) + self.decay * alpha
                    moved = (alpha - batch.lr * slope).clamp(0, 1)
                    carry["alpha"] = torch.where(batch.step == 0, moved, alpha)
            return grad_fn(theta, batch)

        return mixed

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """Store the own model, its weight, and their mixture, the personal model."""
        own, alpha = carry["v"], carry["alpha"]
        ctx.state["v"], ctx.state["alpha"] = own, alpha
        ctx.state[PERSONAL] = alpha * own + (1 - alpha) * v
