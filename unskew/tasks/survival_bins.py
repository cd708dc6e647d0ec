"""Bins of survival analysis, and their hazards: from the configuration, or from sums over all clients."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from unskew.errors import ConfigError, DataError
from unskew.tasks.base import Task
from unskew.tasks.constants import Ask
from unskew.tasks.survival_columns import MOST_HORIZONS
from unskew.tasks.survival_metrics import number_text
from unskew.tasks.survival_table import CELLS, SurvivalTable, choose_cuts, grid_edges, most_bins, time_edges

BINS = 10
"""Number of bins by default, if there are enough events."""
FEW = 10
"""Number of events per bin below which a warning is logged."""
QUARTILES = (0.25, 0.5, 0.75)
"""Shares of the events at the default horizons."""
LOG = logging.getLogger("unskew")


@dataclass(frozen=True)
class SurvivalBins(Task):
    """Options and constants of survival analysis.

    Attributes:
        event: Value that means the event, as ``value_text`` writes it; None means 1 or true.
        until: Time at which later times are censored; None means the largest time.
        bins: Number of bins, or cut points; None means ``BINS``, or fewer if there are few events.
        horizons: Times at which risks are reported; empty means the quartiles of the events.
        strict: Whether too few events raise an error; not for the data of a single site.
        kind: Loss: ``piecewise`` or ``discrete``.
        cuts: Upper end of each bin, ``[J]``.
        rates: Events per unit of time in each bin over all clients, ``[J]``.
        shares: Share of the rows at risk with an event in each bin over all clients, ``[J]``.
        censoring: Curve of being uncensored over all clients at ``CELLS + 1`` equally spaced times, from 0 to the last cut
            point; empty if the configuration gives ``rates``: it then comes from the evaluated rows.
    """

    section: ClassVar[str] = "survival"

    event: str | None = None
    until: float | None = None
    bins: int | tuple[float, ...] | None = None
    horizons: tuple[float, ...] = ()
    strict: bool = True
    kind: str = "piecewise"
    cuts: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()
    censoring: tuple[float, ...] = ()

    @property
    def configured_cuts(self) -> tuple[float, ...]:
        """Cut points of the configuration; empty if it does not give them."""
        return self.bins if isinstance(self.bins, tuple) else ()

    @property
    def constants(self) -> dict[str, tuple[float, ...]]:
        """Constants from the data, whether the loss is ``discrete``, and the code points of the event value."""
        return {
            "cuts": self.cuts,
            "rates": self.rates,
            "shares": self.shares,
            "horizons": self.horizons,
            "censoring": self.censoring,
            "discrete": (float(self.kind == "discrete"),),
            "event": tuple(float(ord(character)) for character in self.event or ""),
        }

    def with_constants(self, constants: Mapping[str, Sequence[float]], classes: int) -> Self:
        """Return the survival task with its bins and the hazards over all clients."""
        numbers = {name: tuple(map(float, values)) for name, values in constants.items()}
        if {*numbers} != {*self.constants}:
            raise ValueError("the constants are not those of survival analysis")
        discrete, codes = numbers.pop("discrete"), numbers.pop("event")
        cuts, rates, shares = (numbers[name] for name in ("cuts", "rates", "shares"))
        valid = (
            discrete in ((0.0,), (1.0,))
            and all(0 < code <= sys.maxunicode and code == int(code) for code in codes)
            and len(cuts) == len(rates) == len(shares) == classes > 0
            and all(a < b < math.inf for a, b in zip((0.0, *cuts), cuts, strict=False))
            and all(0 < rate < math.inf for rate in rates)
            and all(0 < share < 1 for share in shares)
            and all(0 < horizon <= cuts[-1] for horizon in numbers["horizons"])
            and len(numbers["horizons"]) <= MOST_HORIZONS
            and len(numbers["censoring"]) in (0, CELLS + 1)
            and all(0 <= share <= 1 for share in numbers["censoring"])
        )
        if not valid:
            raise ValueError(
                "the constants are not increasing cut points with a hazard each, a curve, and horizons, of which there are "
                f"at most {MOST_HORIZONS}"
            )
        kind = "discrete" if discrete[0] else "piecewise"
        horizons, censoring = numbers["horizons"], numbers["censoring"]
        event = "".join(chr(int(code)) for code in codes)
        return replace(
            self,
            event=event or None,
            until=cuts[-1],
            bins=cuts,
            horizons=horizons,
            strict=True,
            kind=kind,
            cuts=cuts,
            rates=rates,
            shares=shares,
            censoring=censoring,
        )

    @property
    def fits(self) -> bool:
        """True if bins and hazards come from sums over the clients, and not from the configuration."""
        return not self.rates

    def configured(self, options: Any) -> Self:
        """Return the task with the options of the section ``survival``.

        Args:
            options: Section with the fields ``event``, ``until``, ``bins``, ``horizons`` and ``rates``.
        """
        task = replace(self, event=options.event, until=options.until, bins=options.bins, horizons=options.horizons)
        if not options.rates:
            return task
        widths = np.diff(options.bins, prepend=0.0)
        hazards = np.array(options.rates) * widths
        events = -np.expm1(-np.cumsum(hazards))  # share of rows with an event until each cut point
        return replace(
            task,
            cuts=options.bins,
            rates=options.rates,
            shares=tuple(np.minimum(-np.expm1(-hazards), 1 - 1e-9).tolist()),
            horizons=options.horizons or quartile_cuts(np.diff(events, prepend=0.0), options.bins),
        )

    @property
    def of_one_site(self) -> Self:
        """Task that can be fitted to the data of a single site, which may have few events."""
        return replace(self, strict=False)

    def asks(self, kind: str, args: Mapping[str, Any]) -> bool:
        """Return whether ``fit`` may ask a client for a sum: the cells of the configuration, or a public last time."""
        given = self.configured_cuts
        until = given[-1] if given else self.until
        if self.rates or kind == "survival_times":
            return until is None and not self.rates
        asked = args.get("until")
        if not isinstance(asked, float | int) or [*given] != args.get("cuts", []):
            return False
        return asked == until if until is not None else asked in time_edges()

    def accepts(self, constants: Mapping[str, Sequence[float]]) -> str:
        """Return why constants are not those of the configuration, or of the public grid where it leaves a choice."""
        numbers = {name: tuple(constants.get(name, ())) for name in self.constants}
        cuts, horizons, given = numbers["cuts"], numbers["horizons"], self.configured_cuts
        most = self.bins if isinstance(self.bins, int) else BINS
        until = self.until or next((last for last in cuts[-1:] if last in time_edges()), math.inf)
        on_grid = cuts[-1:] == (until,) and {*cuts} <= {*grid_edges(until).tolist()} and len(cuts) <= most
        problems = {
            "its loss or its value that means the event is not that of the experiment": any(
                numbers[name] != self.constants[name] for name in ("discrete", "event")
            ),
            "its cut points are not those of survival.bins": bool(given) and cuts != given,
            f"its cut points are not at most {most} of the public cells until survival.until": not given
            and not on_grid,
            "its rates are not those of survival.rates": bool(self.rates) and numbers["rates"] != self.rates,
            "it has a curve of censoring, or none, unlike the experiment": bool(self.rates)
            == bool(numbers["censoring"]),
            "its horizons are not those of survival.horizons": bool(self.horizons) and horizons != self.horizons,
            f"its horizons are not 1 to {len(QUARTILES)} of the cut points": not self.horizons
            and not (0 < len(horizons) <= len(QUARTILES) and {*horizons} <= {*cuts}),
        }
        return next((problem for problem, wrong in problems.items() if wrong), "")

    def fit(self, ask: Ask) -> Self:
        """Return the task with bins, hazards and the censoring curve from sums over all clients' training rows.

        Args:
            ask: Returns sums.

        Raises:
            ConfigError: If bins would have no event, or a horizon is after the last time.
            DataError: If no row has an event.
        """
        given = self.configured_cuts
        until = given[-1] if given else self.until
        if until is None:
            counts = ask("survival_times", {}, {})["counts"].numpy()
            until = float(time_edges()[np.flatnonzero(counts)[-1]]) if counts.any() else 1.0
            if self.strict and counts[0] and counts[0] == counts.sum():
                raise DataError(
                    f"All survival times are at most {until:.2g}, below which times are not told apart. Use a smaller unit, "
                    "such as days instead of years, or set survival.until."
                )
        edges = grid_edges(until, given)
        sums = ask("survival", {"until": until, "cuts": [*given]}, {})
        table = SurvivalTable.from_sums(sums, edges)
        if self.strict:
            self._check_sums(table, until, int(sums["clients"]))
        cuts = given or choose_cuts(table, most_bins(table, self._wanted_bins(table)))
        bins = table.bins(cuts)
        events = np.maximum(bins.events, 0.5)  # a bin without events occurs only at a single site
        at_risk = np.maximum(bins.at_risk, 1.0)
        exposure = np.maximum(bins.exposure, np.diff(cuts, prepend=0.0) / CELLS)
        return replace(
            self,
            cuts=tuple(cuts),
            rates=tuple((events / exposure).tolist()),
            shares=tuple(np.minimum(events / at_risk, 1 - 0.5 / at_risk).tolist()),
            horizons=self.horizons or quartile_cuts(events, cuts),
            censoring=tuple(table.censoring()[np.searchsorted(edges, grid_edges(until))].tolist()),
        )

    def _wanted_bins(self, table: SurvivalTable) -> int:
        return self.bins if isinstance(self.bins, int) else max(1, min(BINS, int(table.events.sum()) // FEW))

    def _check_sums(self, table: SurvivalTable, until: float, without_events: int) -> None:
        """Validate that the events over all clients suffice, and warn if they are few."""
        total, last = int(table.events.sum()), number_text(until)
        if not total:
            raise DataError(
                f"No training row has an event until {last}. Check label (time, then event), survival.event and "
                "survival.until."
            )
        if without_events:
            LOG.warning(
                "clients without an event until %s, which inform only about censoring: %d", last, without_events
            )
        if late := [horizon for horizon in self.horizons if horizon > until]:
            raise ConfigError(
                f"survival.horizons: {number_text(late[0])} is after {last}, the last time with a prediction. Remove it, or "
                "set survival.until to a later time."
            )
        cuts = self.configured_cuts
        wanted = len(cuts) or self._wanted_bins(table)
        most = most_bins(table, wanted)
        empty = np.flatnonzero(table.bins(cuts).events == 0) if cuts else np.zeros(0, int)
        if len(empty):
            low, high = (number_text((0.0, *cuts)[empty[0] + end]) for end in (0, 1))
            raise ConfigError(
                f"survival.bins: no training row has an event after {low} and until {high}, so its hazard cannot be learned. "
                f"Merge the bin with another one, or write a number of bins: {most} fit."
            )
        if isinstance(self.bins, int) and most < wanted:
            raise ConfigError(
                f"survival.bins={wanted} leaves a bin without an event: the {total} events of the training rows fit into "
                f"{most} bins. Set survival.bins to at most {most}, or if few times are near {last}, survival.until to an "
                "earlier time."
            )
        if self.bins is None and most < wanted:
            LOG.warning(
                "survival.bins: %d instead of %d, because the events are in few of the %d equal cells of time up to %s; if "
                "few times are near it, set survival.until to an earlier time",
                *(most, wanted, CELLS, last),
            )
        if self.bins is not None and total < FEW * wanted:
            LOG.warning(
                "survival.bins: %d events in %d bins are fewer than %d per bin; %d bins would have more",
                *(total, wanted, FEW, max(1, total // FEW)),
            )


def quartile_cuts(events: np.ndarray, cuts: Sequence[float]) -> tuple[float, ...]:
    """Return the cut points nearest to the quartiles of the events.

    Args:
        events: Events in each bin, ``[J]``.
        cuts: Cut points, ``[J]``.

    >>> quartile_cuts(np.array([1, 1, 1, 1]), [10.0, 20.0, 30.0, 40.0])
    (10.0, 20.0, 30.0)
    """
    reached = np.cumsum(events) / events.sum()
    return tuple(cuts[j] for j in dict.fromkeys(int(np.abs(reached - q).argmin()) for q in QUARTILES))
