"""q-FedAvg: clients with larger losses get larger weights, so accuracy is more equal across clients.

Li, Sanjabi, Beirami, Smith, "Fair Resource Allocation in Federated Learning", 2020, arXiv:1905.10497, Algorithm 2, for the
objective ``sum_k F_k^(q+1) / (q+1)`` (Equation 2). With ``F_k`` the mean loss of the received model at client ``k``::

    client:  L = 1 / lr;  D = L (theta - theta_k)
             Delta_k = F_k^q D;   h_k = q F_k^(q-1) ||D||^2 + L F_k^q
    server:  theta <- theta - sum_k Delta_k / sum_k h_k

As in the authors' code, ``F_k`` is the mean loss plus 1e-10. The average is uniform; with other weights both sums use them.
``lr`` is the learning rate of the round. A client evaluates the received model on all of its samples, and sends
``Delta_k`` instead of its update and the number ``h_k``, so the server needs only sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.models.execution import Batch
from unskew.protocol.client_rule import Forward
from unskew.protocol.rules import ClientRule, Context, ServerRule, SurveyTime, Tensors, Updates, Weights
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, log_range

SMALLEST = 1e-10
"""Added to the loss, so that negative powers of it are finite."""


@dataclass(frozen=True)
class QFedAvg(ClientRule, ServerRule):
    """Fair aggregation.

    Attributes:
        weights: Client weighting with ``client_weighting=auto``; None if the method does not choose one.
        q: Power of the losses; 0 is FedAvg. The paper's grid is 0.001 to 10.
    """

    name: ClassVar[str] = "qfedavg"
    summary: ClassVar[str] = "larger weights for clients with larger losses, for equal accuracy"
    paper: ClassVar[str] = "Li et al. 2020, arXiv:1905.10497"
    needs = ("whole_updates",)
    supports_delays: ClassVar[bool] = False
    uploads: ClassVar[bool] = True
    sends_model_changes: ClassVar[bool] = False
    upload_ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"h": (0.0, 1e38)}
    weights: ClassVar[Weights | None] = "uniform"
    survey_at: ClassVar[SurveyTime | None] = "received"
    # The paper's grid is 0.001 to 10.
    spaces: ClassVar[Mapping[str, Space]] = {"q": log_range(1e-3, 10.0)}

    q: Annotated[float, Field(ge=0)] = 1.0

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Warn if ``1 / lr`` is not the curvature of SGD."""
        optimizer = run.training.optimizer
        if self.q == 0 or optimizer == "sgd":
            return ()
        return (
            f"qfedavg estimates the curvature of the losses as 1/lr, which holds for SGD. With optimizer={optimizer} the "
            "server's steps can be far too small. Use optimizer=sgd.",
        )

    def survey(self, ctx: Context, v: Tensor, forward: Forward, batch: Batch) -> Tensors:
        """Return the sum of the losses of all predictions, and their number."""
        losses, predictions = ctx.task.losses(forward(v, batch.x).logits, batch.y), ctx.task.predictions(batch.y)
        loss = (losses * predictions.to(losses.dtype)).sum().to(v.dtype)
        return {"loss": loss, "predictions": predictions.sum().to(v.dtype)}

    def begin(self, ctx: Context) -> Tensors:
        """Return ``F_k``."""
        return {"loss": ctx.survey["loss"] / ctx.survey["predictions"].clamp_min(1) + SMALLEST}

    def transform_update(self, ctx: Context, carry: Tensors, delta: Tensor) -> Tensor:
        """Upload ``w_k h_k``; return ``-Delta_k``."""
        power = carry["loss"] ** self.q
        d = delta / ctx.lr
        h = self.q * carry["loss"] ** (self.q - 1) * d.square().sum() + power / ctx.lr
        ctx.upload["h"] = ctx.weight * h
        return power * d

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """``theta <- theta - sum_k Delta_k / sum_k h_k``."""
        mean = updates.aggregate
        return {"v": state["v"] + mean.delta / (mean.upload[self.name]["h"] / mean.weight)}
