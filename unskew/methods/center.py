"""Center: the server trains on its own data alone, without any client.

What a server could do by itself, a baseline of Zhu et al. 2025 (arXiv:2503.20138). In each round it goes on training for so
many epochs; the optimizer's state is kept over the rounds, so a run is one loop of ``rounds * epochs`` epochs over the
server's data, interrupted by evaluations. Nothing crosses the network. The paper tries 10, 20 and 50 epochs in all and
learning rates of 1e-5, 1e-4 and 1e-3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.rules import Method, Tensors, Updates
from unskew.protocol.search_space import Space, one_of
from unskew.protocol.server_budget import TrainsAtServer


@dataclass(frozen=True)
class Center(TrainsAtServer):
    """Training at the server alone; see ``TrainsAtServer`` for the options."""

    name: ClassVar[str] = "center"
    summary: ClassVar[str] = "the server's data alone, no clients"
    paper: ClassVar[str] = "Zhu et al. 2025, arXiv:2503.20138"
    # The paper's rates; its epochs are those of a whole run, so they are not here.
    spaces: ClassVar[Mapping[str, Space]] = {"lr": one_of(1e-5, 1e-4, 1e-3)}
    steps_without = "clients"

    def conflict_with(self, method: Method) -> str | None:
        """Reject rules that act only at clients."""
        others = [part.name for part in (*method.data, *method.client, method.sync) if part is not None]
        if not others:
            return None
        return f"center trains without clients, so {others[0]}, which acts at clients, would do nothing; leave one out."

    def init(self, v: Tensor, facts: FederationInfo) -> Tensors:
        """The optimizer's moments are there after the first round."""
        return {**super().init(v, facts), "moments": v.new_zeros(0, len(v))}

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """Go on training."""
        moments = list(state["moments"])
        v, b, loss = updates.at_server.train(state["v"], updates.b_global, updates.key, moments=moments, **self.budget)
        kept_moments = torch.stack(moments) if moments else state["moments"]
        return {"v": v, "b": b, "loss": torch.tensor(loss), "moments": kept_moments}
