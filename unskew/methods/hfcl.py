"""HFCL: the server trains on its own data as if it were one more client.

Elbir, Coleri, Mishra, "Hybrid Federated and Centralized Learning", 2020, arXiv:2011.06892, as Zhu et al. 2025
(arXiv:2503.20138) compare with it: in a round with arrivals the server trains from the model of today, with the clients'
budget, and its change ``Delta_S`` joins the average with the number ``n_S`` of its samples::

    omega <- omega + (sum_j n_j Delta_j + n_S Delta_S) / (sum_j n_j + n_S)

Normalization statistics are averaged with the same weights. With uniform weights the server counts as one client. A round in
which nothing arrives leaves the model as it is. In the original, clients that cannot train send their data to the server;
here the server's data are given. With ``n_s=0`` this is FedAvg.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from unskew.protocol.rules import Tensors, Updates
from unskew.protocol.server_budget import TrainsAtServer


@dataclass(frozen=True)
class HFCL(TrainsAtServer):
    """Hybrid federated and centralised learning; see ``TrainsAtServer`` for the budget.

    Attributes:
        n_s: The server's weight beside the clients'; None: the number of its samples, or 1 if clients count uniformly.
    """

    name: ClassVar[str] = "hfcl"
    summary: ClassVar[str] = "the server trains as one more client"
    paper: ClassVar[str] = "Elbir et al. 2020, arXiv:2011.06892"

    n_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """Train from the model of today, and join the average."""
        at, mean, v = updates.at_server, updates.aggregate, state["v"]
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
