"""Summary of the columns of a table from sums over the clients: missing values, mean, standard deviation and quartiles."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unskew.sums.base import SumRequest, Sums
from unskew.sums.statistics import Statistic

QUARTILES = {"q25": 0.25, "median": 0.5, "q75": 0.75}


@dataclass(frozen=True)
class ColumnSummary(Statistic):
    """Summary of each column.

    Attributes:
        names: Names of all input columns.
        numbers: Names of those that are numbers or dates.
        targets: Names of the targets of regression.
        ranges: Ends of the histogram of a column, by its name.
        allowed: Permissions to use, of ``missing``, ``moments`` and ``histograms``.
    """

    names: tuple[str, ...]
    numbers: tuple[str, ...]
    targets: tuple[str, ...]
    ranges: Mapping[str, tuple[float, float]]
    allowed: Collection[str]

    def first(self) -> list[SumRequest]:
        """Return the requests for missing values, sums and cells."""
        requests = [SumRequest("missing", {"columns": [*self.names]})] if "missing" in self.allowed else []
        if "moments" in self.allowed:
            requests.append(SumRequest("column_moments", self._args()))
        if "histograms" in self.allowed:
            requests += [SumRequest("histogram", {"column": c, "range": [*ends]}) for c, ends in self.ranges.items()]
        return requests

    def second(self, first: Sequence[Sums]) -> list[SumRequest]:
        """Return the request for squared deviations from the mean."""
        totals = self._named(first).get("column_moments")
        if totals is None:
            return []
        mean = totals["sums"] / totals["counts"].clamp(min=1)
        return [SumRequest("column_squares", self._args(), {"mean": mean})]

    def rows(self, first: Sequence[Sums], second: Sequence[Sums]) -> list[dict[str, Any]]:
        """Return a row for each column and target: ``column``, ``values``, ``missing``, ``mean``, ``std`` and quartiles.

        Args:
            first: Sums of the first exchange.
            second: Sums of the second exchange.
        """
        rows: dict[str, dict[str, Any]] = {name: {"column": name} for name in (*self.names, *self.targets)}
        totals = self._named(first)
        if "missing" in totals:
            for name, count in zip(self.names, totals["missing"]["counts"].tolist(), strict=True):
                rows[name]["missing"] = count
        if "column_moments" in totals:
            counts, sums = totals["column_moments"]["counts"], totals["column_moments"]["sums"]
            columns = zip((*self.numbers, *self.targets), counts.tolist(), sums, second[0]["squares"], strict=True)
            for name, count, total, squares in columns:
                few = max(1, count)
                rows[name] |= {"values": count, "mean": float(total) / few, "std": float(squares / few) ** 0.5}
        for name, (low, high) in self.ranges.items():
            if f"histogram {name}" in totals:
                counts = totals[f"histogram {name}"]["counts"]
                quartiles = {key: histogram_quantile(counts.numpy(), low, high, p) for key, p in QUARTILES.items()}
                rows[name] = {"values": int(counts.sum()), **rows[name], **quartiles}
        return [{"column": name, **row} for name, row in rows.items() if len(row) > 1]

    def _args(self) -> dict[str, Any]:
        return {"columns": [*self.numbers], "targets": [*self.targets]}

    def _named(self, first: Sequence[Sums]) -> dict[str, Sums]:
        """Return the sums of the first exchange by the kind, and the column of a histogram."""
        kinds = [f"histogram {r.args['column']}" if r.kind == "histogram" else r.kind for r in self.first()]
        return dict(zip(kinds, first, strict=True))


def histogram_quantile(counts: np.ndarray, low: float, high: float, p: float) -> float | None:
    """Return a quantile, by linear interpolation in its cell; None if it is outside the range or there are no values.

    Args:
        counts: Values below the range, in its equal cells, and above it.
        low: Lower end of the range.
        high: Upper end of the range.
        p: Probability of the quantile.

    >>> histogram_quantile(np.array([0, 4, 4, 0]), 0.0, 10.0, 0.75)
    7.5
    """
    edges, below = np.linspace(low, high, len(counts) - 1), np.cumsum(counts[:-1])
    wanted = p * counts.sum()
    if not counts.sum() or not below[0] <= wanted <= below[-1]:
        return None
    return float(np.interp(wanted, below, edges))
