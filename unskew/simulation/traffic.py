"""Traffic in bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from unskew.protocol.messages import Broadcast, Slices, SummedUpdate, Tensors, Update, num_bytes
from unskew.protocol.payload import slices_length
from unskew.protocol.rules import changes_updates
from unskew.simulation.client_records import ClientRecords
from unskew.simulation.parameter_slices import buffer_bytes, subtract_slices
from unskew.simulation.server_state import ServerSetup, ServerState

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


class TrafficMeter:
    """Counts the bytes of every message where it crosses the network.

    Args:
        setup: Fixed parts of the server.
        state: State of the server.
        clients: Records of the clients.

    Attributes:
        total: Bytes sent so far.
    """

    def __init__(self, setup: ServerSetup, state: ServerState, clients: ClientRecords):
        self.setup = setup
        self.state = state
        self.clients = clients
        self.total = Traffic()
        self._sends_model = all(rule.sends_model for rule in setup.method.client)
        self._informed: tuple[int, set[int]] = (-1, set())  # clients that have the model of a round

    def restore(self, total: Traffic) -> None:
        """Continue counting from the bytes of another run, or of this one before an interruption."""
        self.total = total

    def _model_bytes(self, round: int, client: int, down: Slices | None) -> int:
        """Return the bytes of the model for one client: the codes that it has missed, or the whole model if smaller."""
        full_size, last = slice_bytes(down, self.state.v), self.clients.last_rounds.get(client)
        compressor = self.setup.compressor
        if compressor is None or last is None:
            return full_size
        sizes = self.state.rules[compressor.name]["broadcast_bytes"]
        return min(full_size, int(sizes[last + 1 : round + 1].sum()))

    def _buffer_bytes(self, down: Slices | None) -> int:
        """Return the bytes of the buffers for one client."""
        return buffer_bytes(self.setup.spec, down, self.state.b) if self.setup.buffers == "average" else 0

    def count_models(self, round: int, downs: Iterable[tuple[int, Slices | None]]) -> None:
        """Count the model of a round for clients that receive it before they train, once per client.

        Args:
            round: Number of the round, from 0.
            downs: Clients, and the slices that they download; None for all.
        """
        if self._informed[0] != round:
            self._informed = round, set()
        for client, down in downs:
            if client in self._informed[1]:
                continue
            self.total.count(client, "down", self._model_bytes(round, client, down), self._buffer_bytes(down))
            self._informed[1].add(client)

    def count_broadcast(self, broadcast: Broadcast) -> None:
        """Count a broadcast, without the model if the client has received it before."""
        v, client, down = self.state.v, broadcast.client, broadcast.down
        sent, buffers = 0, 0
        if self._informed[0] != broadcast.round or client not in self._informed[1]:
            sent, buffers = self._model_bytes(broadcast.round, client, down), self._buffer_bytes(down)
        sent += extra_bytes(broadcast.download, down, v)
        if changes_updates(self.setup.method.client):  # uploaded differences need the server's values
            sent += slice_bytes(subtract_slices(broadcast.up, down, len(v)), v)
        self.total.count(client, "down", sent, buffers)

    def count_final_model(self, broadcast: Broadcast) -> None:
        """Count a broadcast of the whole final model."""
        sent = slice_bytes(None, self.state.v) + extra_bytes(broadcast.download, None, self.state.v)
        self.total.count(broadcast.client, "down", sent, self._buffer_bytes(None))

    def upload_sizes(
        self, update: Update | SummedUpdate, up: Slices | None, upload: dict[str, Tensors] | None = None
    ) -> tuple[int, int]:
        """Return the bytes of one client's update, without buffers and of buffers.

        Args:
            update: Update of the client, or a sum of updates of the same size.
            up: Slices of the model that the client sends; None for all.
            upload: Extra tensors that the client sends; None for those of the update.
        """
        setup, d = self.setup, update.delta
        buffers = 0 if setup.buffers == "local" else buffer_bytes(setup.spec, up, update.buffers)
        extra = update.upload if upload is None else upload
        if self._is_masked(update):
            uploads = sum(t.numel() for tensors in extra.values() for t in tensors.values())
            numbers = uploads + (slices_length(up, len(d)) if self._sends_model else 0)
            return MASKED_NUMBER * numbers, 0 if setup.buffers == "local" else MASKED_NUMBER * update.buffers.numel()
        if isinstance(update, Update) and update.sent_bytes is not None:
            return update.sent_bytes, buffers
        return (slice_bytes(up, d) if self._sends_model else 0) + extra_bytes(extra, up, d), buffers

    def _is_masked(self, update: Update | SummedUpdate) -> bool:
        return self.setup.federation_info.plan.masked or (isinstance(update, SummedUpdate) and update.masked)

    def count_update(self, update: Update | SummedUpdate, client: int, up: Slices | None) -> None:
        """Count one client's update, see ``upload_sizes``.

        Args:
            update: Update of the client, or a sum of updates of the same size.
            client: Client number.
            up: Slices of the model that the client sends; None for all.
        """
        unusable = client in update.unusable and isinstance(update, SummedUpdate) and update.masked
        report = {} if unusable else update.report
        sent, buffers = self.upload_sizes(update, up, {} if unusable else None)
        self.total.count(client, "up", sent, buffers)
        self.total.reports += num_bytes(report.values())
        averaged = self.setup.buffers == "local" and not self.setup.spec.others
        if averaged or report:  # all other buffers are averaged only for evaluation
            whole = MASKED_NUMBER * update.buffers.numel() if self._is_masked(update) else num_bytes([update.buffers])
            self.total.reports += whole - buffers
