"""FedBuff: the server takes a step whenever its buffer of updates is full, whatever their age.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba, "Federated Learning with Buffered Asynchronous Aggregation", 2021,
arXiv:2106.06639, Algorithm 1 without its optional weights by staleness. Updates are added as they arrive. When the buffer
contains ``b`` updates::

    omega <- omega + (eta / b) sum_{m in buffer} Delta_m,    and the buffer is emptied

``Delta_m`` is the client's model minus the model that it received, which may be an older one. If the buffer fills up in the
middle of a round's arrivals, it is emptied there, and later arrivals fill the next one. The server needs only the sum of
each buffer. Normalization buffers are updated at the same time as the model, by the mean change of the clients in the
update buffer. Without delays and with a buffer of the cohort's size, this is FedAvg with uniform weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from unskew.protocol.rules import ServerRule, Tensors, Updates, Weights
from unskew.protocol.search_space import Space, log_range, one_of


@dataclass(frozen=True)
class FedBuff(ServerRule):
    """Buffered asynchronous aggregation.

    Attributes:
        weights: Client weighting with ``client_weighting=auto``; None if the method does not choose one.
        needs: Requirements of the rule, see ``unskew.protocol.requirements``.
        buffer_size: Updates per server step, ``b``.
        eta: Server learning rate.
    """

    name: ClassVar[str] = "fedbuff"
    summary: ClassVar[str] = "updates the model when a buffer of updates is full"
    paper: ClassVar[str] = "Nguyen et al. 2021, arXiv:2106.06639"
    # The grids of Zhu et al. 2025 (arXiv:2503.20138).
    spaces: ClassVar[Mapping[str, Space]] = {"eta": log_range(0.01, 1.0), "buffer_size": one_of(10, 20, 50)}
    weights: ClassVar[Weights | None] = "uniform"
    needs = ("sent_statistics",)

    buffer_size: Annotated[int, Field(ge=1)] = 10
    eta: Annotated[float, Field(gt=0)] = 1.0

    @property
    def updates_per_step(self) -> int:  # type: ignore[override]
        """Number of updates that the server collects before each step."""
        return self.buffer_size

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """Update the model and its buffers from a full buffer of updates."""
        mean = updates.aggregate
        v = state["v"] + self.eta * mean.delta
        return {"v": v} if mean.buffer_change is None else {"v": v, "b": updates.b_global + mean.buffer_change}
