"""Traffic in bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from unskew.protocol.messages import Slices, Tensors, num_bytes

MASKED_NUMBER = 8
"""Bytes of a number in a masked update, a 64-bit integer."""


@dataclass
class Traffic:
    """Bytes sent over the network.

    Attributes:
        up: Bytes of parameters and of the rules' extra tensors to the server.
        down: Bytes of parameters and of the rules' extra tensors to the clients.
        buffers_up: Bytes of normalization buffers to the server.
        buffers_down: Bytes of normalization buffers to the clients.
        reports: Bytes of models sent for measurements, which are not part of the method's traffic.
        clients: Bytes up and down by client, without reports.
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
            client: Client number.
            direction: ``up`` to the server or ``down`` to the client.
            tensors: Bytes of parameters and extra tensors.
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
    """Return the size in bytes of the exchanged slices of a vector.

    Args:
        slices: Slices that are sent; None for all.
        v: Vector, ``[d]``.
    """
    size = len(v) if slices is None else sum(len(range(*s.indices(len(v)))) for s in slices)
    return size * v.element_size()


def extra_bytes(tensors: dict[str, Tensors], slices: Slices | None, v: Tensor) -> int:
    """Return the size in bytes of the rules' extra tensors; of tensors like the model, only exchanged slices are sent.

    Args:
        tensors: Tensors by rule and name.
        slices: Slices of the parameters that are sent; None for all.
        v: Parameters, ``[d]``.
    """
    return sum(
        slice_bytes(slices, t) if t.shape == v.shape else num_bytes([t])
        for rule in tensors.values()
        for t in rule.values()
    )
