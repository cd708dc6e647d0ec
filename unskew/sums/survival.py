"""Sums of survival times: counts on a public grid, and events, censored rows and time at risk on cells up to a time."""

from __future__ import annotations

import json
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from unskew.errors import DataError
from unskew.sums.base import Arguments, ClientRows, Shapes, SumKind, SumRequest, Sums
from unskew.tasks.survival_metrics import at_risk_in_cells, log_rank_term
from unskew.tasks.survival_table import HIGHEST, SurvivalTable, grid_edges, time_edges

COUNTS = ("events", "censored", "ended")
MOST_CUTS = 1000
"""Maximum number of given cut points."""


class SurvivalTimes(SumKind):
    """Number of survival times in each cell of a public grid, from which the largest time over all clients follows."""

    name = "survival_times"

    def compute(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return a client's summands."""
        time, _ = times_and_events(rows)
        edges = time_edges()
        if len(time) and time.max() > edges[-1]:
            raise DataError(
                f"A survival time is larger than {edges[-1]:g}, the largest that is supported. Use a larger unit, such as "
                "days instead of seconds."
            )
        cells = np.searchsorted(edges, time)
        return {"counts": torch.from_numpy(np.bincount(cells, minlength=len(edges)).astype(np.int64))}

    def shapes(self, request: SumRequest) -> Shapes:
        """Return dtype and shape of each tensor."""
        return {"counts": (torch.int64, (len(time_edges()),))}

    def describe(self, request: SumRequest) -> str:
        """Describe what is sent."""
        return f"number of survival times in {len(time_edges())} cells from 0 to 2^{HIGHEST}, 16 for each doubling"


class GridArguments(Arguments):
    """Cells of a survival table.

    Attributes:
        until: Largest time.
        cuts: Increasing cut points that are edges in addition to those of equal cells.
    """

    until: Annotated[float, Field(gt=0, le=2.0**HIGHEST, allow_inf_nan=False)]
    cuts: Annotated[tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...], Field(max_length=MOST_CUTS)] = ()


class SurvivalCounts(SumKind):
    """Events, censored rows and time at risk in each cell up to a time, and the number of clients without events."""

    name = "survival"
    arguments = GridArguments

    def compute(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return a client's summands."""
        time, event = times_and_events(rows)
        table = SurvivalTable.of(time, event, self.edges(request))
        counts = {name: torch.from_numpy(getattr(table, name).astype(np.int64)) for name in COUNTS}
        return {
            **counts,
            "exposure": torch.from_numpy(table.exposure),
            "clients": torch.tensor(int(not table.events.any())),
        }

    def edges(self, request: SumRequest) -> np.ndarray:
        """Return the edges of the cells (raises ``DataError`` if the arguments are not valid)."""
        try:
            known = GridArguments.model_validate_json(json.dumps(request.args))
        except ValueError as error:
            raise DataError("The request for survival times has no valid cells.") from error
        return grid_edges(known.until, [cut for cut in known.cuts if cut <= known.until])

    def shapes(self, request: SumRequest) -> Shapes:
        """Return dtype and shape of each tensor."""
        cells = (len(self.edges(request)) - 1,)
        counts: Shapes = dict.fromkeys(COUNTS, (torch.int64, cells))
        return {**counts, "exposure": (torch.float64, cells), "clients": (torch.int64, ())}

    def describe(self, request: SumRequest) -> str:
        """Describe what is sent."""
        edges = self.edges(request)
        return f"events, censored rows and time at risk in {len(edges) - 1} cells of time up to {edges[-1]:g}"


class SurvivalStatistic(SurvivalCounts):
    """Events and censored rows in each cell up to a time, as a statistic that a site must allow."""

    name = "survival_table"
    permission = "survival"

    def compute(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return a client's summands."""
        table = SurvivalTable.of(*times_and_events(rows), self.edges(request))
        return {"counts": torch.from_numpy(np.stack([table.events, table.censored]).astype(np.int64))}

    def shapes(self, request: SumRequest) -> Shapes:
        """Return dtype and shape of each tensor."""
        return {"counts": (torch.int64, (2, len(self.edges(request)) - 1))}

    def disjoint(self, rows: ClientRows) -> bool:
        """Return whether each row is counted in at most one cell."""
        return True

    def grids(self, request: SumRequest, rows: ClientRows) -> dict[str, tuple[float, ...]]:
        """Return the edges of the cells, by the name of the column of times, whose histogram is another grid."""
        return {(*rows.labels, "survival times")[0]: tuple(self.edges(request).tolist())}

    def describe(self, request: SumRequest) -> str:
        """Describe what is sent."""
        edges = self.edges(request)
        return f"events and censored rows in {len(edges) - 1} cells of time up to {edges[-1]:g}"


class LogRankTerm(SurvivalStatistic):
    """Term ``(O - E)²/E`` of the conservative log-rank test, given the hazards of all clients, and whether E is above 0.

    Chosen hazards would reveal numbers of rows at risk, so a site sends only masked terms, and for one vector of hazards.
    """

    name = "log_rank_term"
    constants = ("hazard",)
    once = ("hazard",)
    masked_only = True

    def compute(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return a client's summands."""
        counts = super().compute(rows, request)["counts"].numpy()
        hazard = request.tensor("hazard", counts.shape[1]).numpy()
        term = log_rank_term(counts[0], at_risk_in_cells(counts), np.clip(hazard, 0, 1))
        return {"term": torch.tensor(term, dtype=torch.float64)}

    def shapes(self, request: SumRequest) -> Shapes:
        """Return dtype and shape of each tensor."""
        return {"term": (torch.float64, (2,))}

    def group_sizes(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return the number of rows for both numbers."""
        return {"term": torch.full((2,), len(times_and_events(rows)[0]), dtype=torch.int64)}

    def describe(self, request: SumRequest) -> str:
        """Describe what is sent."""
        return "the term (O - E)²/E of the log-rank test, masked"


def times_and_events(rows: ClientRows) -> tuple[np.ndarray, np.ndarray]:
    """Return the time of each row and whether its event was observed, ``[n]`` each.

    Args:
        rows: Training rows of a client.

    Raises:
        DataError: If its targets are not survival times.
    """
    y = rows.y
    if y is None or y.dim() != 2 or y.shape[1] != 2:
        raise DataError("The request for survival times is for a survival task, but these data have other labels.")
    time, event = y.cpu().to(torch.float64).numpy().T
    return time, event
