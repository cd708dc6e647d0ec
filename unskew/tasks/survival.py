"""Survival analysis of right-censored times: one output per bin of time.

Bins ``0 = c_0 < ... < c_J``; bin ``j`` is ``(c_{j-1}, c_j]``, and time 0 belongs to the first one. ``T_ij`` is the time of
row ``i`` in bin ``j``, and ``D_ij`` is 1 if its event is there.

    piecewise   rate_ij = exp(o_j + z_ij)         loss_i = sum_j rate_ij T_ij - D_ij (o_j + z_ij)
    discrete    h_ij = sigmoid(o_j + z_ij)        loss_i = sum_j a_ij softplus(o_j + z_ij) - D_ij (o_j + z_ij)

``a_ij`` is 1 if row ``i`` passes bin ``j`` or has its event there, 1/2 if it is censored inside, and 0 afterwards. The
offsets ``o_j`` are the marginal hazards over all clients, so that training starts there. Both losses are sums over rows.

Sources: Friedman 1982 (Annals of Statistics 10); Gensheimer and Narasimhan 2019 (arXiv:1805.00917); Kvamme and Borgan 2019
(arXiv:1910.06724); federated: Andreux et al. 2020 (arXiv:2006.08997).
"""

from __future__ import annotations

import logging
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.errors import ConfigError, DataError, abbreviate
from unskew.functorch_api import constant
from unskew.tasks.base import Ask, Task
from unskew.tasks.intervals import mean_statistic
from unskew.tasks.metrics import MetricSet, Statistic
from unskew.tasks.survival_columns import FEWEST_TIMES, MOST_HORIZONS, is_absence, value_text
from unskew.tasks.survival_evaluation import (
    SurvivalPredictions,
    censored_at,
    compare_rows,
    count_comparable,
    metric_names,
)
from unskew.tasks.survival_metrics import number_text, survival_at, time_names
from unskew.tasks.survival_sums import metrics_of_sums, survival_sums
from unskew.tasks.survival_table import CELLS, SurvivalTable, choose_cuts, grid_edges, most_bins, time_edges

BINS = 10
"""Number of bins by default, if there are enough events."""
FEW = 10
"""Number of events per bin below which a warning is logged."""
QUARTILES = (0.25, 0.5, 0.75)
"""Shares of the events at the default horizons."""
LOG = logging.getLogger("unskew")


