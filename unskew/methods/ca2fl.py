"""CA2FL: buffered updates, calibrated by the last update of every client.

Wang, Cao, Wu, Chen, Chen, "Tackling the Data Heterogeneity in Asynchronous Federated Learning with Cached Update
Calibration", ICLR 2024. The server stores the last update ``h_j`` of each of the ``J`` clients (0 until it has sent one) and
their mean ``h``. Each arriving update adds ``Delta_j - h_j`` to a buffer and then replaces ``h_j`` by ``Delta_j``. When the
buffer contains ``b`` updates::

    omega <- omega + eta [h + (1/b) sum_{j in buffer} (Delta_j - h_j)],    h <- (1/J) sum_j h_j

Then the buffer is emptied. In the first formula, ``h`` is the mean before the buffer. The sum in the buffer equals the
growth of the sum of all ``h_j``, so the new mean is ``h + buffer / J``. If a client's update arrives twice in one buffer, the
second one is calibrated by the first. With empty caches the first step equals FedBuff's.

Clients have uniform weights, as in the paper. With ``client_weighting=samples`` both means are weighted,
``h = sum_j p_j h_j`` over all clients, and the buffer's mean over its own weights. If all ``h_j`` are the updates at
``omega``, each buffer then moves the model by ``sum_j p_j h_j``, for any clients in the buffer. Normalization buffers are not
calibrated: as with FedBuff, they change by the mean change of the clients in the update buffer.

The cache contains one vector of the model's size per client that has sent an update. Like client state, it is kept in memory
up to a limit, and beyond that in files of the run folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.rules import ServerRule, Tensors, Updates, Weights
from unskew.protocol.search_space import Space, log_range, one_of


@dataclass(frozen=True)
class CA2FL(ServerRule):
    """Cache-aided asynchronous federated learning.

    Attributes:
        needs: Requirements of the rule, see ``unskew.protocol.requirements``.
        weights: Client weighting with ``client_weighting=auto``; None if the method does not choose one.
        buffer_size: Updates per server step, ``b``.
        eta: Server learning rate.
    """

    name: ClassVar[str] = "ca2fl"
    summary: ClassVar[str] = "a buffer of updates, calibrated by each client's last one"
    paper: ClassVar[str] = "Wang et al. 2024, ICLR"
    # The grids of Zhu et al. 2025 (arXiv:2503.20138).
    spaces: ClassVar[Mapping[str, Space]] = {"eta": log_range(0.01, 1.0), "buffer_size": one_of(10, 20, 50)}
    needs = ("individual", "last_update", "sent_statistics", "whole_updates")
    weights: ClassVar[Weights | None] = "uniform"

    buffer_size: Annotated[int, Field(ge=1)] = 10
    eta: Annotated[float, Field(gt=0)] = 1.0

    @property
    def updates_per_step(self) -> int:  # type: ignore[override]
        """Number of updates that the server collects before each step."""
        return self.buffer_size

    def init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Initialize the mean ``h`` to zero."""
        total = torch.tensor(federation_info.total_weight(), dtype=torch.float64)
        return {"v": v, "h": torch.zeros_like(v), "total": total}

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """Update the model and its buffers from a full buffer of updates."""
        v = state["v"]
        h = state["h"]
        grown = torch.zeros_like(state["v"])
        moved = None
        for update in updates:
            grown += update.weight * (update.delta if update.last is None else update.delta - update.last)
            if update.b_start is not None:
                change = update.weight * (update.buffers - update.b_start)
                moved = change if moved is None else change + moved
        weight = updates.aggregate.weight
        after = {**state, "v": v + self.eta * (h + grown / weight), "h": h + grown / float(state["total"])}
        return after if moved is None else {**after, "b": updates.b_global + moved / weight}
