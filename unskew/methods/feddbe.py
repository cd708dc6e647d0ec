"""FedDBE: a personal bias of features at each client, and features whose mean is the same at all clients.

Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan, "Eliminating Domain Bias for Federated Learning in Representation Space", 2023,
arXiv:2311.14975. With the features ``a [B, f]`` of a batch, their mean ``a_mean``, and the head ``h``::

    logits = h(a + b_k);    loss = CE + kappa mean_f 1/2 (r - g)^2;    r <- (1 - mu) r + mu a_mean       at first r = 0
    after the first round:  g <- sum_k p_k r_k,  fixed from then on

``b_k [f]`` starts at 0 and stays at the client; the global model has ``b = 0``. ``r`` starts again in every round, and only
its last summand has a gradient. In the first round there is neither ``b_k`` nor the second term.

The authors' code (``clientDBE.py`` and ``serverDBE.py`` of TsingZ0/DBE) trains all clients before the first round for ``g``,
discards these models, and takes ``r`` after the last step as ``r_k``. Here the first round counts, ``g`` is that of its
cohort, and ``r_k`` is the mean over all samples of the client, in eval mode after training. ``kappa=50`` and ``mu=1`` are
the values of the authors' script for their convolutional network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from unskew.methods.head_replacement import HeadReplacement, head_parameters_of
from unskew.methods.partial_sharing import LocalHeadParameters
from unskew.models.execution import Batch, GradFn, LossFn
from unskew.models.spec import ModelSpec, slices_mask
from unskew.protocol.client_rule import Forward
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.rules import Context, Shape, SurveyTime, Tensors, Updates
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, log_range, one_of


class HeadWithShift(nn.Module):
    """Linear head of shifted features; the shift is 0 at first."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear = linear
        self.shift = nn.Parameter(linear.weight.new_zeros(linear.in_features))

    def forward(self, x: Tensor) -> Tensor:
        """Map features ``[B, f]`` to logits ``[B, C]``."""
        return self.linear(x + self.shift)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class FedDBE(HeadReplacement, LocalHeadParameters):
    """Personal bias and common mean of features.

    Attributes:
        kappa: Weight of the pull of the mean feature towards the common one; 0 removes it.
        mu: Share of a batch in the mean feature; 1 uses the batch alone.
        bias: Train the personal bias of the features.
    """

    name: ClassVar[str] = "feddbe"
    summary: ClassVar[str] = "a personal bias of features, whose mean is the same at all clients"
    paper: ClassVar[str] = "Zhang et al. 2023, arXiv:2311.14975"
    needs = ("vector",)
    uploads: ClassVar[bool] = True
    survey_at: ClassVar[SurveyTime | tuple[SurveyTime, ...] | None] = "trained"
    local_parameters: ClassVar[tuple[str, ...]] = ("shift",)
    # Around the authors' 50; mu as in their scripts and code.
    spaces: ClassVar[Mapping[str, Space]] = {"kappa": log_range(1.0, 100.0), "mu": one_of(0.1, 0.5, 1.0)}
    idle_options = (({"kappa": 0}, ("mu",)),)

    kappa: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 50.0
    mu: Annotated[float, Field(gt=0, le=1)] = 1.0
    bias: bool = True

    # ---- before the run -------------------------------------------------------------------------------------------------

    def new_head(self, linear: nn.Linear) -> HeadWithShift:
        """Return the linear head with the bias of the features."""
        return HeadWithShift(linear)

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate the shared part; warn if no trained layer precedes the head."""
        return [*super().check(run), *(run.warn_without_body(self.name, "kappa") if self.kappa else ())]

    # ---- at the clients -------------------------------------------------------------------------------------------------

    def begin(self, ctx: Context) -> Tensors:
        """Initialize the mean feature to zero."""
        return {"r": torch.zeros_like(head_parameters_of(ctx.spec, ctx.v_global)["shift"])} if self.mu < 1 else {}

    def loss(self, loss_fn: LossFn, ctx: Context, carry: Tensors) -> LossFn:
        """Add ``kappa mean_f 1/2 (r - g)^2``."""
        if self.kappa == 0 or not ctx.download:
            return loss_fn

        def regularized(v: Tensor, batch: Batch) -> Tensor:
            loss = loss_fn(v, batch)
            r = self.mu * ctx.model(v, batch.x, batch.track).features.to(v.dtype).mean(0)
            if self.mu < 1:
                r = r + (1 - self.mu) * carry["r"]
            return loss + self.kappa / 2 * (r - ctx.download["mean"]).square().mean()

        return regularized

    def gradient(self, grad_fn: GradFn, ctx: Context, carry: Tensors) -> GradFn:
        """Update the mean feature of the batches."""
        if self.mu == 1 or self.kappa == 0 or not ctx.download:
            return grad_fn
        (own,) = self.local_slices(ctx.spec)

        def product(v: Tensor, batch: Batch) -> Tensor:
            return v[own] @ ctx.model(v, batch.x, batch.track).features.to(v.dtype).mean(0).detach()

        # Its gradient with respect to the shift is the mean feature, of a pass with the same dropout.
        slope = ctx.model.gradient(product)

        def tracked(v: Tensor, batch: Batch) -> Tensor:
            mean = slope(v, batch.untracked())[own]
            g = grad_fn(v, batch)
            if batch.track:
                carry["r"] = (1 - self.mu) * carry["r"] + self.mu * mean
            return g

        return tracked

    def trainable_mask(self, ctx: Context, carry: Tensors, batch: Batch) -> Tensor | None:
        """Freeze the bias in the first round."""
        if self.bias and ctx.download:
            return None
        return slices_mask(self.shared_slices(ctx.spec), ctx.spec.size).to(ctx.v_global.device)

    def survey(self, ctx: Context, v: Tensor, forward: Forward, batch: Batch) -> Tensors:
        """Return the sum of the features in the first round, ``[f]``, and the number of samples."""
        if ctx.download:
            return {}
        features = forward(v, batch.x).features
        return {"features": features.sum(0), "count": features.new_tensor(float(len(features)))}

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """Upload the weighted mean feature in the first round."""
        if ctx.survey:
            ctx.upload["mean"] = ctx.weight * ctx.survey["features"] / ctx.survey["count"]

    # ---- at the server --------------------------------------------------------------------------------------------------

    def download_shapes(self, spec: ModelSpec, plan: RoundPlan) -> Mapping[str, Shape]:
        """Return the shape of the mean feature."""
        return {"mean": spec.feature_shape}

    def download(self, state: Tensors, client: int) -> Tensors:
        """Send the common mean feature, once it is known."""
        return state

    def server_update(self, state: Tensors, updates: Updates) -> Tensors:
        """``g <- sum_k p_k r_k`` after the first round."""
        aggregate = updates.aggregate
        return state or {"mean": aggregate.upload[self.name]["mean"] / aggregate.weight}
