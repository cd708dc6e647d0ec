"""Survival of sites and the log-rank test, from sums over the sites in cells of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unskew.sums.base import SumRequest, Sums
from unskew.sums.statistics import Statistic
from unskew.tasks.survival_evaluation import log_rank_fields, survival_row
from unskew.tasks.survival_metrics import at_risk_in_cells, curves_from_cells, log_rank, log_rank_of_terms
from unskew.tasks.survival_table import grid_edges

LEAST_COUNT = 10
"""With masks, sites send exact counts, so that sums below this number are not shown."""


@dataclass(frozen=True)
class SurvivalTables(Statistic):
    """Events, Kaplan-Meier curves at the horizons, and the log-rank test between sites.

    Without masks, the test is the usual one. With masks, its statistic is ``sum (O - E)²/E``, from a second exchange.

    Attributes:
        until: Last time.
        horizons: Times at which survival is returned.
        masked: Whether only sums over the sites are known.
    """

    until: float
    horizons: tuple[float, ...]
    masked: bool

    def first(self) -> list[SumRequest]:
        """Return the request for events and censored rows."""
        return [SumRequest("survival_table", self._args())]

    def second(self, first: Sequence[Sums]) -> list[SumRequest]:
        """Return the request for the terms of the test, given the hazards of all sites."""
        if not self.masked:
            return []
        counts = first[0]["counts"].numpy()
        hazard = counts[0] / np.maximum(at_risk_in_cells(counts), 1)
        return [SumRequest("log_rank_term", self._args(), {"hazard": torch.from_numpy(hazard)})]

    def comparison(
        self,
        first: Sequence[Sums],
        second: Sequence[Sums],
        sites: Mapping[int, np.ndarray],
        sizes: Mapping[int, int],
    ) -> dict[str, Any]:
        """Return the result in the form of ``Task.compare_clients``; None where sites have hidden or changed counts.

        Args:
            first: Sums of the first exchange.
            second: Sums of the second exchange.
            sites: Events and censored rows of each site, ``[2, M]``; empty with masks.
            sizes: Training rows of each site.
        """
        exact = {k: int(counts.sum()) == sizes[k] for k, counts in sites.items()}
        hidden = {"events": None, "survival": None}
        rows = [self._row(counts) if exact[k] else dict(hidden) for k, counts in sites.items()]
        total = first[0]["counts"].numpy()
        shown = all(exact.values()) and not (self.masked and total[0].sum() < LEAST_COUNT)
        test = None
        if self.masked:
            test = log_rank_fields(log_rank_of_terms(*second[0]["term"].tolist()), conservative=True)
        elif shown:
            tables = np.stack([*sites.values()])
            test = log_rank_fields(log_rank(tables[:, 0], at_risk_in_cells(tables)))
        return {"rows": rows, "pooled": self._row(total) if shown else hidden, "test": test}

    def _args(self) -> dict[str, Any]:
        return {"until": self.until, "cuts": []}

    def _row(self, counts: np.ndarray) -> dict[str, Any]:
        survival, _ = curves_from_cells(counts, grid_edges(self.until))
        return survival_row(int(counts[0].sum()), survival.at(np.array(self.horizons)), self.horizons)
