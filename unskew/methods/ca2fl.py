"""CA2FL: a buffer of updates, calibrated by the last update of every client.

Wang, Cao, Wu, Chen, Chen, "Tackling the Data Heterogeneity in Asynchronous Federated Learning with Cached Update
Calibration", ICLR 2024. The server keeps for each of the ``J`` clients its last update ``h_j`` (0 until it has sent one) and
their mean ``h``. Each arrival adds ``Delta_j - h_j`` to a buffer and then replaces ``h_j`` by ``Delta_j``. With ``b`` of them
in the buffer::

    omega <- omega + eta [h + (1/b) sum_{j in buffer} (Delta_j - h_j)],    h <- (1/J) sum_j h_j

and the buffer is emptied; ``h`` is the mean from before the buffer. What the buffer holds is by how much the sum of all
``h_j`` has grown, so the new mean is ``h + buffer / J``. A client that arrives twice in one buffer is calibrated by its own
first update. With empty caches the first step is FedBuff's. Clients count the same, as in the paper; with
``weights="samples"`` both means are weighted alike, ``h = sum_j p_j h_j`` over all clients and the buffer's over its own
weights. Where all ``h_j`` are the updates at ``omega``, each buffer then moves it by ``sum_j p_j h_j``, whoever is in it.
Normalization statistics are not calibrated: as with FedBuff they move with the model, by the mean change of the buffer's
clients.

The cache is one vector of the model's size per client that ever sent an update. It is kept where clients' states are: in
memory up to a limit, the rest in files of the run folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.rules import Method, ServerRule, Tensors, Updates, Weights
from unskew.protocol.search_space import Space, log_range, one_of


@dataclass(frozen=True)
class CA2FL(ServerRule):
    """Cache-aided asynchronous federated learning.

    Attributes:
        buffer_size: Updates per step of the server, ``b``.
        eta: The server's step.
    """

    name: ClassVar[str] = "ca2fl"
    summary: ClassVar[str] = "a buffer of updates, calibrated by each client's last one"
    paper: ClassVar[str] = "Wang et al. 2024, ICLR"
    # The grids of Zhu et al. 2025 (arXiv:2503.20138).
    spaces: ClassVar[Mapping[str, Space]] = {"eta": log_range(0.01, 1.0), "buffer_size": one_of(10, 20, 50)}
    needs = ("individual", "last_update", "sent_statistics")
    weights: ClassVar[Weights | None] = "uniform"

    buffer_size: Annotated[int, Field(ge=1)] = 10
    eta: Annotated[float, Field(gt=0)] = 1.0

    def conflict_with(self, method: Method) -> str | None:
        """Updates of which a part stays at the client."""
        if method.sync is None:
            return None
        return (
            f"ca2fl compares whole updates of a client; with {method.sync.name} a part of the model stays at clients."
        )

    def buffer(self) -> int:
        """The core collects them."""
        return self.buffer_size

    def init(self, v: Tensor, facts: FederationInfo) -> Tensors:
        """No client has sent an update."""
        return {"v": v, "h": torch.zeros_like(v), "total": torch.tensor(facts.total_weight(), dtype=torch.float64)}

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """A full buffer moves the model, and statistics with it."""
        v, h, grown, moved = state["v"], state["h"], torch.zeros_like(state["v"]), None
        for update in updates:
            grown += update.weight * (update.delta if update.last is None else update.delta - update.last)
            if update.b_start is not None:
                change = update.weight * (update.buffers - update.b_start)
                moved = change if moved is None else change + moved
        weight = updates.aggregate.weight
        after = {**state, "v": v + self.eta * (h + grown / weight), "h": h + grown / float(state["total"])}
        return after if moved is None else {**after, "b": updates.b_global + moved / weight}
