"""FedRoD: a generic head for all clients and a personal head for each, on one body.

Chen, Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", 2022, arXiv:2107.00778,
Algorithm 1. With features ``a``, the generic head ``G``, the personal head ``P_k`` and ``n_kc`` samples of class ``c``::

    z_g = G(a);   z_p = stop(z_g) + P_k(stop(a))                            stop: no gradient
    loss  CE(z_g + gamma log n_k, y) + CE(z_p, y)                           balanced softmax; absent classes: -inf
    server averages body and G;   P_k stays at the client

The generic model predicts with ``z_g``, a personal model with ``G(a) + P_k(a)``. ``P`` is added to the model with weights 0,
so the global model is the one with ``P = 0``. The paper's hypernetwork, which creates ``P_k`` for new clients, is not
implemented. ``P`` has a bias if ``G`` has one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from unskew.methods.head_replacement import HeadReplacement, head_parameters_of
from unskew.methods.logit_adjustment import LogitAdjustment, single_class_note
from unskew.methods.partial_sharing import LocalHeadParameters
from unskew.models.execution import Batch, LossFn
from unskew.protocol.rules import Context, Method, Tensors
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, log_range


class TwoHeads(nn.Module):
    """Sum of a generic and a personal linear head; the personal one is 0 at first."""

    def __init__(self, generic: nn.Linear):
        super().__init__()
        self.generic = generic
        self.personal = copy.deepcopy(generic)
        for parameter in self.personal.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Map features ``[B, f]`` to logits ``[B, C]``."""
        return self.generic(x) + self.personal(x)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class FedRoD(LogitAdjustment, HeadReplacement, LocalHeadParameters):
    """Generic and personal heads on a shared body.

    Attributes:
        gamma: Strength of the balanced softmax.
    """

    name: ClassVar[str] = "fedrod"
    summary: ClassVar[str] = "a shared balanced head, and a head of each client's own that corrects it"
    paper: ClassVar[str] = "Chen and Chao 2022, arXiv:2107.00778"
    class_targets: ClassVar[bool] = True
    needs = ("one_class", "unweighted", "logits_of_head")
    # Half a decade around the paper's 1.
    spaces: ClassVar[Mapping[str, Space]] = {"gamma": log_range(0.3, 3.0)}
    local_parameters: ClassVar[tuple[str, ...]] = ("personal.weight", "personal.bias")

    gamma: Annotated[float, Field(gt=0)] = 1.0

    def new_head(self, linear: nn.Linear) -> TwoHeads:
        """Return the linear head as the generic one, with a personal head."""
        return TwoHeads(linear)

    def conflict_with(self, method: Method) -> str | None:
        """Reject what rules with adjusted logits, or a shared part reject."""
        adjusted = LogitAdjustment.conflict_with(self, method)
        other = next((rule.name for rule in method.client if "final_training" in rule.needs), None)
        own = f"{other} and fedrod both define a client's personal model. Remove one of them." if other else None
        return adjusted or LocalHeadParameters.conflict_with(self, method) or own

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate that updates are not delayed; warn about single classes."""
        remedy = "Only their personal heads learn. Use fedper or fedrep, or a partition with more classes per client."
        notes = single_class_note(run.federation, "the loss of fedrod's generic head", remedy)
        return [*LocalHeadParameters.check(self, run), *notes]

    def adjust(self, logits: Tensor, counts: Tensor) -> Tensor:
        """Return ``z + gamma log n_k``, which is ``-inf`` for absent classes."""
        return logits + self.gamma * torch.log(counts)

    def loss(self, loss_fn: LossFn, ctx: Context, carry: Tensors) -> LossFn:
        """Replace the task's loss by the losses of both heads."""

        def both(v: Tensor, batch: Batch) -> Tensor:
            loss = loss_fn(v, batch)
            logits, features = ctx.model(v, batch.x, batch.track)
            a = features.to(v.dtype)
            head = head_parameters_of(ctx.spec, v)
            z_g = F.linear(a, head["generic.weight"], head.get("generic.bias"))
            z_p = z_g.detach() + F.linear(a.detach(), head["personal.weight"], head.get("personal.bias"))
            heads = ctx.task.loss(self.adjust(z_g, ctx.client_info["counts"]), batch.y) + ctx.task.loss(z_p, batch.y)
            return loss + (heads - ctx.task.loss(logits, batch.y))

        return both
