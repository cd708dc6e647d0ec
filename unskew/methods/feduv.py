"""FedUV: predicted probabilities vary and features spread as with IID data.

Son, Kim, Chung, Huang, Liu, "FedUV: Uniformity and Variance for Heterogeneous Federated Learning", 2024, arXiv:2402.18372.
With the probabilities ``p [B, C]`` and the features ``a [B, f]`` of a batch, the loss has two additional terms::

    lam mean_c relu(1/sqrt(C) - std_batch p_c)  +  mu mean_{i<j} exp(-||a_i - a_j||^2 / s)

``1/sqrt(C)`` is the unbiased standard deviation of the entries of a column of the identity matrix: of one-hot predictions
for a batch with one sample of each class. ``s`` is the median of the nonzero squared distances, the lower one of two, and
has a gradient, too. These are the terms, and ``lam=2.5`` and ``mu=0.5`` the defaults, of the authors' code
(``algs/feduv.py`` and ``train_fl.py`` of sonhamin/FedUV). Features are not normalized there, although the paper calls the
second term hyperspherical. For a batch of one sample both terms are omitted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.models.execution import Batch, LossFn
from unskew.protocol.rules import ClientRule, Context, Tensors
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, log_range


@dataclass(frozen=True)
class FedUV(ClientRule):
    """Variance of probabilities and uniformity of features.

    Attributes:
        needs: Requirements of the rule, see ``unskew.protocol.requirements``.
        lam: Weight of the variance of probabilities, as in the authors' code.
        mu: Weight of the spread of features, as in the authors' code.
    """

    name: ClassVar[str] = "feduv"
    summary: ClassVar[str] = "probabilities that vary and features that spread as with IID data"
    paper: ClassVar[str] = "Son et al. 2024, arXiv:2402.18372"
    needs = ("one_class", "vector")
    # Around the authors' 2.5 and 0.5.
    spaces: ClassVar[Mapping[str, Space]] = {"lam": log_range(0.1, 5.0), "mu": log_range(0.1, 5.0)}

    lam: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.5
    mu: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.5

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Warn if the model has no trained layers before the head, so that the second term has no effect."""
        return run.warn_without_body(self.name, "mu") if self.mu else ()

    def loss(self, loss_fn: LossFn, ctx: Context, carry: Tensors) -> LossFn:
        """Add both terms."""
        if self.lam == self.mu == 0:
            return loss_fn

        def spread(v: Tensor, batch: Batch) -> Tensor:
            loss = loss_fn(v, batch)
            if len(batch.x) < 2:
                return loss
            logits, features = ctx.model(v, batch.x, batch.track)
            if self.lam:
                loss = loss + self.lam * variance_gap(logits.softmax(1))
            if self.mu:
                loss = loss + self.mu * crowding(features.to(v.dtype))
            return loss

        return spread


def variance_gap(p: Tensor) -> Tensor:
    """Compute ``mean_c relu(1/sqrt(C) - std p_c)`` of probabilities ``[B, C]``, ``B >= 2``; a scalar."""
    # The lower bound keeps the gradient finite if a class has the same probability for all samples.
    std = p.var(0).clamp_min(torch.finfo(p.dtype).tiny).sqrt()
    return (1 / math.sqrt(p.shape[1]) - std).relu().mean()


def crowding(features: Tensor) -> Tensor:
    """Compute ``mean_{i<j} exp(-||a_i - a_j||^2 / s)`` of features ``[B, f]``, ``B >= 2``; 1 if all are equal."""
    a = features - features.mean(0)
    norms = a.square().sum(1)
    first, second = torch.triu_indices(len(a), len(a), 1, device=a.device).unbind()
    size = norms[first] + norms[second]
    distances = size - 2 * (a @ a.T)[first, second]
    # Equal features have a distance of a few roundings, which may be negative.
    zero = distances <= 8 * torch.finfo(a.dtype).eps * size
    distances = torch.where(zero, 0.0, distances)
    # Zeros come first: the lower median of the others is in the middle of what follows them.
    ordered, zeros = distances.sort().values, zero.sum()
    middle = (zeros + (len(first) - zeros - 1).clamp_min(0) // 2).clamp_max(len(first) - 1)
    s = ordered.gather(0, middle[None])[0]
    return torch.exp(-distances / torch.where(s > 0, s, 1.0)).mean()
