"""FedProto: clients exchange class means of features instead of models.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: Federated Prototype Learning across Heterogeneous Clients", 2021,
arXiv:2105.00243, Algorithm 1 and Equation 7. With features ``a`` of a sample with label ``y``::

    client:  loss = CE + ld MSE(a, m_y)          m_c: the received mean of class c; no term for unknown classes
             after training: m_kc, the mean feature of its samples of each class that it has
    server:  m_c <- mean of m_kc over the clients that sent one

As in the authors' code (``lib/update.py`` and ``lib/utils.py`` of yuetan031/FedProto), the mean over clients is uniform and
the squared error is averaged over the batch and the feature. Here the means come from one pass in eval mode after training,
not from the batches of the last epoch, and a class that no client of a round has keeps its mean.

Every client has its own model, which starts from the initial model and is never sent. The server needs only sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.methods.own_models import ClassMeans
from unskew.models.execution import Batch, LossFn
from unskew.models.spec import ModelSpec
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.rules import Context, Shape, Tensors, Updates
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, log_range


@dataclass(frozen=True)
class FedProto(ClassMeans):
    """Prototypes instead of models.

    Attributes:
        ld: Strength of the pull of features towards the mean of their class; with 0 clients train alone.
    """

    name: ClassVar[str] = "fedproto"
    summary: ClassVar[str] = "own models, whose features are pulled towards common class means"
    paper: ClassVar[str] = "Tan et al. 2021, arXiv:2105.00243"
    class_targets: ClassVar[bool] = True
    exchange: ClassVar[str] = "clients send the mean features of their classes and receive common ones, but no model"
    # One decade on each side of the authors' 1.
    spaces: ClassVar[Mapping[str, Space]] = {"ld": log_range(0.1, 10.0)}

    ld: Annotated[float, Field(ge=0)] = 1.0

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Warn about the global model, and about models without a body."""
        return (*super().check(run), *run.warn_without_body(self.name, "ld"))

    def loss(self, loss_fn: LossFn, ctx: Context, carry: Tensors) -> LossFn:
        """Add ``ld MSE(a, m_y)``."""
        if self.ld == 0 or not ctx.download:
            return loss_fn
        means, known = ctx.download["means"], ctx.download["known"]

        def pulled(v: Tensor, batch: Batch) -> Tensor:
            loss = loss_fn(v, batch)
            features = ctx.model(v, batch.x, batch.track).features.flatten(1)
            return loss + self.ld * ((features - means[batch.y]).square().mean(1) * known[batch.y]).mean()

        return pulled

    def download_shapes(self, spec: ModelSpec, plan: RoundPlan) -> Mapping[str, Shape]:
        """Return the shapes of the class means and of the mask."""
        return {"means": (spec.classes, math.prod(spec.feature_shape)), "known": (spec.classes,)}

    def download(self, state: Tensors, client: int) -> Tensors:
        """Send the class means, and which of them are known."""
        return state

    def server_update(self, state: Tensors, updates: Updates) -> Tensors:
        """``m_c <- mean of m_kc`` over the clients that have class ``c``."""
        sums = updates.aggregate.upload[self.name]
        present = sums["present"]
        means = sums["means"] / present.clamp_min(1)[:, None]
        known = (present > 0).to(means.dtype)
        if state:
            means = torch.where(present[:, None] > 0, means, state["means"])
            known = torch.maximum(known, state["known"])
        return {"means": means, "known": known}
