"""MOON: a contrastive loss pulls local features towards the global model's and away from the client's previous model's.

Li, He, Song, "Model-Contrastive Federated Learning", 2021, arXiv:2103.16257, Equation 3. On the same real batch, ``z`` are
the features of the trained model, ``z_g`` of the received model and ``z_p`` of the client's previous model::

    loss + mu mean -log( exp(cos(z, z_g)/T) / (exp(cos(z, z_g)/T) + exp(cos(z, z_p)/T)) )

``z_g`` and ``z_p`` have no gradient; both models are in eval mode, as in the authors' code. A client without a previous
model omits the term (``first="omit"``) or uses the received model as its previous one (``first="global"``, a constant loss
of log 2 per sample; equivalent up to rounding). The code of the FedCOG paper uses a random model there, which is not
supported here.

``mu=1``, ``T=0.5`` and a two-layer projection of 256 units between features and head are the defaults of the authors' code
(``main.py`` of QinbinLi/MOON: ``mu``, ``temperature``, ``out_dim``, ``use_project_head``), which recommends tuning ``mu``
between 0.001 and 10. The FedCOG paper compares with ``mu=0.01`` and no projection:
``moon:mu=0.01,projection=0``. With a projection the model is larger than that of other methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from unskew.models.execution import Batch, LossFn
from unskew.models.zoo.projection import with_projection
from unskew.protocol.rules import ClientRule, Context, Method, Tensors
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, log_range, one_of


@dataclass(frozen=True)
class Moon(ClientRule):
    """Model-contrastive learning.

    Attributes:
        needs: Requirements of the rule, see ``unskew.protocol.requirements``.
        mu: Weight of the contrastive loss; 0 removes it. The default is that of the authors' code, which recommends
            tuning it in 0.001 to 10.
        temperature: Temperature ``T`` of the contrastive loss.
        first: A client without a previous model leaves the term out. ``global`` uses the received model as the previous
            one, which makes the term a constant.
        projection: Units of a two-layer projection between features and head, as in the authors' code; 0 for none. It
            requires a linear head.
    """

    name: ClassVar[str] = "moon"
    summary: ClassVar[str] = "contrast to the global and the previous local model"
    paper: ClassVar[str] = "Li et al. 2021, arXiv:2103.16257"
    # The paper's grid of mu is 0.1, 1, 5, 10; FedCOG's comparison uses 0.01. The temperatures are the paper's grid.
    spaces: ClassVar[Mapping[str, Space]] = {"mu": log_range(0.01, 10.0), "temperature": one_of(0.1, 0.5, 1.0)}
    needs = ("vector",)
    idle_options = (({"mu": 0}, ("temperature", "first")),)

    mu: Annotated[float, Field(ge=0)] = 1.0
    temperature: Annotated[float, Field(gt=0)] = 0.5
    first: Literal["omit", "global"] = "omit"
    projection: Annotated[int, Field(ge=0)] = 256

    def conflict_with(self, method: Method) -> str | None:
        """Reject methods without a global model: the received and the previous model would be the same."""
        if method.sync is None or method.sync.trains_global_model:
            return None
        return (
            f"moon contrasts the received model with the client's previous one, but with {method.sync.name} each client "
            "continues with its own model. Remove one of them."
        )

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Warn if the model has no trained layers before the head, so that the term has no effect."""
        return run.warn_without_body(self.name, "mu") if self.mu else ()

    def adapt(self, module: nn.Module, head: str) -> tuple[nn.Module, str]:
        """Add the projection head if ``projection`` is not 0."""
        return with_projection(module, head, self.projection) if self.projection else (module, head)

    def begin(self, ctx: Context) -> Tensors:
        """Load the previous model and its buffers."""
        if "v" in ctx.state:
            return {"v": ctx.state["v"], "b": ctx.state["b"], "weight": torch.ones_like(ctx.weight)}
        weight = torch.ones_like(ctx.weight) if self.first == "global" else torch.zeros_like(ctx.weight)
        return {"v": ctx.v_global, "b": ctx.b_global, "weight": weight}

    def loss(self, loss_fn: LossFn, ctx: Context, carry: Tensors) -> LossFn:
        """Add ``mu`` times the contrastive loss to the loss."""
        if self.mu == 0:
            return loss_fn

        def contrasted(v: Tensor, batch: Batch) -> Tensor:
            loss = loss_fn(v, batch)
            z = ctx.model(v, batch.x, batch.track).features
            with torch.no_grad():
                z_g = ctx.spec.forward(ctx.v_global, ctx.b_global, batch.x).features
                z_p = ctx.spec.forward(carry["v"], carry["b"], batch.x).features
            return loss + self.mu * carry["weight"] * contrast(z, z_g, z_p, self.temperature)

        return contrasted

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """Store the trained model as the previous model of the next round."""
        ctx.state["v"], ctx.state["b"] = v.clone(), ctx.model.b.clone()


def contrast(z: Tensor, z_g: Tensor, z_p: Tensor, temperature: float) -> Tensor:
    """Compute the batch mean of ``-log(e^g / (e^g + e^p))``; ``g`` and ``p`` are cosines divided by the temperature.

    Args:
        z: Features of the client's model, ``[B, f]``.
        z_g: Features of the global model, ``[B, f]``.
        z_p: Features of the client's previous model, ``[B, f]``.
        temperature: Temperature of the softmax.
    """
    g = F.cosine_similarity(z, z_g, dim=-1) / temperature
    p = F.cosine_similarity(z, z_p, dim=-1) / temperature
    return F.softplus(p - g).mean()
