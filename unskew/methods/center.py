"""Center: the server trains on its own data alone, without any client.

This is a baseline of Zhu et al. 2025 (arXiv:2503.20138). In each round the server trains for ``epochs`` epochs. The
optimizer state is kept between rounds, so a run is one loop of ``rounds * epochs`` epochs over the server's data with
evaluations in between. Nothing is communicated. The paper tries 10, 20 and 50 epochs in total and learning rates of 1e-5,
1e-4 and 1e-3.
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
    """Training on server data only; see ``TrainsAtServer`` for the options."""

    name: ClassVar[str] = "center"
    summary: ClassVar[str] = "the server's data alone, no clients"
    paper: ClassVar[str] = "Zhu et al. 2025, arXiv:2503.20138"
    averaging = "none"
    # The paper's learning rates. Its epochs are those of a whole run and are not comparable.
    spaces: ClassVar[Mapping[str, Space]] = {"lr": one_of(1e-5, 1e-4, 1e-3)}
    steps_without = "clients"

    def conflict_with(self, method: Method) -> str | None:
        """Reject rules that act at clients."""
        others = [part.name for part in (*method.data, *method.client, method.sync) if part is not None]
        if not others:
            return None
        return (
            f"center trains without clients, so {others[0]}, which acts at clients, has no effect. Remove one of them."
        )

    def init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Initialize the optimizer's moments as empty; they exist after the first round."""
        return {**super().init(v, federation_info), "moments": v.new_zeros(0, len(v))}

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """Continue training on the server data."""
        moments = list(state["moments"])
        v, b, loss = updates.at_server.train(state["v"], updates.b_global, updates.key, moments=moments, **self.budget)
        kept_moments = torch.stack(moments) if moments else state["moments"]
        return {"v": v, "b": b, "loss": torch.tensor(loss), "moments": kept_moments}
