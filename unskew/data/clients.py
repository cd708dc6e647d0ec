"""Client data, stored in one shared array or in the arrays that were passed in."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from unskew.data.shared_copies import shared_copy
from unskew.data.spec import DataSpec

RECENT = 16 << 20
"""Size of the cache for inputs of recently drawn clients, in bytes."""

TOGETHER = 1 << 20
"""Size up to which the inputs of consecutive clients are gathered at once, in bytes."""


class Rows(Protocol):
    """Inputs of all clients, which are gathered when they are requested."""

    def __call__(self, k: int, start: int, stop: int) -> Tensor:
        """Return the inputs ``start:stop`` of client ``k``.

        Args:
            k: Client index.
            start: First sample of the client to return.
            stop: End of the range, exclusive.
        """

    def several(self, first: int, last: int) -> Tensor:
        """Return all inputs of the clients ``first:last``, client by client.

        Args:
            first: First client.
            last: End of the range, exclusive.
        """


@dataclass(frozen=True)
class ClientData:
    """Data of one client: ``x [n, ...]`` and ``y [n]`` for training, and held-out ``x_test, y_test``.

    For multi-label tasks, ``y`` is ``[n, L]`` with values 0 and 1.
    """

    id: int
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    @property
    def num_samples(self) -> int:
        """Number of training samples."""
        return len(self.y)

    def __repr__(self) -> str:
        return f"ClientData(id={self.id}, samples={self.num_samples}, held_out={len(self.y_test)})"


def any_held_out(clients: Sequence[ClientData]) -> bool:
    """Return whether one of the first thousand clients has held-out samples; others may have to be loaded."""
    return any(len(clients[k].y_test) for k in range(min(len(clients), 1000)))


class ArrayClients(Sequence[ClientData]):
    """Clients as slices of shared arrays.

    Client ``k`` trains on ``offsets[k]:splits[k]``; its held-out samples are ``splits[k]:offsets[k+1]``.
    """

    mapped = False
    in_array = True
    """True if the inputs are rows of one array in memory, see ``indexed``."""

    def __init__(self, x: Tensor, y: Tensor, offsets: np.ndarray, splits: np.ndarray):
        self.x = x
        self.y = y
        self.offsets = offsets
        self.splits = splits

    def __len__(self) -> int:
        return len(self.splits)

    def __getitem__(self, k: int) -> ClientData:  # type: ignore[override]
        start, split, stop = self.bounds(k)
        x, y = self.x, self.y
        return ClientData(k, x[start:split], y[start:split], x[split:stop], y[split:stop])

    def __iter__(self) -> Iterator[ClientData]:
        return (self[k] for k in range(len(self)))

    def bounds(self, k: int) -> tuple[int, int, int]:
        """Return where the samples of client ``k`` start, where its held-out samples start, and where they end."""
        if not 0 <= k < len(self):
            raise IndexError(f"There is no client {k}; this federation has {len(self)} clients.")
        return int(self.offsets[k]), int(self.splits[k]), int(self.offsets[k + 1])

    def indexed(self) -> IndexedRows:
        """Return the array that contains the inputs, with the row of each sample."""
        return IndexedRows(self.x, torch.arange(len(self.y), device=self.y.device), self.offsets)

    def take(self, rows: Tensor) -> Tensor:
        """Return the inputs of some samples, numbered client by client, if ``in_array``."""
        return take_rows(self.x, rows)

    def inputs(self) -> Iterator[Tensor]:
        """Iterate over the inputs of all clients in order, in chunks, so that they need not be copied all at once."""
        yield self.x

    def to(self, device: torch.device) -> ArrayClients:
        """Return the same clients with their arrays on ``device``."""
        return ArrayClients(self.x.to(device), self.y.to(device), self.offsets, self.splits)


class DrawnClients(ArrayClients):
    """Clients whose inputs are not copied up front; a client's inputs are gathered on access.

    Args:
        rows: Function that returns the inputs of a client.
        like: An input as an example of shape and dtype, ``[1, ...]``.
        y: Targets of all clients, in order.
        offsets: First sample of each client, and the number of samples, ``[K + 1]``.
        splits: First held-out sample of each client, ``[K]``.
        mapped: Whether the inputs are memory-mapped from files, so that they may not all fit into memory.

    Attributes:
        source: Data specification and seed, if the data were loaded by name; other machines can load the same data from
            it.
    """

    source: tuple[DataSpec, int] | None = None

    def __init__(
        self, rows: Rows, like: Tensor, y: Tensor, offsets: np.ndarray, splits: np.ndarray, mapped: bool = False
    ):
        self.rows = rows
        self.like = like
        self.mapped = mapped
        self.in_array = isinstance(rows, IndexedRows) and not mapped
        self.y = y
        self.offsets = offsets
        self.splits = splits
        self._recent: dict[int, ClientData] = {}
        self._bytes = 0

    @property
    def x(self) -> Tensor:  # type: ignore[override]
        """All inputs in one new array; if the data are large, read them client by client instead."""
        return self.gathered(torch.device("cpu"))

    def gathered(self, device: torch.device) -> Tensor:
        """Copy all inputs into one new array on a device, chunk by chunk."""
        x = allocate_inputs(len(self.y), self.like, device)
        start = 0
        for part in self.inputs():
            x[start : start + len(part)] = part.to(device)
            start += len(part)
        return x

    def __getitem__(self, k: int) -> ClientData:  # type: ignore[override]
        client = self._recent.pop(k, None)
        if client is None:
            start, split, stop = self.bounds(k)
            client = _LazyClient(k, self.y[start:split], self.y[split:stop], self.rows)
            self._bytes += self._size(k)
        self._recent[k] = client  # reinserted at the end: most recently used
        while self._bytes > RECENT and len(self._recent) > 1:
            oldest = next(iter(self._recent))
            del self._recent[oldest]
            self._bytes -= self._size(oldest)
        return client

    def _size(self, k: int) -> int:
        return int(self.offsets[k + 1] - self.offsets[k]) * self.like.numel() * self.like.element_size()

    def inputs(self) -> Iterator[Tensor]:
        """Iterate over the inputs, one array per client or, if clients are small and in memory, for several of them."""
        together = 0 if self.mapped else TOGETHER // (self.like.numel() * self.like.element_size())
        first = 0
        while first < len(self):
            last = int(np.searchsorted(self.offsets, self.offsets[first] + together, side="right")) - 1
            if last > first + 1:
                yield self.rows.several(first, last)
            else:
                last = first + 1
                yield self.rows(first, 0, int(self.offsets[last] - self.offsets[first]))
            first = last

    def to(self, device: torch.device) -> ArrayClients:
        """Move the clients to a device. Memory-mapped inputs stay in their files and are moved batch by batch."""
        if self.mapped:
            return self
        # Runs share the array, unless their clients use only a small part of it.
        if isinstance(self.rows, IndexedRows) and 2 * len(self.y) >= len(self.rows.x):
            x = shared_copy(self.rows.x, device)
            rows = IndexedRows(x, self.rows.rows.to(device), self.offsets)
            return DrawnClients(rows, x[:1], self.y.to(device), self.offsets, self.splits)
        return ArrayClients(self.gathered(device), self.y.to(device), self.offsets, self.splits)

    def indexed(self) -> IndexedRows:
        """Return the array that contains the inputs, with the row of each sample, if ``in_array``."""
        assert isinstance(self.rows, IndexedRows)
        return self.rows

    def take(self, rows: Tensor) -> Tensor:
        """Return the inputs of some samples, numbered client by client, if ``in_array``."""
        indexed = self.indexed()
        return take_rows(indexed.x, indexed.rows[rows])


@dataclass(frozen=True)
class IndexedRows:
    """Inputs of clients in one array.

    Attributes:
        x: Inputs of all clients.
        rows: Indices into ``x``, client by client.
        offsets: Start of each client's indices in ``rows``, ``[K + 1]``.
    """

    x: Tensor
    rows: Tensor
    offsets: np.ndarray

    def __call__(self, k: int, start: int, stop: int) -> Tensor:
        """Return the inputs ``start:stop`` of client ``k``.

        Args:
            k: Client index.
            start: First sample of the client to return.
            stop: End of the range, exclusive.
        """
        return take_rows(self.x, self.rows[self.offsets[k] + start : self.offsets[k] + stop])

    def several(self, first: int, last: int) -> Tensor:
        """Return all inputs of the clients ``first:last``, client by client.

        Args:
            first: First client.
            last: End of the range, exclusive.
        """
        return take_rows(self.x, self.rows[self.offsets[first] : self.offsets[last]])


class StackedClients(Sequence[ClientData]):
    """Clients of several federations, one federation after another."""

    def __init__(self, sources: Sequence[Sequence[ClientData]]):
        self.sources = sources
        self.ends = list(accumulate(map(len, sources)))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, k: int) -> ClientData:  # type: ignore[override]
        which = bisect_right(self.ends, k)
        source = self.sources[which]
        return source[k - self.ends[which] + len(source)]


def stack_clients(sources: Sequence[Sequence[ClientData]]) -> Sequence[ClientData]:
    """Return the clients of several federations, one federation after another, without a copy of their inputs.

    Args:
        sources: Clients of each federation.
    """
    arrays = [clients for clients in sources if isinstance(clients, ArrayClients) and clients.in_array]
    parts = [clients.indexed() for clients in arrays]
    if len(parts) < len(sources) or any(part.x is not parts[0].x for part in parts):
        return StackedClients(sources)
    starts = list(accumulate((len(clients.y) for clients in arrays), initial=0))
    moved = list(zip(arrays, starts, strict=False))
    offsets = np.concatenate([*(clients.offsets[:-1] + start for clients, start in moved), starts[-1:]])
    splits = np.concatenate([clients.splits + start for clients, start in moved])
    rows = IndexedRows(parts[0].x, torch.cat([part.rows for part in parts]), offsets)
    return DrawnClients(rows, rows.x[:1], torch.cat([clients.y for clients in arrays]), offsets, splits)


class _LazyClient(ClientData):
    """Client whose inputs are gathered on first access; its training inputs are then cached."""

    def __init__(
        self,
        id: int,
        y: Tensor,
        y_test: Tensor,
        rows: Rows | None = None,
        x_test: Tensor | None = None,
        **train: Tensor,
    ):
        # The class is frozen, so attributes are set directly. dataclasses.replace passes x and x_test.
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
    """Copy the samples of all clients, in order, into one array."""
    trained = np.array([client.num_samples for client in clients])
    offsets = np.concatenate([[0], np.cumsum(trained + [len(client.y_test) for client in clients])])
    xs, ys = [t for c in clients for t in (c.x, c.x_test)], [t for c in clients for t in (c.y, c.y_test)]
    return ArrayClients(concatenate_inputs(xs), torch.cat(ys), offsets, offsets[:-1] + trained)


def concatenate_inputs(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate inputs; images keep their channels-last memory format."""
    if parts[0].dim() != 4:
        return torch.cat(list(parts))
    return torch.cat([p.permute(0, 2, 3, 1) for p in parts]).permute(0, 3, 1, 2)


