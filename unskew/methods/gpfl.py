"""GPFL: generic and personal features from one body, by conditions that come from embeddings of the classes.

Zhang, Hua, Wang, Song, Xue, Ma, Cao, Guan, "GPFL: Simultaneously Learning Global and Personalized Feature Information for
Personalized Federated Learning", 2023, arXiv:2308.10279. With features ``a [f]``, class embeddings ``E [C, f]``, and the
client's shares of classes ``q_kc``::

    g = mean_c E_c,   p_k = sum_c q_kc E_c                                  of the received E; no gradient
    a_G = relu((1 + gamma(g)) a + beta(g)),   a_P = relu((1 + gamma(p_k)) a + beta(p_k))
    loss  CE(h_k(a_P), y) + CE(cos(a_G, E), y) + lam |A_G - E0_y|_F + mu/2 (|gamma, beta|^2 + |E|^2)

``gamma`` and ``beta`` are a linear layer, ReLU and LayerNorm each, ``E0`` the received embeddings, and ``A_G [B, f]`` the
generic features of the batch. The head ``h_k`` stays at the client, everything else is averaged. A personal model predicts
with ``h_k(a_P)``; in the global model ``h_k`` is the initial one and ``p_k = 0``.

The authors' code (``clientgp.py`` of TsingZ0/GPFL) computes ``g`` and ``p_k`` from the client's embeddings before they are
replaced by the average, and as 0 in the first round; here they come from the received ones. ``lam`` and ``mu`` are the values
of the authors' script for their convolutional network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from unskew.errors import ConfigError
from unskew.methods.head_replacement import HeadReplacement, head_parameters_of
from unskew.methods.partial_sharing import LocalHeadParameters, head_parameters
from unskew.models.execution import Batch, LossFn
from unskew.models.spec import slices_mask
from unskew.protocol.federation_info import ClientDataView
from unskew.protocol.rules import START, Context, Tensors
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, log_range


class ConditionedHead(nn.Module):
    """Linear head of features that a condition scales and shifts, and the embeddings of the classes."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        size = linear.in_features
        self.linear = linear
        self.gamma, self.beta = (
            nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.LayerNorm(size)).to(linear.weight) for _ in range(2)
        )
        self.embeddings = nn.Parameter(torch.randn_like(linear.weight))
        self.condition = nn.Parameter(linear.weight.new_zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """Map features ``[B, f]`` to logits ``[B, C]``."""
        personal = F.relu((1 + self.gamma(self.condition)) * x + self.beta(self.condition))
        return self.linear(personal)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class GPFL(HeadReplacement, LocalHeadParameters):
    """Generic and personal features by conditions.

    Attributes:
        lam: Weight of the distance of the generic features from the received embeddings of their classes.
        mu: Weight decay of the conditions' layers and of the embeddings.
    """

    name: ClassVar[str] = "gpfl"
    summary: ClassVar[str] = "own heads on personal features, next to generic features near shared class embeddings"
    paper: ClassVar[str] = "Zhang et al. 2023, arXiv:2308.10279"
    class_targets: ClassVar[bool] = True
    changes_start: ClassVar[bool] = True
    tasks_reason: ClassVar[str] = "it has an embedding for each class"
    needs = ("one_class", "vector")
    local_parameters: ClassVar[tuple[str, ...]] = ("linear.weight", "linear.bias", "condition")
    # The authors' values are 0 to 1 for mu, and 0.0001 to 0.01 for lam.
    spaces: ClassVar[Mapping[str, Space]] = {"lam": log_range(1e-4, 1.0), "mu": log_range(1e-4, 1.0)}

    lam: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01
    mu: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1

    # ---- before the run -------------------------------------------------------------------------------------------------

    def new_head(self, linear: nn.Linear) -> ConditionedHead:
        """Return the linear head with conditions and embeddings."""
        return ConditionedHead(linear)

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate the shared part, and that the head has an output, and so an embedding, for each class."""
        embeddings = head_parameters_of(run.spec, run.spec.flatten())["embeddings"]
        if len(embeddings) != run.spec.classes:
            raise ConfigError(
                f"gpfl needs a head with {run.spec.classes} outputs, one for each class, but {run.spec.head_name!r} has "
                f"{len(embeddings)}. Remove head, or name the module that returns the logits."
            )
        return super().check(run)

    def client_info(self, data: ClientDataView) -> Tensors:
        """Return the client's training samples per class, which stay at the client."""
        return {"counts": data.class_counts()}

    # ---- at the clients -------------------------------------------------------------------------------------------------

    def begin(self, ctx: Context) -> Tensors:
        """Start from the received model with the personal condition ``p_k``, which is not trained."""
        counts, embeddings = ctx.client_info["counts"], head_parameters_of(ctx.spec, ctx.v_global)["embeddings"]
        q = counts.to(embeddings) / counts.sum()
        (own,) = head_parameters(ctx.spec, ("condition",), True)
        start = torch.cat([ctx.v_global[: own.start], q @ embeddings, ctx.v_global[own.stop :]])
        return {START: start, "trained": ~slices_mask((own,), ctx.spec.size).to(start.device)}

    def loss(self, loss_fn: LossFn, ctx: Context, carry: Tensors) -> LossFn:
        """Add the loss of the generic features, their distance from the received embeddings, and weight decay."""
        received = head_parameters_of(ctx.spec, ctx.v_global)["embeddings"]
        generic = received.mean(0)

        def regularized(v: Tensor, batch: Batch) -> Tensor:
            loss = loss_fn(v, batch)
            parameters = head_parameters_of(ctx.spec, v)
            a = ctx.model(v, batch.x, batch.track).features.to(v.dtype)
            gamma, beta = (layers(parameters, name, generic) for name in ("gamma", "beta"))
            a_g = F.relu((1 + gamma) * a + beta)
            cosine = F.linear(F.normalize(a_g, dim=1), F.normalize(parameters["embeddings"], dim=1))
            loss = loss + F.cross_entropy(cosine, batch.y)
            if self.lam:
                loss = loss + self.lam * torch.linalg.vector_norm(a_g - received[batch.y])
            if self.mu:
                shared = [p.square().sum() for name, p in parameters.items() if name not in self.local_parameters]
                loss = loss + self.mu / 2 * torch.stack(shared).sum()
            return loss

        return regularized

    def trainable_mask(self, ctx: Context, carry: Tensors, batch: Batch) -> Tensor:
        """Freeze the condition."""
        return carry["trained"]


def layers(parameters: Tensors, name: str, condition: Tensor) -> Tensor:
    """Return ``gamma`` or ``beta`` of a condition, ``[f]``.

    Args:
        parameters: Parameters of the head.
        name: ``gamma`` or ``beta``.
        condition: The condition, ``[f]``.
    """
    hidden = F.relu(F.linear(condition, parameters[f"{name}.0.weight"], parameters[f"{name}.0.bias"]))
    return F.layer_norm(hidden, hidden.shape, parameters[f"{name}.2.weight"], parameters[f"{name}.2.bias"])
