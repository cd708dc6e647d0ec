"""kNN-Per: after the run, each client mixes the global model's predictions with those of its nearest training samples.

Marfoq, Neglia, Kameni, Vidal, "Personalized Federated Learning through Local Memorization", 2022, arXiv:2111.09360,
Equations 6 and 8. With the features ``a`` of an input, the squared distances ``d_i`` to the ``k`` nearest features among the
client's training samples, and ``f`` features::

    p_knn(c) = sum_{i: y_i = c} exp(-d_i / (f scale)) / sum_i exp(-d_i / (f scale))
    p(c)     = lam p_knn(c) + (1 - lam) p_global(c)

``scale`` is that of the authors' code (``client.py`` of omarfoq/knn-per). Training is that of FedAvg. The features and labels
of a client's samples are parameters of the model that never leave the client: they are 0 during training, and the training
after the last round writes them and takes no step. So a personal model is an ordinary model that can be stored and exported.
``lam`` is the same for all clients; the paper also tunes it for each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from unskew.methods.client_features import features_of
from unskew.methods.head_replacement import HeadReplacement, head_parameters_of
from unskew.methods.partial_sharing import LocalHeadParameters
from unskew.protocol.federation_info import ClientDataView
from unskew.protocol.rules import START, Context, Tensors
from unskew.protocol.search_space import Space, uniform_range
from unskew.seeding import fold, uniform

PURPOSE = 6
"""Separates the draw of samples from other draws with a client's key."""


class HeadWithNeighbors(nn.Module):
    """Head that mixes its probabilities with those of the nearest stored samples, if there are any, in eval mode."""

    def __init__(self, linear: nn.Linear, rule: KNNPer):
        super().__init__()
        self.linear = linear
        self.k, self.lam = min(rule.k, rule.capacity), rule.lam
        self.width = linear.in_features * rule.scale
        self.keys = nn.Parameter(linear.weight.new_zeros(rule.capacity, linear.in_features))
        self.labels = nn.Parameter(linear.weight.new_zeros(rule.capacity))  # class + 1; 0: no sample

    def forward(self, x: Tensor) -> Tensor:
        """Map features ``[B, f]`` to logits ``[B, C]``, which are logarithms of probabilities if there are samples."""
        logits: Tensor = self.linear(x)
        if self.training:
            return logits
        distances = x.square().sum(1, keepdim=True) - 2 * x @ self.keys.T + self.keys.square().sum(1)
        empty = self.labels == 0
        nearest, index = torch.where(empty, math.inf, distances).topk(self.k, largest=False)
        weights = torch.softmax(-nearest / self.width, dim=1)
        classes = torch.arange(1, logits.shape[1] + 1, device=x.device)
        neighbors = (weights.unsqueeze(2) * (self.labels[index].round().unsqueeze(2) == classes)).sum(1)
        mixed = self.lam * neighbors + (1 - self.lam) * torch.softmax(logits, dim=1)
        # A probability may underflow to 0; its logarithm, and the loss, would be infinite.
        return torch.where(empty.all(), logits, torch.log(mixed.clamp_min(torch.finfo(mixed.dtype).tiny)))


@dataclass(frozen=True)
class KNNPer(HeadReplacement, LocalHeadParameters):
    """The global model with a memory of the client's own samples.

    Attributes:
        k: Number of neighbors.
        lam: Weight of the neighbors, from 0 (the global model) to below 1.
        scale: Width of the kernel, relative to the number ``f`` of features.
        capacity: Largest number of samples that a client stores. A client with more stores a random selection.
    """

    name: ClassVar[str] = "knnper"
    summary: ClassVar[str] = "the global model, mixed with the labels of the client's nearest samples"
    paper: ClassVar[str] = "Marfoq et al. 2022, arXiv:2111.09360"
    changes_start: ClassVar[bool] = True
    tasks_reason: ClassVar[str] = "it mixes probabilities of classes"
    needs = ("one_class", "unweighted", "final_training", "logits_of_head")
    trains_alone: ClassVar[bool] = True
    final_steps: ClassVar[int | None] = 0
    local_parameters: ClassVar[tuple[str, ...]] = ("keys", "labels")
    # The paper's grid of weights, and the numbers of neighbors of its experiments.
    spaces: ClassVar[Mapping[str, Space]] = {"lam": uniform_range(0.0, 0.9)}
    idle_options = (({"lam": 0}, ("k", "scale")),)

    k: Annotated[int, Field(ge=1)] = 10
    lam: Annotated[float, Field(ge=0, lt=1)] = 0.5
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    capacity: Annotated[int, Field(ge=1)] = 1000

    def new_head(self, linear: nn.Linear) -> HeadWithNeighbors:
        """Return the linear head with the memory of samples."""
        return HeadWithNeighbors(linear, self)

    def client_info(self, data: ClientDataView) -> Tensors:
        """Return the stored samples, without a copy."""
        return {"x": data.client.x, "y": data.client.y}

    def begin(self, ctx: Context) -> Tensors:
        """After the last round, write features and labels of the client's samples into the model."""
        if not ctx.final:
            return {}
        y = ctx.client_info["y"]
        drawn = torch.arange(len(y), device=y.device)
        if len(y) > self.capacity:
            drawn = uniform(fold(ctx.key, PURPOSE), (len(y),)).argsort()[: self.capacity].to(y.device)
        features = features_of(ctx, ctx.v_global, ctx.b_global, drawn)
        start = ctx.v_global.clone()
        head = head_parameters_of(ctx.spec, start)
        head["keys"][: len(drawn)] = features
        head["labels"][: len(drawn)] = y[drawn] + 1
        return {START: start}
