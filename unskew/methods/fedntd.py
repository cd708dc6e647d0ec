"""FedNTD: distillation preserves the global model's predictions for all classes except the true one.

Lee, Jeong, Shin, Bae, Yun, "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning", 2021,
arXiv:2106.03097, Equations 4 and 5. ``q~`` (trained model) and ``q~_g`` (global model) are softmax probabilities at the
temperature ``tau``, over the logits of all classes except the true one::

    loss + beta tau^2 mean KL(q~_g || q~)

The global model is in eval mode and has no gradient. Nothing additional is communicated. The factor ``tau^2`` is from the
authors' code; with the default ``tau = 1`` it has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.models.execution import Batch, LossFn
from unskew.protocol.rules import ClientRule, Context, Tensors
from unskew.protocol.search_space import Space, log_range


@dataclass(frozen=True)
class FedNTD(ClientRule):
    """Not-true distillation.

    Attributes:
        needs: Requirements of the rule, see ``unskew.protocol.requirements``.
        beta: Weight of the distillation; 0 is FedAvg.
        tau: Temperature of both softmaxes.
    """

    name: ClassVar[str] = "fedntd"
    summary: ClassVar[str] = "keeps the global model's predictions for the classes that a sample does not have"
    paper: ClassVar[str] = "Lee et al. 2021, arXiv:2106.03097"
    class_targets: ClassVar[bool] = True
    # One decade on each side of the paper's 1.
    spaces: ClassVar[Mapping[str, Space]] = {"beta": log_range(0.1, 10.0)}
    needs = ("one_class",)
    idle_options = (({"beta": 0}, ("tau",)),)

    beta: Annotated[float, Field(ge=0)] = 1.0
    tau: Annotated[float, Field(gt=0)] = 1.0

    def loss(self, loss_fn: LossFn, ctx: Context, carry: Tensors) -> LossFn:
        """Add ``beta`` times the distillation term to the loss."""
        if self.beta == 0:
            return loss_fn

        def preserved(v: Tensor, batch: Batch) -> Tensor:
            loss = loss_fn(v, batch)
            student = ctx.model(v, batch.x, batch.track).logits
            with torch.no_grad():
                teacher = ctx.spec.forward(ctx.v_global, ctx.b_global, batch.x).logits
            return loss + self.beta * not_true(teacher, student, batch.y, self.tau)

        return preserved


def not_true(teacher: Tensor, student: Tensor, y: Tensor, tau: float) -> Tensor:
    """Compute ``tau^2 mean KL`` of logits ``[B, C]`` without the classes ``y [B]``; a scalar, 0 with two classes.

    Args:
        teacher: Logits of the global model, ``[B, C]``.
        student: Logits of the client's model, ``[B, C]``.
        y: True classes, ``[B]``.
        tau: Temperature.
    """
    others = torch.arange(student.shape[1] - 1, device=y.device)
    index = others + (others >= y[:, None]).to(others.dtype)
    log_p, log_q = ((logits.gather(1, index) / tau).log_softmax(dim=1) for logits in (teacher, student))
    return tau**2 * (log_p.exp() * (log_p - log_q)).sum(dim=1).mean()