@dataclass(frozen=True)
class Survival(Task):
    """Time to an event, ``y [B, 2]``: the time, and 1 for an event or 0 if the row is censored.

    A model has one output per bin. Its predictions are the probabilities to survive each cut point, ``[B, J]``.

    Attributes:
        name: Name of the task.
        section: Section of the configuration with its options.
        provides: What the task provides of a sample.
        numeric_labels: Whether the labels of a table are columns of numbers.
        label_order: Order of the label columns.
        coded_labels: Positions of the label columns that ``encode_column`` reads.
        output_kind: What ``outputs`` returns.
        loss_options: Values of the option ``loss``.
        scored: Primary metric.
        ranked: Whether ``measure_all`` computes the primary metric.
        draws_clients: Whether ``client_curve`` returns a curve.
        outcome: Name of the outcome.
        constant_name: Description of the prediction of ``constant``.
        client_events: Samples that count as the events of a client.
        statistics: Permissions of statistics of survival times.
        linear_model: Model whose coefficients have intervals.
        ratio: What the exponential of a coefficient multiplies.
        requestable: Metrics that a run may request.
        lower_is_better: Metrics whose lowest value over the rounds is reported as the best.
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

    name: ClassVar[str] = "survival"
    section: ClassVar[str] = "survival"
    provides: ClassVar[frozenset[str]] = frozenset(("vector",))
    numeric_labels: ClassVar[bool] = True
    label_order: ClassVar[str] = "the column of times, then the column of events"
    coded_labels: ClassVar[tuple[int, ...]] = (1,)
    output_kind: ClassVar[str] = "survival"
    loss_options: ClassVar[tuple[str, ...]] = ("piecewise", "discrete")
    scored: ClassVar[str] = "concordance"
    ranked: ClassVar[bool] = True
    draws_clients: ClassVar[bool] = True
    outcome: ClassVar[str] = "event"
    constant_name: ClassVar[str] = "own hazards"
    client_events: ClassVar[str] = "whose event was observed"
    linear_model: ClassVar[str] = "proportional"
    ratio: ClassVar[str] = "hazard"
    statistics: ClassVar[tuple[str, ...]] = ("survival",)
    requestable: ClassVar[tuple[str, ...]] = ("uno", "ibs", "brier", "risk_gap")
    lower_is_better: ClassVar[tuple[str, ...]] = ("loss",)

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

    def with_constants(self, constants: Mapping[str, Sequence[float]], classes: int) -> Task:
        """Return the survival task with its bins and the hazards over all clients."""
        found = {name: tuple(map(float, values)) for name, values in constants.items()}
        if {*found} != {*self.constants}:
            raise ValueError("the constants are not those of survival analysis")
        discrete, codes = found.pop("discrete"), found.pop("event")
        cuts, rates, shares = (found[name] for name in ("cuts", "rates", "shares"))
        fits = (
            discrete in ((0.0,), (1.0,))
            and all(0 < code <= sys.maxunicode and code == int(code) for code in codes)
            and len(cuts) == len(rates) == len(shares) == classes > 0
            and all(a < b < math.inf for a, b in zip((0.0, *cuts), cuts, strict=False))
            and all(0 < rate < math.inf for rate in rates)
            and all(0 < share < 1 for share in shares)
            and all(0 < horizon <= cuts[-1] for horizon in found["horizons"])
            and len(found["horizons"]) <= MOST_HORIZONS
            and len(found["censoring"]) in (0, CELLS + 1)
            and all(0 <= share <= 1 for share in found["censoring"])
        )
        if not fits:
            raise ValueError(
                "the constants are not increasing cut points with a hazard each, a curve, and horizons, of which there are "
                f"at most {MOST_HORIZONS}"
            )
        kind = "discrete" if discrete[0] else "piecewise"
        horizons, censoring = found["horizons"], found["censoring"]
        event = "".join(chr(int(code)) for code in codes)
        return Survival(event or None, cuts[-1], cuts, horizons, True, kind, cuts, rates, shares, censoring)

    @property
    def fits(self) -> bool:
        """Whether sums over the clients determine bins and hazards: unless the configuration gives them."""
        return not self.rates

    def configured(self, options: Any) -> Survival:
        """Return the task with the options of the section ``survival``.

        Args:
            options: Section with the fields ``event``, ``until``, ``bins``, ``horizons`` and ``rates``.
        """
        task = replace(self, event=options.event, until=options.until, bins=options.bins, horizons=options.horizons)
        if not options.rates:
            return task
        widths = np.diff(options.bins, prepend=0.0)
        events = -np.expm1(
            -np.cumsum(np.array(options.rates) * widths)
        )  # share of rows with an event until each cut point
        return replace(
            task,
            cuts=options.bins,
            rates=options.rates,
            shares=tuple(np.minimum(-np.expm1(-np.array(options.rates) * widths), 1 - 1e-9).tolist()),
            horizons=options.horizons or quartile_cuts(np.diff(events, prepend=0.0), options.bins),
        )

    @property
    def of_one_site(self) -> Survival:
        """Task that can be fitted to the data of a single site, which may have few events."""
        return replace(self, strict=False)

    def asks(self, kind: str, args: Mapping[str, Any]) -> bool:
        """Return whether ``fit`` may ask a client for a sum: the cells of the configuration, or a public last time."""
        given = self.bins if isinstance(self.bins, tuple) else ()
        until = given[-1] if given else self.until
        if self.rates or kind == "survival_times":
            return until is None and not self.rates
        asked = args.get("until")
        if not isinstance(asked, float | int) or [*given] != args.get("cuts", []):
            return False
        return asked == until if until is not None else asked in time_edges()

    def accepts(self, constants: Mapping[str, Sequence[float]]) -> str:
        """Return why constants are not those of the configuration, or of the public grid where it leaves a choice."""
        found = {name: tuple(constants.get(name, ())) for name in self.constants}
        cuts, horizons, given = found["cuts"], found["horizons"], self.bins if isinstance(self.bins, tuple) else ()
        most = self.bins if isinstance(self.bins, int) else BINS
        until = self.until or next((last for last in cuts[-1:] if last in time_edges()), math.inf)
        on_grid = cuts[-1:] == (until,) and {*cuts} <= {*grid_edges(until).tolist()} and len(cuts) <= most
        problems = {
            "its loss or its value that means the event is not that of the experiment": any(
                found[name] != self.constants[name] for name in ("discrete", "event")
            ),
            "its cut points are not those of survival.bins": bool(given) and cuts != given,
            f"its cut points are not at most {most} of the public cells until survival.until": not given
            and not on_grid,
            "its rates are not those of survival.rates": bool(self.rates) and found["rates"] != self.rates,
            "it has a curve of censoring, or none, unlike the experiment": bool(self.rates) == bool(found["censoring"]),
            "its horizons are not those of survival.horizons": bool(self.horizons) and horizons != self.horizons,
            f"its horizons are not 1 to {len(QUARTILES)} of the cut points": not self.horizons
            and not (0 < len(horizons) <= len(QUARTILES) and {*horizons} <= {*cuts}),
        }
        return next((problem for problem, wrong in problems.items() if wrong), "")

    def with_loss(self, loss: str) -> Survival:
        """Return the task with the loss ``piecewise`` or ``discrete``."""
        return replace(self, kind=loss)

    def recoded(self, y: Tensor, who: str) -> Tensor:
        """Return times, and 1 for the configured event or 0."""
        if self.event is None or y.dim() != 2 or y.shape[1] != 2:
            return y
        event = self.encode_column(1, "y[:, 1]", y[:, 1].tolist(), who)
        return torch.stack([y[:, 0].to(torch.float64), torch.from_numpy(event)], 1)

    def read(self, y: Tensor, who: str) -> Tensor:
        """Return times and events, ``[n, 2]``, as float64."""
        if y.dim() != 2 or y.shape[1] != 2:
            raise DataError(
                f"The targets of {who} have shape {tuple(y.shape)}. Survival requires [n, 2]: time, and 1 for an event or 0 "
                "if the row is censored."
            )
        y = y.to(torch.float64)
        time, event = y.unbind(1)
        swapped = bool(((time == 0) | (time == 1)).all()) and not bool(((event == 0) | (event == 1)).all())
        if len(y) >= FEW * 2 and len({*time.tolist()}) == 2:
            raise DataError(
                f"The times of {who} have only two values, {number_text(float(time.min()))} and "
                f"{number_text(float(time.max()))}. Write the time first, then the event, as in label: days,event."
            )
        for bad, what in (
            (~time.isfinite(), "a time that is missing or infinite"),
            (time < 0, "a negative time"),
            (event.isnan(), "no event indicator"),
            ((event != 0) & (event != 1), f"the event indicator {'%g'}"),
        ):
            if rows := torch.nonzero(bad)[:, 0].tolist():
                value = what.replace("%g", f"{float(event[rows[0]]):g}")
                remedy = "Write the time first, then 1 for an event or 0" if swapped else "Correct or remove these rows"
                raise DataError(
                    f"Row {rows[0]} (from 0) of {who} has {value} ({len(rows)} of {len(y)} rows). {remedy}."
                )
        return y.contiguous()

    def check(self, y: Tensor, classes: int, who: str, x: Tensor | None = None) -> None:
        """Accept all targets that ``read`` returns."""

    def check_labels(self, names: Sequence[str]) -> None:
        """Validate that there are two label columns (raises ``ConfigError`` otherwise)."""
        if len(names) != 2:
            raise ConfigError(
                f"task=survival needs two label columns, but label is {','.join(names)}. Write {self.label_order}, as in "
                "label: days,event."
            )

    def encode_column(self, index: int, name: str, values: Sequence[object], where: str) -> np.ndarray:
        """Return 1 for each event and 0 for each other value of the column of events.

        Args:
            index: Position of the label column.
            name: Its name.
            values: Its values; None where one is missing.
            where: Name of the data, for errors.

        Raises:
            DataError: If a value is missing, or the values are not an event and its absence.
        """
        missing = [row for row, value in enumerate(values) if value is None or value != value]
        if missing:
            raise DataError(
                f"{where}: the event column {name!r} has {len(missing)} missing values (first: row {missing[0]}, "
                "counted from 0). Remove those rows."
            )
        texts = [value_text(value) for value in values]
        known, shown = sorted({*texts}), abbreviate(sorted({*texts}))
        if len(known) > 2:
            rarest = min(known, key=Counter(texts).__getitem__)
            remedy = f"Write label as {self.label_order}."
            if len(known) <= FEWEST_TIMES:
                remedy = (
                    f"Remove or recode the rows with other values. The rarest, {rarest!r}, is first in row "
                    f"{texts.index(rarest)} (from 0)."
                )
            raise DataError(
                f"{where}: the event column {name!r} has more than two values: {shown}. It must say for each row whether the "
                f"event was observed. {remedy}"
            )
        if self.event is None and not {*known} <= {"0", "1"}:
            raise DataError(
                f"{where}: the event column {name!r} has the values {shown}. Set survival.event to the one that means the "
                "event."
            )
        if self.event is not None and self.event not in known and len(known) == 2:
            raise DataError(
                f"{where}: survival.event is {self.event!r}, but the event column {name!r} has the values {shown}."
            )
        if self.event is not None and self.event not in known and known and not is_absence(known[0], self.event):
            LOG.warning(
                "%s: no row has an event, because the event column %r has only the value %r, but survival.event is %r",
                *(where, name, known[0], self.event),
            )
        return np.array([text == (self.event or "1") for text in texts], np.float64)

    def num_outputs(self, ys: Sequence[Tensor]) -> int:
        """Return the number of bins; 1 before they are known."""
        return len(self.cuts) or 1

    def distribution(self, y: Tensor, classes: int) -> Tensor:
        """Return whether each sample has its event in each bin, ``[n, J]``."""
        return self._bins(y.new_zeros(len(y), classes), y)[2].double()

    def fit(self, ask: Ask) -> Survival:
        """Return the task with bins, hazards and the censoring curve from sums over all clients' training rows.

        Args:
            ask: Returns sums.

        Raises:
            ConfigError: If bins would have no event, or a horizon is after the last time.
            DataError: If there is no event.
        """
        given = self.bins if isinstance(self.bins, tuple) else ()
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
        cuts = self.bins if isinstance(self.bins, tuple) else ()
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

    @cached_property
    def offsets(self) -> tuple[float, ...]:
        """Offset of each output, ``[J]``: log rate, or log-odds of the share."""
        if self.kind == "piecewise":
            return tuple(math.log(rate) for rate in self.rates)
        return tuple(math.log(share) - math.log1p(-share) for share in self.shares)

    def _bins(self, logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs with their offsets, the exposure and whether the event is there, ``[B, J]`` each."""
        time, event = (y[..., column : column + 1].to(logits.dtype) for column in (0, 1))
        low, high = constant((0.0, *self.cuts[:-1]), logits), constant(self.cuts, logits)
        after = time > constant((-1.0, *self.cuts[:-1]), logits)  # time 0 belongs to the first bin
        inside = (after & (time <= high)).to(logits.dtype)
        if self.kind == "piecewise":
            exposure = torch.minimum(time, high).sub(low).clamp_min(0)
        else:
            exposure = torch.where(time >= high, torch.ones_like(inside), inside * (1 + event) / 2)
        return logits + constant(self.offsets, logits), exposure, inside * event

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the negative log-likelihood of each row."""
        z, exposure, events = self._bins(logits, y)
        hazard = z.exp() if self.kind == "piecewise" else F.softplus(z)
        return (hazard * exposure - events * z).sum(-1)

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the mean negative log-likelihood."""
        return self.losses(logits, y).mean()

    def constant(self, y: Tensor, classes: int) -> Tensor:
        """Return the outputs of the rows' own hazards; a bin without events counts half an event."""
        _, exposure, events = (part.sum(0) for part in self._bins(y.new_zeros(len(y), classes), y))
        offsets = y.new_tensor(self.offsets)
        counted = events.clamp_min(0.5)
        if self.kind == "piecewise":
            return torch.where(exposure > 0, (counted / exposure).log() - offsets, 0.0)
        counted = torch.minimum(counted, exposure - 0.5)
        return torch.where(counted > 0, torch.logit(counted / exposure) - offsets, 0.0)

    def correct(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return NaN: the concordance compares rows, so it is no mean over them."""
        return torch.full((len(y),), math.nan, dtype=torch.float64, device=y.device)

    def measure_all(self, y: np.ndarray, scores: np.ndarray) -> dict[str, float]:
        """Compute the concordance: the share of comparable pairs in which the row with the earlier event has the higher risk.

        The risk is the cumulative hazard at the last cut point.
        """
        return self._predictions(y, scores).metrics([self.scored])

    def metric_names(self, metrics: MetricSet) -> tuple[str, ...]:
        """Return the names of the values of the requested metrics; those at horizons end in the time."""
        return (*metric_names(metrics.known, self.horizons), *metrics.own)

    def metrics_of_all(self, y: np.ndarray, scores: np.ndarray, metrics: MetricSet) -> dict[str, float]:
        """Compute the requested metrics of ``requestable``; ``brier`` and ``risk_gap`` at each horizon."""
        return self._predictions(y, scores).metrics(metric_names(metrics.known, self.horizons))

    def metrics_of_outputs(self, y: np.ndarray, outputs: np.ndarray, metrics: MetricSet) -> dict[str, float]:
        """Compute concordance, loss and all metrics."""
        everything = self.metrics_of_all(y, outputs, replace(metrics, known=self.requestable))
        loss = float(self._losses_of_outputs(y, outputs).mean()) if len(y) else math.nan
        return {**self.measure_all(y, outputs), "loss": loss, **everything}

    def statistic(self, name: str, y: np.ndarray, scores: np.ndarray, metrics: MetricSet) -> Statistic | None:
        """Return the statistic of the loss or of any metric."""
        if name == "loss":
            return mean_statistic(self._losses_of_outputs(y, scores))
        return self._predictions(y, scores).statistic(name)

    def curves(self, y: np.ndarray, scores: np.ndarray, metrics: MetricSet) -> dict[str, Any]:
        """Return predicted and observed risks at the horizons."""
        known = np.isfinite(scores).all()
        return {"risk_calibration": self._predictions(y, scores).calibration()} if known else {}

    def client_curve(self, name: str, y: np.ndarray, scores: np.ndarray) -> dict[str, Any]:
        """Return observed and mean predicted survival."""
        return self._predictions(y, scores).mean_curve(name) if np.isfinite(scores).all() else {}

    def compare_clients(self, ys: Sequence[Tensor]) -> dict[str, Any]:
        """Compare events and Kaplan-Meier curves at the horizons, and test whether the hazards are equal."""
        return compare_rows([censored_at(y.cpu().numpy(), self.cuts[-1]) for y in ys], self.horizons)

    def held_out_sums(self, y: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return numbers of rows by time, risk and event, and sums of Brier errors and risks."""
        typical = sum(rate * width for rate, width in zip(self.rates, self.widths, strict=True))
        return survival_sums(self._predictions(y, scores), typical)

    def metrics_of_sums(self, table: np.ndarray, sums: np.ndarray) -> dict[str, float]:
        """Compute all metrics; those that compare rows up to ranks within a cell."""
        none = self._predictions(np.zeros((0, 2)), np.zeros((0, len(self.cuts))))
        edges = grid_edges(self.cuts[-1])
        return metrics_of_sums(table, sums, edges, self.horizons, none.censoring, float(none.edges[-1]))

    def client_fields(self, y: Tensor) -> dict[str, int]:
        """Return the numbers of events and of comparable pairs."""
        return count_comparable(censored_at(y.cpu().numpy(), self.cuts[-1]))

    def _predictions(self, y: np.ndarray, scores: np.ndarray) -> SurvivalPredictions:
        hazards = cumulative_hazards(scores)
        return SurvivalPredictions.of(y, hazards, self.cuts, self.horizons, self.censoring)

    def _losses_of_outputs(self, y: np.ndarray, outputs: np.ndarray) -> np.ndarray:
        hazards = np.maximum(np.diff(cumulative_hazards(outputs), axis=1, prepend=0), np.finfo(float).tiny)
        z = np.log(hazards / self.widths) if self.kind == "piecewise" else np.log(np.expm1(hazards))
        return self.losses(torch.from_numpy(z - np.array(self.offsets)), torch.from_numpy(y)).numpy()

    @cached_property
    def widths(self) -> tuple[float, ...]:
        """Length of each bin, ``[J]``."""
        return tuple(high - low for low, high in zip((0.0, *self.cuts), self.cuts, strict=False))

    def outputs(self, logits: Tensor) -> Tensor:
        """Return the probability to survive each cut point, ``[B, J]``, in float64."""
        z = logits.to(torch.float64)
        z = z + z.new_tensor(self.offsets)
        if self.kind == "discrete":
            return (-F.softplus(z).cumsum(-1)).exp()
        return (-(z.exp() * z.new_tensor(self.widths)).cumsum(-1)).exp()

    @property
    def names(self) -> tuple[str, ...]:
        """``survival(TIME)`` for each cut point."""
        return tuple(f"survival({time})" for time in time_names(self.cuts))

    def output_names(self, names: Sequence[str], label: str | None) -> list[str]:
        """Return the names of the outputs unchanged."""
        return [*names]

    def survival(self, outputs: np.ndarray, times: Sequence[float]) -> np.ndarray:
        """Return the probability to survive some times, ``[n, T]``; the hazard is constant within a bin.

        Args:
            outputs: Probabilities to survive the cut points, ``[n, J]``.
            times: Times from 0 to the last cut point, ``[T]``.
        """
        return survival_at(cumulative_hazards(outputs), np.array(self.cuts), np.array(times))

    def predicted_columns(
        self,
        outputs: np.ndarray,
        names: Sequence[str],
        label: str | None,
        horizons: Sequence[float] = (),
        curve: bool = False,
    ) -> dict[str, Sequence[float | None]]:
        """Return the risk until each horizon, the median time, and on request the probability to survive each cut point."""
        if late := [time for time in horizons if time > self.cuts[-1]]:
            raise ConfigError(
                f"--horizons: {number_text(late[0])} is after {number_text(self.cuts[-1])}, the last time with a prediction."
            )
        times = tuple(horizons) or self.horizons
        risks = 1 - self.survival(outputs, times)
        columns: dict[str, Sequence[float | None]] = {
            f"risk({time})": risks[:, k].tolist() for k, time in enumerate(time_names(times))
        }
        columns["median"] = self.decisions(outputs, MetricSet())
        return columns | (super().predicted_columns(outputs, names, label) if curve else {})

    def decisions(self, outputs: np.ndarray, metrics: MetricSet, threshold: float | None = None) -> list[Any]:
        """Return the median time of each sample, which half of such samples survive; None if it is after all cut points."""
        super().decisions(outputs, metrics, threshold)
        before = np.concatenate([np.ones((len(outputs), 1)), outputs], 1)
        reached = np.asarray(outputs <= 0.5)
        bin_of, rows = reached.argmax(1), np.arange(len(outputs))
        upper, lower = before[rows, bin_of], np.maximum(before[rows, bin_of + 1], np.finfo(float).tiny)
        low, high = np.array((0.0, *self.cuts))[bin_of], np.array(self.cuts)[bin_of]
        with np.errstate(divide="ignore", invalid="ignore"):
            medians = low + (high - low) * np.log(upper / 0.5) / np.log(upper / lower)
        return [
            value if some else None for value, some in zip(medians.tolist(), np.any(reached, 1).tolist(), strict=True)
        ]


def cumulative_hazards(outputs: np.ndarray) -> np.ndarray:
    """Return the cumulative hazards at the cut points, ``[n, J]``, given the probabilities to survive them."""
    return np.asarray(-np.log(np.maximum(outputs, np.finfo(float).tiny)))


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
