"""Data of the clients, stored in one array or in the arrays that were passed in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from unskew.data.spec import DataSpec

RECENT = 16 << 20
"""Bytes of inputs that are kept of the clients drawn last."""

Rows = Callable[[int, int, int], Tensor]
"""From a client and a range of its samples, in its own order, to their inputs."""


@dataclass(frozen=True)
class ClientData:
    """Data of one client: ``x [n, ...]`` and ``y [n]`` for training, and held-out ``x_test, y_test``.

    With several labels a sample, ``y`` is ``[n, L]`` of 0 and 1.
    """

    id: int
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    @property
    def examples(self) -> int:
        """Number of training samples."""
        return len(self.y)

    def __repr__(self) -> str:
        return f"ClientData(id={self.id}, samples={self.examples}, held_out={len(self.y_test)})"


class ArrayClients(Sequence[ClientData]):
    """Clients as slices of shared arrays: ``k`` trains on ``offsets[k]:splits[k]``, holds out up to ``offsets[k+1]``."""

    mapped = False

    def __init__(self, x: Tensor, y: Tensor, offsets: np.ndarray, splits: np.ndarray):
        self.x, self.y, self.offsets, self.splits = x, y, offsets, splits

    def __len__(self) -> int:
        return len(self.splits)

    def __getitem__(self, k: int) -> ClientData:  # type: ignore[override]
        start, split, stop = self.bounds(k)
        x, y = self.x, self.y
        return ClientData(k, x[start:split], y[start:split], x[split:stop], y[split:stop])

    def __iter__(self) -> Iterator[ClientData]:
        return (self[k] for k in range(len(self)))

    def bounds(self, k: int) -> tuple[int, int, int]:
        """Return the first index of client ``k``, of its held-out samples, and the end index."""
        if not 0 <= k < len(self):
            raise IndexError(f"There is no client {k}; this federation has {len(self)}.")
        return int(self.offsets[k]), int(self.splits[k]), int(self.offsets[k + 1])

    def inputs(self) -> Iterator[Tensor]:
        """The inputs of all clients in order, in as many pieces as it takes to copy none of them for long."""
        yield self.x

    def to(self, device: torch.device) -> ArrayClients:
        """The same clients with one array on ``device``."""
        return ArrayClients(self.x.to(device), self.y.to(device), self.offsets, self.splits)


class DrawnClients(ArrayClients):
    """Clients whose inputs stay where they are; those of a client are brought together when they are asked for.

    Args:
        rows: Finds inputs.
        like: One sample of the inputs, ``[1, ...]``, in their type.
        y: Targets of all clients, in order.
        offsets, splits: As of ``ArrayClients``.
        mapped: Whether the inputs lie in files, so that all of them at once may not fit into memory.

    Attributes:
        source: What they were loaded from, with the seed, if it was named: another machine that sees it has them, too.
    """

    source: tuple[DataSpec, int] | None = None

    def __init__(
        self, rows: Rows, like: Tensor, y: Tensor, offsets: np.ndarray, splits: np.ndarray, mapped: bool = False
    ):
        self.rows, self.like, self.mapped = rows, like, mapped
        self.y, self.offsets, self.splits = y, offsets, splits
        self._recent: dict[int, ClientData] = {}
        self._bytes = 0

    @property
    def x(self) -> Tensor:  # type: ignore[override]
        """All inputs in one new array; where they are many, better take them client by client."""
        return self.gathered(torch.device("cpu"))

    def gathered(self, device: torch.device) -> Tensor:
        """All inputs in one new array on a device, filled client by client."""
        x = allocate_inputs(len(self.y), self.like, device)
        for k, part in enumerate(self.inputs()):
            x[int(self.offsets[k]) : int(self.offsets[k + 1])] = part.to(device)
        return x

    def __getitem__(self, k: int) -> ClientData:  # type: ignore[override]
        client = self._recent.pop(k, None)
        if client is None:
            start, split, stop = self.bounds(k)
            client = _LazyClient(k, self.y[start:split], self.y[split:stop], self.rows)
            self._bytes += self._size(k)
        self._recent[k] = client  # the last one by now
        while self._bytes > RECENT and len(self._recent) > 1:
            oldest = next(iter(self._recent))
            del self._recent[oldest]
            self._bytes -= self._size(oldest)
        return client

    def _size(self, k: int) -> int:
        return int(self.offsets[k + 1] - self.offsets[k]) * self.like.numel() * self.like.element_size()

    def inputs(self) -> Iterator[Tensor]:
        """Return the inputs, one array per client."""
        return (self.rows(k, 0, int(self.offsets[k + 1] - self.offsets[k])) for k in range(len(self)))

    def to(self, device: torch.device) -> ArrayClients:
        """Move to a device. Inputs in files stay there, and their batches are moved one by one."""
        if self.mapped:
            return self
        return ArrayClients(self.gathered(device), self.y.to(device), self.offsets, self.splits)


class _LazyClient(ClientData):
    """A client whose inputs are brought together when somebody looks at them; those to train on are then kept."""

    def __init__(
        self,
        id: int,
        y: Tensor,
        y_test: Tensor,
        rows: Rows | None = None,
        x_test: Tensor | None = None,
        **train: Tensor,
    ):
        # The class is frozen; with inputs it is called by dataclasses.replace.
        self.__dict__.update(id=id, y=y, y_test=y_test, rows=rows, held_out=x_test, **train)

    @cached_property
    def x(self) -> Tensor:
        return self._rows(0, len(self.y))

    @property
    def x_test(self) -> Tensor:
        held_out_part: Tensor | None = self.__dict__["held_out"]
        return self._rows(len(self.y), len(self.y) + len(self.y_test)) if held_out_part is None else held_out_part

    def _rows(self, start: int, stop: int) -> Tensor:
        rows: Rows = self.__dict__["rows"]
        return rows(self.id, start, stop)


def joined_clients(clients: Sequence[ClientData]) -> ArrayClients:
    """Clients, in order, with all their samples in one array."""
    trained = np.array([client.examples for client in clients])
    offsets = np.concatenate([[0], np.cumsum(trained + [len(client.y_test) for client in clients])])
    xs, ys = [t for c in clients for t in (c.x, c.x_test)], [t for c in clients for t in (c.y, c.y_test)]
    return ArrayClients(concatenate_inputs(xs), torch.cat(ys), offsets, offsets[:-1] + trained)


def concatenate_inputs(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate inputs; images keep their channels-last memory."""
    if parts[0].dim() != 4:
        return torch.cat(list(parts))
    return torch.cat([p.permute(0, 2, 3, 1) for p in parts]).permute(0, 3, 1, 2)


