"""CA2FL: a buffer of updates, calibrated by the last update of every client.

Wang, Cao, Wu, Chen, Chen, "Tackling the Data Heterogeneity in Asynchronous Federated Learning with Cached Update
Calibration", ICLR 2024. The server keeps for each of the ``J`` clients its last update ``h_j`` (0 until it has sent one) and
their mean ``h``. Each arrival adds ``Delta_j - h_j`` to a buffer and then replaces ``h_j`` by ``Delta_j``. With ``b`` of them
in the buffer::

    omega <- omega + eta [h + (1/b) sum_{j in buffer} (Delta_j - h_j)],    h <- (1/J) sum_j h_j

and the buffer is emptied; ``h`` is the mean from before the buffer. What the buffer holds is by how much the sum of all
``h_j`` has grown, so the new mean is ``h + buffer / J``. A client that arrives twice in one buffer is calibrated by its own
first update. With empty caches the first step is FedBuff's. Every client counts the same, whatever its size. Normalisation
statistics are not calibrated: as with FedBuff they move with the model, by the mean change of the buffer's clients.

The cache is one vector of the model's size per client that ever sent an update. It is kept where clients' states are: in
memory up to a limit, the rest in files of the run folder.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.data.federation import Federation
from unskew.protocol.rules import Method, ServerRule, Tensors, Updates, Weights


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
    needs: ClassVar[Literal["sum", "individual"]] = "individual"
    weights: ClassVar[Weights | None] = "uniform"
    caches: ClassVar[bool] = True
    remembers_statistics: ClassVar[bool] = True

    buffer_size: Annotated[int, Field(ge=1)] = 10
    eta: Annotated[float, Field(gt=0)] = 1.0

    def refuses(self, whole: Method) -> str | None:
        """Updates of which a part stays at the client."""
        if whole.sync is None:
            return None
        return f"ca2fl compares whole updates of a client; with {whole.sync.name} a part of the model stays at clients."

    def init(self, v: Tensor, federation: Federation) -> Tensors:
        """An empty buffer, and no cached update of ``clients``."""
        zero = torch.zeros((), dtype=torch.int64)
        clients = torch.tensor(len(federation.clients))
        empty = {"h": torch.zeros_like(v), "sum": torch.zeros_like(v), "count": zero, "cached": zero.clone()}
        return {"v": v, **empty, "moved": v.new_zeros(0), "clients": clients}

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """Each arrival in turn; a full buffer moves the model."""
        v, h, total, moved, clients = (state[name] for name in ("v", "h", "sum", "moved", "clients"))
        b = updates.b_global
        count, cached = int(state["count"]), int(state["cached"])
        total = total.clone()
        for update in updates:
            last = updates.cached(update.client)
            total += update.delta if last is None else update.delta - last
            count, cached = count + 1, cached + (last is None)
            if update.b_start is not None:
                moved = update.buffers - update.b_start + (moved if len(moved) else 0)
            if count == self.buffer_size:
                v = v + self.eta * (h + total / count)
                h = h + total / int(clients)
                b = b + moved / count if b is not None and len(moved) else b
                total, moved, count = torch.zeros_like(total), moved[:0], 0
        counts = {"count": torch.tensor(count), "cached": torch.tensor(cached)}
        after = {"v": v, "h": h, "sum": total, "moved": moved, "clients": clients, **counts}
        return after if b is None or updates.aggregate.moved is None else {**after, "b": b}

    def metrics(self, state: Tensors) -> dict[str, float]:
        """How full the buffer is after the round, and how large the cache."""
        size = int(state["cached"]) * state["v"].numel() * state["v"].element_size()
        return {"ca2fl_waiting": float(state["count"]), "ca2fl_cache_bytes": float(size)}
