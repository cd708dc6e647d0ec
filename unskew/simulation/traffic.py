"""Traffic in bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from unskew.protocol.messages import Slices, Tensors, num_bytes


@dataclass
class Traffic:
    """Bytes that crossed the network.

    Attributes:
        up, down: Parameters with the rules' extras.
        buffers_up, buffers_down: Normalization statistics.
        reports: Models that were sent to be measured; they are no part of a method.
        clients: All but reports, up and down, by client.
    """

    up: int = 0
    down: int = 0
    buffers_up: int = 0
    buffers_down: int = 0
    reports: int = 0
    clients: dict[int, list[int]] = field(default_factory=dict)

    def count(self, client: int, direction: Literal["up", "down"], tensors: int, buffers: int) -> None:
        """Add one transfer.

        Args:
            client: Number of the client.
            direction: ``up`` to the server or ``down`` to the client.
            tensors: Bytes of parameters and further tensors.
            buffers: Bytes of buffers.
        """
        both = self.clients.setdefault(client, [0, 0])
        if direction == "up":
            self.up += tensors
            self.buffers_up += buffers
            both[0] += tensors + buffers
        else:
            self.down += tensors
            self.buffers_down += buffers
            both[1] += tensors + buffers


def slice_bytes(slices: Slices | None, v: Tensor) -> int:
    """Bytes of the slices of a vector that travel.

    Args:
        slices: Slices that are sent; None: all.
        v: Vector that is sent in part, ``[d]``.
    """
    size = len(v) if slices is None else sum(len(range(*s.indices(len(v)))) for s in slices)
    return size * v.element_size()


def extra_bytes(tensors: dict[str, Tensors], slices: Slices | None, v: Tensor) -> int:
    """Bytes of what the rules send beside the model; of a tensor over all parameters, only the slices that travel.

    Args:
        tensors: Tensors by rule and name.
        slices: Slices of the parameters that are sent; None: all.
        v: Parameters, ``[d]``.
    """
    return sum(
        slice_bytes(slices, t) if t.shape == v.shape else num_bytes([t])
        for rule in tensors.values()
        for t in rule.values()
    )
