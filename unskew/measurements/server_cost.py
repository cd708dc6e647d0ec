"""Server cost of a method: floating-point operations per round, and bytes stored between rounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from unskew.measurements.base import Diagnostic
from unskew.simulation.server import Server

aten = torch.ops.aten


def _elementwise(*_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(prod(out_shape))


def _product(*shapes: Any, out_shape: Any = None, **_: Any) -> int:
    """Return the operations of a matrix-vector product."""
    return 2 * int(prod(next(shape for shape in shapes if len(shape) == 2)))


COUNTED = {
    **dict.fromkeys((aten.mv, aten.addmv, aten.addmv_), _product),
    **dict.fromkeys((aten.add, aten.add_, aten.sub, aten.sub_, aten.mul, aten.mul_, aten.div, aten.div_), _elementwise),
}
"""Operations counted in addition to the matrix products and convolutions that PyTorch counts itself."""


class ServerCost(Diagnostic):
    """Counts floating-point operations and memory of the server.

    ``server/gflops``: operations of a round, for aggregating updates and training at the server. ``server/bytes``:
    memory after the round, for the model and the method's state at the server, but not for updates in transit.

    Args:
        server: Server of the run, whose operations are counted from now on.
    """

    of_clients = False

    def __init__(self, server: Server):
        super().__init__(server)
        self.counted = 0
        server.aggregator.meter = self.meter

    def begin(self) -> None:
        """Start a round: count from zero."""
        super().begin()
        self.counted = 0

    @contextmanager
    def meter(self) -> Iterator[None]:
        """Context manager that counts the operations of its block."""
        mode = FlopCounterMode(display=False, custom_mapping=COUNTED)
        with mode:
            yield
        self.counted += mode.get_total_flops()

    def metrics(self) -> dict[str, float]:
        """Return both metrics."""
        storages = {
            t.untyped_storage().data_ptr(): t.numel() * t.element_size() for t in self.server.tensors().values()
        }
        stored = sum(storages.values()) + self.server.clients.cache.bytes
        return {"server/gflops": self.counted / 1e9, "server/bytes": stored}