def allocate_inputs(n: int, like: Tensor, device: torch.device | None = None) -> Tensor:
    """Room for ``n`` inputs like those of ``like``; images over channels-last memory.

    Args:
        n: Number of samples.
        like: Samples whose shape and data type are used.
        device: Device of the result; None: that of ``like``.
    """
    if like.dim() != 4:
        return torch.empty((n, *like.shape[1:]), dtype=like.dtype, device=device)
    channels, height, width = like.shape[1:]
    return torch.empty((n, height, width, channels), dtype=like.dtype, device=device).permute(0, 3, 1, 2)


def iterate_batches(parts: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """Samples of ``parts``, one after another, in batches of ``size``; the last one may be smaller.

    Args:
        parts: Samples in any number of tensors.
        size: Samples per batch.

    >>> [len(batch) for batch in iterate_batches([torch.zeros(3, 2), torch.zeros(4, 2)], 5)]
    [5, 2]
    """
    waiting: list[Tensor] = []
    missing = size
    for part in parts:
        while len(part) >= missing:
            waiting.append(part[:missing])
            yield waiting[0] if len(waiting) == 1 else concatenate_inputs(waiting)
            part, waiting, missing = part[missing:], [], size
        if len(part):
            waiting.append(part)
            missing -= len(part)
    if waiting:
        yield waiting[0] if len(waiting) == 1 else concatenate_inputs(waiting)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]``; images ``[n, C, H, W]`` keep their channels-last memory, which convolutions on CPU prefer.

    Args:
        x: Samples, ``[n, ...]``.
        index: Rows to take, ``[B]``.
    """
    if x.dim() != 4:
        return x.index_select(0, index)
    return x.permute(0, 2, 3, 1).index_select(0, index).permute(0, 3, 1, 2)
