"""FedDecorr: decorrelates the dimensions of the features, against their collapse under label skew.

Shi, Liang, Zhang, Tan, Bai, "Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated
Learning", 2022, arXiv:2210.00226, Equation 4: with the correlation matrix ``R [m, m]`` of a batch's penultimate features,
z-scored per dimension, the loss gains ``beta ||R||_F^2 / m^2``. A batch of one sample has no correlation and is skipped.

The authors' code averages the squared off-diagonal entries of ``X^T X`` divided by the batch size instead, which is about
``B`` times larger; ``scale`` multiplies the term for those who want to come near it. Their default ``beta`` is 0.1; 0.01 is
that of the FedCOG paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.models.trainable import Batch, LossFn
from unskew.protocol.proposed import Proposed
from unskew.protocol.rules import ClientRule, Context, Tensors


@dataclass(frozen=True)
class FedDecorr(ClientRule):
    """Decorrelation of features.

    Attributes:
        beta: Strength; 0 is FedAvg.
        scale: Another factor of the term, 1 in the paper's formula.
    """

    name: ClassVar[str] = "feddecorr"
    summary: ClassVar[str] = "decorrelated features against dimensional collapse"
    paper: ClassVar[str] = "Shi et al. 2022, arXiv:2210.00226"
    tasks: ClassVar[tuple[str, ...]] = ("classification", "multilabel")
    tasks_reason: ClassVar[str] = "it correlates one feature vector a sample"

    beta: Annotated[float, Field(ge=0)] = 0.01
    scale: Annotated[float, Field(gt=0)] = 1.0

    def check(self, run: Proposed) -> Sequence[str]:
        """Without trained layers before the head there is nothing to decorrelate, which is told."""
        return run.told_without_body(self.name, "beta") if self.beta else ()

    def loss(self, loss_fn: LossFn, ctx: Context, carry: Tensors) -> LossFn:
        """``loss + beta ||R||_F^2 / m^2``."""
        if self.beta == 0:
            return loss_fn

        def decorrelated(v: Tensor, batch: Batch) -> Tensor:
            loss = loss_fn(v, batch)
            if len(batch.x) < 2:
                return loss
            features = ctx.model(v, batch.x, batch.track).features
            return loss + self.beta * self.scale * correlation_energy(features)

        return decorrelated


def correlation_energy(features: Tensor) -> Tensor:
    """``||R||_F^2 / m^2`` of features ``[B, m]``, ``B >= 2``; a constant dimension counts as uncorrelated."""
    size, m = features.shape
    z = features - features.mean(0)
    z = z / torch.sqrt(z.square().mean(0) + 1e-8)
    # ||Z^T Z||_F = ||Z Z^T||_F: the smaller of the two Gram matrices will do.
    gram = z @ z.T if size < m else z.T @ z
    return (gram / size).square().sum() / m**2
