"""HFCL: the server trains on its own data as if it were an additional client.

Elbir, Coleri, Mishra, "Hybrid Federated and Centralized Learning", 2020, arXiv:2011.06892, as in the comparison of Zhu et al.
2025 (arXiv:2503.20138): in each round in which updates arrive, the server trains from the current model with the clients'
budget. Its update ``Delta_S`` is averaged with the clients' updates, weighted by its number ``n_S`` of samples::

    omega <- omega + (sum_j n_j Delta_j + n_S Delta_S) / (sum_j n_j + n_S)

Normalization buffers are averaged with the same weights. With uniform weights the server counts as one client. If no update
arrives in a round, the model does not change. In the original, clients that cannot train send their data to the server; here
the server has its own data. With ``n_s=0`` this is FedAvg.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from unskew.protocol.rule import IdleOptions
from unskew.protocol.rules import Tensors, Updates
from unskew.protocol.server_budget import TrainsAtServer


@dataclass(frozen=True)
class HFCL(TrainsAtServer):
    """Hybrid federated and centralized learning; see ``TrainsAtServer`` for the budget.

    Attributes:
        n_s: The server's weight; by default its number of samples, or 1 with uniform weights. 0 is FedAvg.
    """

    name: ClassVar[str] = "hfcl"
    summary: ClassVar[str] = "the server trains as one more client"
    paper: ClassVar[str] = "Elbir et al. 2020, arXiv:2011.06892"
    idle_options: ClassVar[IdleOptions] = (
        *TrainsAtServer.idle_options,
        ({"n_s": 0}, ("epochs", "steps", "lr", "batch", "optimizer")),
    )

    n_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """Train from the current model, and average the server's update with those of the clients."""
        at = updates.at_server
        mean = updates.aggregate
        v = state["v"]
        assert at.data is not None
        n_s = self.n_s
        if n_s is None:
            n_s = 1.0 if at.weights == "uniform" else float(len(at.data.y))
        share = n_s / (mean.weight + n_s)
        if not share:
            return {"v": v + mean.delta, "loss": state["loss"]}
        server_v, b, loss = at.train(v, updates.b_global, updates.key, **self.budget)
        return {
            "v": v + (1 - share) * mean.delta + share * (server_v - v),
            "b": (1 - share) * mean.buffers + share * b,
            "loss": torch.tensor(loss),
        }
