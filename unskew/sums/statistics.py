"""Statistics of all clients from two exchanges of sums, of which the second uses totals of the first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from unskew.sums.base import SumRequest, Sums
from unskew.sums.exchange import Exchange

Metrics = dict[str, float | None]
Key = TypeVar("Key")


class Statistic:
    """Interface of a statistic: requests of both exchanges, and the result."""

    def first(self) -> list[SumRequest]:
        """Return the requests of the first exchange."""
        return []

    def second(self, first: Sequence[Sums]) -> list[SumRequest]:
        """Return the requests of the second exchange.

        Args:
            first: Sums of the first exchange.
        """
        return []

    def metrics(self, first: Sequence[Sums], second: Sequence[Sums]) -> Metrics:
        """Return the result.

        Args:
            first: Sums of the first exchange.
            second: Sums of the second exchange.
        """
        return {}


def collect(exchange: Exchange, statistics: Mapping[Key, Statistic]) -> dict[Key, tuple[list[Sums], list[Sums]]]:
    """Ask for the sums of all statistics, in two exchanges.

    Args:
        exchange: Asks all clients.
        statistics: Statistics by name.

    Returns:
        The sums of both exchanges for each statistic.
    """
    first = _exchanged(exchange, {key: statistic.first() for key, statistic in statistics.items()})
    second = _exchanged(exchange, {key: statistic.second(first[key]) for key, statistic in statistics.items()})
    return {key: (first[key], second[key]) for key in statistics}


def skew_metrics(exchange: Exchange, statistics: Iterable[Statistic]) -> Metrics:
    """Return the results of statistics, in two exchanges.

    Args:
        exchange: Asks all clients.
        statistics: Statistics, whose results have different names.
    """
    listed = dict(enumerate(statistics))
    return {
        name: value
        for key, sums in collect(exchange, listed).items()
        for name, value in listed[key].metrics(*sums).items()
    }


def _exchanged(exchange: Exchange, requests: Mapping[Key, list[SumRequest]]) -> dict[Key, list[Sums]]:
    asked = [request for some in requests.values() for request in some]
    sums = iter(exchange(asked) if asked else [])
    return {key: [next(sums) for _ in some] for key, some in requests.items()}
