"""FedALA: clients train from a mixture of their own model and the global one, with a learned weight for each entry.

Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", 2023,
arXiv:2212.01197, Equations 2 to 4 and Algorithm 1. Only the head is mixed (``p = 1`` in the paper); the body is the received
one. Before training, client ``k`` with its own head ``h_k`` of the last round it took part in learns ``w`` in ``[0, 1]``::

    h(w) = h_k + (h - h_k) * w
    w   <- clip(w - eta (h - h_k) * grad F_k(h(w)), 0, 1)        every batch of a random share of its samples
    theta_k: local training from the received body and h(w);   sends theta_k - theta

``w`` starts at 1 and stays at the client. The first time, the client repeats passes over these samples until the standard
deviation of the loss of the last batch, over the last ten passes, is below 0.1, as in the authors' code (``ALA.py`` of
TsingZ0/FedALA); afterwards it takes one pass per round. The features are computed once per round, in eval mode, because the
body does not change. Unlike here, that code takes samples next to each other and computes features in training mode.

A client is served by the model from which it would train next: the final body and the mixture of the heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.autograd import grad_and_value
from unskew.methods.client_features import features_of
from unskew.protocol.federation_info import ClientDataView
from unskew.protocol.payload import scatter_slices
from unskew.protocol.rules import PERSONAL, SHIFT, START, ClientRule, Context, Tensors
from unskew.protocol.search_space import Space, log_range
from unskew.seeding import fold, uniform

PASSES, SPREAD, MOST = 10, 0.1, 100
"""The first time, passes end if the standard deviation of the last ten losses is below 0.1, or after 100."""
PURPOSE = 5
"""Separates the draws of samples from other draws with a client's key."""


@dataclass(frozen=True)
class FedALA(ClientRule):
    """Learned mixtures of a client's own head and the global one, from which it trains.

    Attributes:
        eta: Learning rate of the weights. With 0, they stay 1, and this is FedAvg.
        share: Share of the client's samples on which the weights are learned, drawn again in every round.
    """

    name: ClassVar[str] = "fedala"
    summary: ClassVar[str] = "clients train from a learned mixture of their own head and the global one"
    paper: ClassVar[str] = "Zhang et al. 2023, arXiv:2212.01197"
    changes_start: ClassVar[bool] = True
    tasks_reason: ClassVar[str] = "it computes the head alone from one feature vector per sample"
    needs = ("vector", "final_training", "whole_updates", "logits_of_head")
    trains_alone: ClassVar[bool] = True
    final_steps: ClassVar[int | None] = 0
    has_personal_model: ClassVar[bool] = True
    # The paper's default and its neighbors.
    spaces: ClassVar[Mapping[str, Space]] = {"eta": log_range(0.1, 10.0)}
    idle_options = (({"eta": 0}, ("share",)),)

    eta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    share: Annotated[float, Field(gt=0, le=1)] = 0.8

    def client_info(self, data: ClientDataView) -> Tensors:
        """Return the stored samples, without a copy."""
        return {"x": data.client.x, "y": data.client.y}

    def begin(self, ctx: Context) -> Tensors:
        """Mix the heads; a client without a model of its own starts from the received one."""
        if PERSONAL not in ctx.state:
            return {}
        spec, received = ctx.spec, ctx.v_global
        own = spec.head_of(ctx.state[PERSONAL])
        towards = spec.head_of(received) - own
        w = self.learn(ctx, own, towards)
        start = scatter_slices(received.clone(), tuple(spec.parts["head"]), own + towards * w)
        return {START: start, SHIFT: start - received, "w": w}

    def learn(self, ctx: Context, own: Tensor, towards: Tensor) -> Tensor:
        """Return the weights of the received head, ``[h]``.

        Args:
            ctx: Context of the client in this round.
            own: The client's own head, ``[h]``.
            towards: The received head minus the own one, ``[h]``.
        """
        y = ctx.client_info["y"]
        w = ctx.state.get("w")
        first = w is None
        w = torch.ones_like(own) if w is None else w
        count = max(1, int(self.share * len(y)))
        drawn = uniform(fold(ctx.key, PURPOSE), (len(y),)).argsort()[:count].to(y.device)
        features, y = features_of(ctx, ctx.v_global, ctx.b_global, drawn), y[drawn].to(own.device)

        def loss(head: Tensor, a: Tensor, targets: Tensor) -> Tensor:
            return ctx.task.loss(ctx.spec.head(head, a), targets)

        slope = grad_and_value(loss)
        losses: list[float] = []
        for _ in range(MOST if first else 1):
            for cut in ctx.training.cuts(count):
                g, value = slope(own + towards * w, features[cut], y[cut])
                w = (w - self.eta * towards * g).clamp(0, 1)
            losses.append(float(value))
            if len(losses) > PASSES and float(torch.tensor(losses[-PASSES:]).std(correction=0)) < SPREAD:
                break
        return w

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """Store the own model and the weights."""
        ctx.state[PERSONAL] = v
        if "w" in carry:
            ctx.state["w"] = carry["w"]
