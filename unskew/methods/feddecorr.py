"""FedDecorr: decorrelates feature dimensions, against dimensional collapse under label skew.

Shi, Liang, Zhang, Tan, Bai, "Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated
Learning", 2022, arXiv:2210.00226. ``Z [B, m]`` are the penultimate features of a batch, z-scored per dimension. The loss has
an additional term, ``beta`` times

    mean_{i != j} (Z^T Z)_ij^2 / B        form=authors, the authors' code (``loss.py`` of bytedance/FedDecorr)
    ||R||_F^2 / m^2,  R = Z^T Z / B       form=paper, Equation 4

The first form is about ``B`` times the second: only its square is divided by the batch size, not ``Z^T Z``. It also counts
only pairs of different dimensions, and its z-scores use the unbiased variance. ``beta=0.1`` is the default of the authors'
code and scripts, and belongs to their form. The text of the FedCOG paper has 0.01, and ``feddecorr:beta=0.01,form=paper``
was the default here before. For a batch of one sample the term is omitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.models.execution import Batch, LossFn
from unskew.protocol.rules import ClientRule, Context, Tensors
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, log_range


@dataclass(frozen=True)
class FedDecorr(ClientRule):
    """Decorrelation of features.

    Attributes:
        needs: Requirements of the rule, see ``unskew.protocol.requirements``.
        beta: Weight of the term, as in the authors' code and scripts; 0 is FedAvg.
        form: The term of the authors' code, or of the ``paper``. The first is about ``B`` times the second.
        scale: Additional factor of the term.
    """

    name: ClassVar[str] = "feddecorr"
    summary: ClassVar[str] = "decorrelated features against dimensional collapse"
    paper: ClassVar[str] = "Shi et al. 2022, arXiv:2210.00226"
    # The authors use 0.1, FedCOG's comparison 0.01.
    spaces: ClassVar[Mapping[str, Space]] = {"beta": log_range(0.01, 0.5)}
    needs = ("vector",)

    beta: Annotated[float, Field(ge=0)] = 0.1
    form: Literal["authors", "paper"] = "authors"
    scale: Annotated[float, Field(gt=0)] = 1.0

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Warn if the model has no trained layers before the head, so that the term has no effect."""
        return run.warn_without_body(self.name, "beta") if self.beta else ()

    def loss(self, loss_fn: LossFn, ctx: Context, carry: Tensors) -> LossFn:
        """Add ``beta`` times the term to the loss."""
        if self.beta == 0:
            return loss_fn
        energy = authors_energy if self.form == "authors" else correlation_energy

        def decorrelated(v: Tensor, batch: Batch) -> Tensor:
            loss = loss_fn(v, batch)
            if len(batch.x) < 2:
                return loss
            features = ctx.model(v, batch.x, batch.track).features
            return loss + self.beta * self.scale * energy(features)

        return decorrelated


def correlation_energy(features: Tensor) -> Tensor:
    """Compute ``||R||_F^2 / m^2`` of features ``[B, m]``, ``B >= 2``; a constant dimension counts as uncorrelated."""
    size, m = features.shape
    z = features - features.mean(0)
    z = z / torch.sqrt(z.square().mean(0) + 1e-8)
    # ||Z^T Z||_F = ||Z Z^T||_F, so use the smaller Gram matrix.
    gram = z @ z.T if size < m else z.T @ z
    return (gram / size).square().sum() / m**2


def authors_energy(features: Tensor) -> Tensor:
    """Compute ``mean_{i != j} (Z^T Z)_ij^2 / B`` of features ``[B, m]``, ``B >= 2``; 0 for a single dimension."""
    size, m = features.shape
    z = features - features.mean(0)
    z = z / torch.sqrt(z.square().sum(0) / (size - 1) + 1e-8)
    gram = z @ z.T if size < m else z.T @ z
    pairs = gram.square().sum() - z.square().sum(0).square().sum()
    return pairs / (max(1, m * (m - 1)) * size)
