"""FedBuff: the server moves whenever so many updates are in, however old they are.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba, "Federated Learning with Buffered Asynchronous Aggregation", 2021,
arXiv:2106.06639, Algorithm 1 without its optional weights by staleness. Updates are added as they arrive; with ``b`` of them
in the buffer::

    omega <- omega + (eta / b) sum_{m in buffer} Delta_m,    and the buffer is emptied

``Delta_m`` is the client's model minus the one it was sent, which may be an older one. A buffer that fills up in the middle
of a round's arrivals is emptied there; what arrives after that fills the next. The server needs only each buffer's sum.
Normalisation statistics wait as the model does: they move by the mean change of the buffer's clients.
Without delays and with a buffer of the whole cohort this is FedAvg with uniform weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.data.federation import Federation
from unskew.protocol.rules import ServerRule, Tensors, Updates, Weights


@dataclass(frozen=True)
class FedBuff(ServerRule):
    """Buffered asynchronous aggregation.

    Attributes:
        buffer_size: Updates per step of the server, ``b``.
        eta: The server's step.
    """

    name: ClassVar[str] = "fedbuff"
    summary: ClassVar[str] = "moves whenever a buffer of updates is full"
    paper: ClassVar[str] = "Nguyen et al. 2021, arXiv:2106.06639"
    weights: ClassVar[Weights | None] = "uniform"
    remembers_statistics: ClassVar[bool] = True

    buffer_size: Annotated[int, Field(ge=1)] = 10
    eta: Annotated[float, Field(gt=0)] = 1.0

    def init(self, v: Tensor, federation: Federation) -> Tensors:
        """An empty buffer."""
        zero = torch.zeros((), dtype=torch.float64)
        return {"v": v, "sum": torch.zeros_like(v), "moved": v.new_zeros(0), "weight": zero, "count": zero.clone()}

    def portions(self, state: Tensors) -> Iterator[int]:
        """What the buffer still lacks, then whole buffers."""
        yield self.buffer_size - int(state["count"])
        while True:
            yield self.buffer_size

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """Add portion by portion; a full buffer moves the model."""
        v, total, moved, weight, count = (state[name] for name in ("v", "sum", "moved", "weight", "count"))
        b = updates.b_global
        for part in updates.portions:
            if part.moved is not None:
                moved = part.moved * part.weight + (moved if len(moved) else 0)
            total, weight, count = total + part.delta * part.weight, weight + part.weight, count + part.count
            if int(count) == self.buffer_size:
                v = v + self.eta * total / float(weight)
                b = b + moved / float(weight) if b is not None and len(moved) else b
                total, moved = torch.zeros_like(total), moved[:0]
                weight, count = torch.zeros_like(weight), torch.zeros_like(count)
        after = {"v": v, "sum": total, "moved": moved, "weight": weight, "count": count}
        return after if b is None or updates.aggregate.moved is None else {**after, "b": b}

    def metrics(self, state: Tensors) -> dict[str, float]:
        """How full the buffer is after the round."""
        return {"fedbuff_waiting": float(state["count"])}
