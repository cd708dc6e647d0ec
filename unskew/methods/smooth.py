"""Momentum of updates at the clients, which makes small deviations of attackers detectable.

Karimireddy, He, Jaggi, "Learning from History for Byzantine Robust Optimization", 2021, arXiv:2012.10333, Algorithm 2. Client
``k`` sends ``m_k`` instead of its update ``u_k``; initially ``m_k = 0``::

    m_k <- beta m_k + (1 - beta) u_k       form=mean, the paper's
    m_k <- beta m_k + u_k                  form=heavy, with steps that are up to 1 / (1 - beta) times as long

Updates of honest clients then vary less from round to round, so a robust rule such as ``cclip`` recognizes attackers better.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.protocol.rules import ClientRule, Context, Tensors
from unskew.protocol.search_space import Space, one_of


@dataclass(frozen=True)
class Smooth(ClientRule):
    """Momentum of the client's updates.

    Attributes:
        beta: Weight of the earlier updates.
        form: ``heavy`` gives the new update the weight 1, so steps become up to ``1/(1 − beta)`` times as long.
    """

    name: ClassVar[str] = "smooth"
    summary: ClassVar[str] = "clients send the momentum of their updates, against hidden attacks"
    paper: ClassVar[str] = "Karimireddy et al. 2021, arXiv:2012.10333"
    sends_model_changes: ClassVar[bool] = False
    spaces: ClassVar[Mapping[str, Space]] = {"beta": one_of(0.5, 0.9, 0.99)}

    beta: Annotated[float, Field(ge=0, lt=1)] = 0.9
    form: Literal["mean", "heavy"] = "mean"

    def transform_update(self, ctx: Context, carry: Tensors, delta: Tensor) -> Tensor:
        """Update the momentum and send it."""
        before = ctx.state.get("momentum", torch.zeros_like(delta))
        after = self.beta * before + (delta if self.form == "heavy" else (1 - self.beta) * delta)
        if ctx.sent is not None:
            after = torch.where(ctx.sent, after, before)
        ctx.state["momentum"] = after
        return after if ctx.sent is None else torch.where(ctx.sent, after, torch.zeros_like(delta))
