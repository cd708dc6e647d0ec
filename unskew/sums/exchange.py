"""Exchange of sums: requests go to all clients, their summands come back and are added in client order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
from torch import Tensor

from unskew.errors import UnskewError
from unskew.sums.base import ClientRows, SumRequest, Sums
from unskew.sums.registry import SUMS


class ClientLeftError(UnskewError):
    """A client was excluded during an exchange, so earlier sums are of other clients than later ones."""


class Exchange(Protocol):
    """Asks all clients for sums; a simulation, sites, or sites under secure aggregation.

    Attributes:
        traffic: Bytes that each client sent and received, ``[K, 2]``.
    """

    traffic: np.ndarray

    @property
    def clients(self) -> Sequence[int]:
        """Clients that take part, in order."""
        ...

    def __call__(self, requests: Sequence[SumRequest]) -> list[Sums]:
        """Return the sums over all clients for each request.

        Args:
            requests: Requests that every client answers in one message.

        Raises:
            ClientLeftError: If a client was excluded because its reply is invalid; call again without it.
        """
        ...


AnyExchange = TypeVar("AnyExchange", bound=Exchange)
Result = TypeVar("Result")


def with_remaining(exchange: AnyExchange, compute: Callable[[AnyExchange], Result]) -> Result:
    """Return what a function computes from sums; without a client that was excluded meanwhile, everything is computed again.

    Args:
        exchange: Exchange of sums.
        compute: Function of the exchange.
    """
    while True:
        try:
            return compute(exchange)
        except ClientLeftError:
            continue


def own_sums(rows: ClientRows, requests: Sequence[SumRequest]) -> list[Sums]:
    """Return the summands of one client for each request.

    Args:
        rows: All training rows of the client.
        requests: Requests.
    """
    return [SUMS[request.kind].compute(rows, request) for request in requests]


def total(requests: Sequence[SumRequest], replies: Iterable[Sequence[Sums]]) -> list[Sums]:
    """Add the summands of clients, in their order.

    Args:
        requests: Requests.
        replies: Summands of each client for each request.
    """
    sums: list[Sums] | None = None
    for own in replies:
        if sums is None:
            sums = [dict(some) for some in own]
        else:
            sums = [SUMS[r.kind].add(so_far, some) for r, so_far, some in zip(requests, sums, own, strict=True)]
    return sums or []


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the size of tensors in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@dataclass
class SimulatedExchange:
    """Exchange in a simulation: each client's summands are computed here, one client at a time.

    Attributes:
        rows: Returns the rows of each client, in order.
        traffic: Bytes that each client sent and received, ``[K, 2]``.
    """

    rows: Callable[[], Iterable[ClientRows]]
    traffic: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), np.int64))

    @property
    def clients(self) -> Sequence[int]:
        """Clients that take part, in order; none before the first call."""
        return range(len(self.traffic))

    def __call__(self, requests: Sequence[SumRequest]) -> list[Sums]:
        """Return the sums over all clients for each request."""
        asked = sum(num_bytes(request.tensors) for request in requests)
        sent: list[tuple[int, int]] = []

        def replies() -> Iterable[list[Sums]]:
            for client in self.rows():
                own = own_sums(client, requests)
                sent.append((sum(map(num_bytes, own)), asked))
                yield own

        sums = total(requests, replies())
        now = np.array(sent, np.int64).reshape(-1, 2)
        self.traffic = now if not len(self.traffic) else self.traffic + now
        return sums
