"""Fed+FT: FedAvg, followed by training on the server's own data in each round.

A baseline of Zhu et al., "Unlocking the Value of Decentralized Data: A Federated Dual Learning Approach for Model
Aggregation", 2025, arXiv:2503.20138, for a server that owns a few samples of the clients' task::

    omega <- omega + sum_j p_j Delta_j         over the updates that arrived
    omega <- E epochs of training on the server's data from omega

If no update arrives in a round, the model does not change. Normalization buffers are the mean of the clients' buffers and
are then updated on the server's batches. With no epochs this is FedAvg. The paper tries learning rates of 1e-5, 1e-4 and
1e-3, and 1, 10 and 20 epochs; the default is the clients' budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic.dataclasses import dataclass

from unskew.protocol.rules import Tensors, Updates
from unskew.protocol.search_space import Space, one_of
from unskew.protocol.server_budget import TrainsAtServer


@dataclass(frozen=True)
class FedFT(TrainsAtServer):
    """FedAvg and fine-tuning at the server; see ``TrainsAtServer`` for the options."""

    name: ClassVar[str] = "fedft"
    summary: ClassVar[str] = "FedAvg, then training at the server on its own data"
    paper: ClassVar[str] = "Zhu et al. 2025, arXiv:2503.20138"
    # The paper's grids.
    spaces: ClassVar[Mapping[str, Space]] = {"lr": one_of(1e-5, 1e-4, 1e-3), "epochs": one_of(1, 10, 20)}

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """Average the updates, then train on the server data."""
        mean = updates.aggregate
        v, b, loss = updates.at_server.train(state["v"] + mean.delta, mean.buffers, updates.key, **self.budget)
        return {"v": v, "b": b, "loss": torch.tensor(loss)}
