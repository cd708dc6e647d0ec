"""Tables of survival times on public cells, which are sums over rows, and the bins that follow from them.

A cell is ``(e_{m-1}, e_m]``, and time 0 belongs to the first one. Rows with longer times are censored at the last edge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from torch import Tensor

from unskew.tasks.survival_metrics import at_risk_in_cells, curves_from_cells

CELLS = 256
"""Number of equal cells up to the largest time."""
PER_OCTAVE, LOWEST, HIGHEST = 16, -20, 44
"""Cells per octave of the public grid of times, and the exponents of 2 between which it lies."""


class BinSums(NamedTuple):
    """Sums over rows for each bin, ``[J]`` each.

    Attributes:
        events: Number of events.
        exposure: Time of all rows in the bin.
        at_risk: Rows that pass the bin or have their event in it, and half of those that are censored inside.
    """

    events: np.ndarray
    exposure: np.ndarray
    at_risk: np.ndarray


class SurvivalTable(NamedTuple):
    """Survival times of some rows on ``M`` cells.

    Attributes:
        edges: Edges of the cells, ``[M + 1]``, from 0.
        events: Events in each cell, ``[M]``.
        censored: Censored rows in each cell, ``[M]``.
        ended: Those of them that are censored at the upper edge or, in the last cell, after it, so that they pass the cell.
        exposure: Time of all rows in each cell, ``[M]``.
    """

    edges: np.ndarray
    events: np.ndarray
    censored: np.ndarray
    ended: np.ndarray
    exposure: np.ndarray

    @staticmethod
    def of(time: np.ndarray, event: np.ndarray, edges: np.ndarray) -> SurvivalTable:
        """Count rows.

        Args:
            time: Time of the event or of censoring, ``[n]``.
            event: 1 for an event, 0 if the row is censored, ``[n]``.
            edges: Edges of the cells, ``[M + 1]``, from 0.
        """
        cells, died = len(edges) - 1, (event > 0) & (time <= edges[-1])
        time = np.minimum(time, edges[-1])
        cell = np.maximum(np.searchsorted(edges, time), 1) - 1
        ended = ~died & (time == edges[cell + 1])
        events, censored, ended = (np.bincount(cell[rows], minlength=cells) for rows in (died, ~died, ended))
        longer = len(time) - np.cumsum(events + censored)  # these rows stay for all of the cell
        exposure = np.bincount(cell, time - edges[cell], minlength=cells) + longer * np.diff(edges)
        return SurvivalTable(edges, events, censored, ended, exposure)

    @staticmethod
    def from_sums(sums: Mapping[str, Tensor], edges: np.ndarray) -> SurvivalTable:
        """Return the table of all clients.

        Args:
            sums: Sums of the kind ``survival``.
            edges: Edges of the cells.
        """
        return SurvivalTable(edges, *(sums[name].numpy() for name in SurvivalTable._fields[1:]))

    @property
    def at_risk(self) -> np.ndarray:
        """Rows at risk at the beginning of each cell, ``[M]``."""
        return at_risk_in_cells(np.stack([self.events, self.censored]))

    def censoring(self) -> np.ndarray:
        """Return the share of uncensored rows at each edge, ``[M + 1]``."""
        return curves_from_cells(np.stack([self.events, self.censored]), self.edges)[1].at(self.edges)

    def bins(self, cuts: Sequence[float]) -> BinSums:
        """Return the sums for bins.

        Args:
            cuts: Upper ends of the bins, which are edges; the last one is the largest.
        """
        ends = np.searchsorted(self.edges, cuts)
        cells = [slice(first, last) for first, last in pairwise([0, *ends.tolist()])]
        events, exposure, censored = (
            np.array([column[cell].sum() for cell in cells]) for column in (self.events, self.exposure, self.censored)
        )
        at_risk = self.at_risk[[cell.start for cell in cells]]
        return BinSums(events, exposure, at_risk - (censored - self.ended[ends - 1]) / 2)


def time_edges() -> np.ndarray:
    """Return the upper ends of the public cells of times; the last one is the largest time."""
    return np.exp2(np.arange(PER_OCTAVE * (HIGHEST - LOWEST) + 1) / PER_OCTAVE + LOWEST)


def grid_edges(until: float, cuts: Sequence[float] = ()) -> np.ndarray:
    """Return the edges of ``CELLS`` equal cells from 0 to a time, and given cut points.

    Args:
        until: Largest time.
        cuts: Cut points to add.

    >>> len(grid_edges(512.0, [2.0, 3.0, 512.0]))
    258
    """
    edges = np.arange(CELLS + 1) * (until / CELLS)
    edges[-1] = until
    return np.unique(np.concatenate([edges, np.array(cuts, float)]))


def choose_cuts(table: SurvivalTable, bins: int) -> tuple[float, ...]:
    """Return the cut points nearest to equal numbers of events.

    Args:
        table: Table of all rows.
        bins: Number of bins.
    """
    so_far = np.cumsum(table.events)
    chosen = [int(np.abs(so_far - so_far[-1] * j / bins).argmin()) for j in range(1, bins)]
    return (*table.edges[np.array(chosen, int) + 1].tolist(), float(table.edges[-1]))


def most_bins(table: SurvivalTable, wanted: int) -> int:
    """Return the largest number of bins that ``choose_cuts`` fills with events; 1 without events.

    Args:
        table: Table of all rows.
        wanted: Largest number to try.
    """
    for bins in range(wanted, 1, -1):
        cuts = choose_cuts(table, bins)
        if len({*cuts}) == bins and table.bins(cuts).events.all():
            return bins
    return 1
