"""FedAS: clients align the received body with the features of their own one, and Fisher information weights their updates.

Yang, Huang, Ye, "FedAS: Bridging Inconsistency in Personalized Federated Learning", CVPR 2024. Clients share the body ``phi``
and keep their heads ``h_k``. With the features ``a`` of the received body, and the class means ``m_c`` of the features of the
client's own last body::

    align:   phi <- phi - eta grad sum_{c in batch} mean_{i: y_i = c} MSE(a_i, m_c)         epochs times over its samples
    train:   (phi_k, h_k): local training from the aligned body and h_k
             F_k = sum over batches of ||grad mean NLL(phi_k, h_k)||^2                      trace of the Fisher information
    server:  phi <- phi + sum_k F_k (phi_k - phi) / sum_k F_k

Features and gradients are computed in eval mode; a client's own model has its own normalization buffers. ``eta`` and
``epochs`` are those of the authors' code (``clientas.py`` of xiyuanyang45/FedAS). There, clients align the server's own copy
of the model, so the alignment of one client changes the body that the next one receives. A client that takes part for the
first time has no own body and does not align; there it aligns with the initial model. ``F_k`` grows with the number of
batches, so with the number of samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.autograd import grad_and_value
from unskew.data.federation import take_rows
from unskew.methods.partial_sharing import PartialSharing
from unskew.models.spec import ModelSpec
from unskew.protocol.federation_info import ClientDataView
from unskew.protocol.rules import (
    PERSONAL,
    PERSONAL_BUFFERS,
    START,
    ClientRule,
    Context,
    ServerRule,
    Slices,
    Tensors,
    Updates,
    Weights,
)
from unskew.protocol.search_space import Space, log_range
from unskew.protocol.updates import nonzero_divisors
from unskew.seeding import fold, uniform

PURPOSE = 10
"""Separates the order of samples from other draws with a client's key."""


@dataclass(frozen=True)
class FedAS(ClientRule, PartialSharing, ServerRule):
    """Aligned bodies, personal heads, and weights by Fisher information.

    Attributes:
        eta: Learning rate of the alignment.
        epochs: Epochs of the alignment; with 0 bodies are not aligned.
        fisher: Weight clients by Fisher information; otherwise the average is uniform.
    """

    name: ClassVar[str] = "fedas"
    summary: ClassVar[str] = "a shared body, aligned with each client's own before training, and personal heads"
    paper: ClassVar[str] = "Yang et al., CVPR 2024"
    changes_start: ClassVar[bool] = True
    tasks_reason: ClassVar[str] = "it aligns the mean features of classes"
    needs = ("one_class",)
    weights: ClassVar[Weights | None] = "uniform"
    uploads: ClassVar[bool] = True
    sends_model_changes: ClassVar[bool] = False
    upload_ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"fisher": (0.0, 1e38)}
    trains_alone: ClassVar[bool] = True
    has_personal_model: ClassVar[bool] = True
    # One decade on each side of the authors' 0.01.
    spaces: ClassVar[Mapping[str, Space]] = {"eta": log_range(1e-3, 0.1)}
    idle_options = (({"epochs": 0}, ("eta",)),)

    eta: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.01
    epochs: Annotated[int, Field(ge=0)] = 1
    fisher: bool = True

    def shared_slices(self, spec: ModelSpec) -> Slices:
        """Return the slices of the body."""
        return tuple(spec.parts["body"])

    def local_slices(self, spec: ModelSpec) -> Slices:
        """Return the slices of the head."""
        return tuple(spec.parts["head"])

    def client_info(self, data: ClientDataView) -> Tensors:
        """Return the stored samples, without a copy, and the number of samples per class, ``[C]``."""
        return {"x": data.client.x, "y": data.client.y, "counts": data.class_counts()}

    def begin(self, ctx: Context) -> Tensors:
        """Align the received body; a client without a model of its own starts from the received one."""
        if PERSONAL not in ctx.state or self.epochs == 0:
            return {}
        counts = ctx.client_info["counts"]
        sums = None
        with torch.no_grad():
            for x, y in self.batches(ctx, 0):
                features = self.features(ctx, ctx.state[PERSONAL], ctx.state[PERSONAL_BUFFERS], x)
                sums = features.new_zeros(len(counts), features.shape[1]) if sums is None else sums
                sums.index_add_(0, y, features)
        assert sums is not None, "a client has samples"
        means = sums / counts.clamp_min(1)[:, None]

        def distance(v: Tensor, x: Tensor, y: Tensor) -> Tensor:
            number = torch.bincount(y, minlength=len(counts)).to(v.dtype)
            return ((self.features(ctx, v, ctx.b_global, x) - means[y]).square().mean(1) / number[y]).sum()

        v = ctx.v_global
        slope = grad_and_value(distance)
        for epoch in range(self.epochs):
            for x, y in self.batches(ctx, 1 + epoch):
                v = v - self.eta * slope(v, x, y)[0]  # 0 in the head
        return {START: v}

    def batches(self, ctx: Context, number: int) -> list[tuple[Tensor, Tensor]]:
        """Return all samples of the client in batches of a random order, inputs and classes.

        Args:
            ctx: Context of the client in this round.
            number: Number of the order in this round.
        """
        x, y = ctx.client_info["x"], ctx.client_info["y"]
        order = uniform(fold(fold(ctx.key, PURPOSE), number), (len(y),)).argsort(stable=True).to(y.device)
        parts = torch.split(order, ctx.training.batch_size)
        return [(ctx.inputs(take_rows(x, rows)), y[rows].to(ctx.v_global.device)) for rows in parts]

    def features(self, ctx: Context, v: Tensor, b: Tensor, x: Tensor) -> Tensor:
        """Return the features of inputs in eval mode, ``[n, f]``.

        Args:
            ctx: Context of the client in this round.
            v: Parameters of the model, ``[d]``.
            b: Its buffers, ``[m]``.
            x: Inputs, ``[n, ...]``.
        """
        return ctx.spec.forward(v, b, x).features.flatten(1).to(v.dtype)

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """Store the own model with its buffers, and upload the weighted Fisher information ``w_k F_k``."""
        ctx.state[PERSONAL], ctx.state[PERSONAL_BUFFERS] = v, ctx.model.b.clone()
        if not self.fisher:
            return

        def loss(v: Tensor, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(ctx.spec.forward(v, ctx.state[PERSONAL_BUFFERS], x).logits, y)

        slope = grad_and_value(loss)
        total = torch.stack([slope(v, x, y)[0].square().sum() for x, y in self.batches(ctx, 1 + self.epochs)]).sum()
        ctx.upload["fisher"] = ctx.weight * total

    def transform_update(self, ctx: Context, carry: Tensors, delta: Tensor) -> Tensor:
        """Return ``F_k (phi_k - phi)``; of slices, updates are differences to the received model, not to the aligned one."""
        return delta * (ctx.upload["fisher"] / ctx.weight) if self.fisher else delta

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """``phi <- phi + sum_k F_k (phi_k - phi) / sum_k F_k``."""
        mean = updates.aggregate
        if not self.fisher:
            return {"v": state["v"] + mean.delta}
        return {"v": state["v"] + mean.delta / nonzero_divisors(mean.upload[self.name]["fisher"] / mean.weight)}