def allocate_inputs(n: int, like: Tensor, device: torch.device | None = None) -> Tensor:
    """Allocate an uninitialized tensor for ``n`` inputs; images are in channels-last memory format.

    Args:
        n: Number of samples.
        like: Samples whose shape and dtype are used.
        device: Device of the result; None means PyTorch's default device.
    """
    if like.dim() != 4:
        return torch.empty((n, *like.shape[1:]), dtype=like.dtype, device=device)
    channels, height, width = like.shape[1:]
    return torch.empty((n, height, width, channels), dtype=like.dtype, device=device).permute(0, 3, 1, 2)


def iterate_batches(parts: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """Iterate over samples in batches of ``size``; the last batch may be smaller.

    Args:
        parts: Tensors of samples, of any length each.
        size: Number of samples per batch.

    >>> [len(batch) for batch in iterate_batches([torch.zeros(3, 2), torch.zeros(4, 2)], 5)]
    [5, 2]

    Yields:
        Batches of samples, ``[size, ...]``.
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
    """Return ``x[index]``; images ``[n, C, H, W]`` keep channels-last memory, which is faster for convolutions on CPU.

    Args:
        x: Samples, ``[n, ...]``.
        index: Indices of the rows to return, ``[B]``.
    """
    if x.dim() != 4:
        return x.index_select(0, index)
    return x.permute(0, 2, 3, 1).index_select(0, index).permute(0, 3, 1, 2)
