"""Metrics and curves of predicted survival for some rows: concordance, Uno's concordance, Brier scores and calibration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unskew.tasks.intervals import mean_statistic
from unskew.tasks.metrics import Statistic
from unskew.tasks.primary_metric import BRIER, RISK_GAP
from unskew.tasks.survival_metrics import (
    Curve,
    LogRank,
    brier_errors,
    censoring_curve,
    concordant_pairs,
    integrated_errors,
    kaplan_meier,
    last_time,
    log_rank_of_rows,
    risk_calibration,
    survival_at,
    time_names,
    uno_weights,
)
from unskew.tasks.survival_table import grid_edges

POINTS = 65
"""Points of a curve over time."""
MOST_GROUPS = 500
"""Maximum number of groups of a log-rank test."""


@dataclass(frozen=True)
class SurvivalPredictions:
    """Predicted survival of some rows.

    Attributes:
        time: Observed times, ``[n]``; infinite for rows that are known to survive the last cut point.
        event: Whether the event was observed, up to the last cut point, bool ``[n]``.
        hazards: Predicted cumulative hazards at the cut points, ``[n, J]``.
        cuts: Cut points, ``[J]``.
        horizons: Times at which risks are judged, ``[H]``.
        censoring: Curve of being uncensored, over the training rows of all clients or over these rows.
    """

    time: np.ndarray
    event: np.ndarray
    hazards: np.ndarray
    cuts: np.ndarray
    horizons: tuple[float, ...]
    censoring: Curve

    @staticmethod
    def of(
        y: np.ndarray,
        hazards: np.ndarray,
        cuts: Sequence[float],
        horizons: Sequence[float],
        censoring: Sequence[float],
    ) -> SurvivalPredictions:
        """Return predictions; times after the last cut point are censored there.

        Args:
            y: Times, and 1 for an event or 0, ``[n, 2]``.
            hazards: Predicted cumulative hazards at the cut points, ``[n, J]``.
            cuts: Cut points, ``[J]``.
            horizons: Times at which risks are judged.
            censoring: Share of uncensored rows at equally spaced times from 0 to the last cut point; if empty, the curve of
                these rows is used.
        """
        time, event = censored_at(y, cuts[-1]).T
        time = np.where((event == 0) & (time == cuts[-1]), math.inf, time)
        curve = censoring_curve(time, event > 0)
        if len(censoring):
            curve = Curve(grid_edges(cuts[-1])[1:], np.array(censoring)[1:], step=False)
        return SurvivalPredictions(time, event > 0, hazards, np.array(cuts), tuple(horizons), curve)

    @property
    def edges(self) -> np.ndarray:
        """Equally spaced times from 0 to the last one at which metrics are weighted."""
        edges = grid_edges(self.cuts[-1])
        return edges[edges <= last_time(self.censoring, edges)]

    @property
    def risk(self) -> np.ndarray:
        """Predicted risk by which rows are ordered, ``[n]``: the cumulative hazard at the last cut point."""
        return np.asarray(self.hazards[:, -1])

    def risk_at(self, horizon: float) -> np.ndarray:
        """Return the predicted risk of an event up to a horizon, ``[n]``."""
        return np.asarray(1 - survival_at(self.hazards, self.cuts, np.array([horizon]))[:, 0])

    def statistic(self, name: str) -> Statistic | None:
        """Return a metric as a function of the occurrences of each row; None if its name is unknown.

        Args:
            name: One of ``metric_names``.
        """
        time, event, edges = self.time, self.event, self.edges
        if name == "concordance":
            return lambda counts: share_of_pairs(concordant_pairs(time, event, self.risk, counts=counts))
        if name == "uno":
            weights = uno_weights(time, self.censoring, edges[-1])
            return lambda counts: share_of_pairs(concordant_pairs(time, event, self.risk, weights, counts))
        if name == "ibs":
            if len(edges) < 2:
                return lambda counts: np.full(len(counts), math.nan)
            return mean_statistic(integrated_errors(self.hazards, self.cuts, edges, time, event, self.censoring))
        prefix, _, text = name.partition("/")
        horizon = dict(zip(time_names(self.horizons), self.horizons, strict=True)).get(text)
        if horizon is None or f"{prefix}/" not in (BRIER, RISK_GAP):
            return None
        at, risk = np.array([horizon]), self.risk_at(horizon)
        if f"{prefix}/" == BRIER:
            return mean_statistic(brier_errors(1 - risk[:, None], at, time, event, self.censoring)[:, 0])

        def risk_gap(counts: np.ndarray) -> np.ndarray:
            survived = kaplan_meier(time, event, counts).at(at)[..., 0]
            return np.asarray(counts @ risk / counts.sum(1) - (1 - survived))

        return risk_gap

    def metrics(self, names: Sequence[str]) -> dict[str, float]:
        """Return metrics; NaN if they are undefined.

        Args:
            names: Names of metrics.
        """
        once, found = np.ones((1, len(self.time))), {}
        for name in names:
            statistic = self.statistic(name) if len(self.time) else None
            found[name] = math.nan if statistic is None else float(statistic(once)[0])
        return found

    def mean_curve(self, name: str) -> dict[str, Any]:
        """Return the Kaplan-Meier curve and the mean predicted survival of these rows, for ``curves.json``.

        Args:
            name: Name of the rows.
        """
        x = np.linspace(0, self.cuts[-1], POINTS)
        observed, predicted = kaplan_meier(self.time, self.event).at(x), survival_at(self.hazards, self.cuts, x).mean(0)
        known = np.isfinite(observed)  # up to the end of the follow-up
        x, observed, predicted = x[known], observed[known], predicted[known]
        curves = {key: values.round(4).tolist() for key, values in (("y", observed), ("predicted", predicted))}
        about = {"name": name, "rows": len(self.time), "events": int(self.event.sum())}
        return {**about, "x": [float(f"{t:.6g}") for t in x], **curves}

    def calibration(self) -> dict[str, dict[str, list[float]]]:
        """Return mean predictions and Kaplan-Meier risks in cells of risk, by horizon, for ``curves.json``.

        Cells whose follow-up ends before a horizon are left out.
        """
        cells = {}
        for name, horizon in zip(time_names(self.horizons), self.horizons, strict=True):
            parts = risk_calibration(self.risk_at(horizon), self.time, self.event, horizon)
            x, y, rows = parts[np.isfinite(parts[:, 1])].T
            cells[name] = {"x": x.round(4).tolist(), "y": y.round(4).tolist(), "rows": rows.tolist()}
        return cells


def metric_names(metrics: Sequence[str], horizons: Sequence[float]) -> tuple[str, ...]:
    """Return the names of the values of metrics; those at horizons have one for each.

    Args:
        metrics: Names of metrics.
        horizons: Times at which risks are judged.

    >>> metric_names(["uno", "brier"], [180.0, 365.0])
    ('uno', 'brier/180', 'brier/365')
    """
    prefixes = (BRIER, RISK_GAP)
    return tuple(
        name
        for metric in metrics
        for name in ([f"{metric}/{time}" for time in time_names(horizons)] if f"{metric}/" in prefixes else [metric])
    )


def censored_at(y: np.ndarray, last: float) -> np.ndarray:
    """Return times and events, ``[n, 2]``, with later times censored at a time.

    Args:
        y: Times, and 1 for an event or 0, ``[n, 2]``.
        last: Last time.
    """
    return np.stack([np.minimum(y[:, 0], last), (y[:, 1] > 0) & (y[:, 0] <= last)], 1).astype(np.float64)


def count_comparable(y: np.ndarray) -> dict[str, int]:
    """Return the numbers of events and of comparable pairs of rows.

    Args:
        y: Times, and 1 for an event or 0, ``[n, 2]``.
    """
    time, event = y[:, 0], y[:, 1] > 0
    pairs = concordant_pairs(time, event, np.zeros(len(time)))[1]
    return {"events": int(event.sum()), "comparable_pairs": int(pairs)}


def compare_rows(ys: Sequence[np.ndarray], horizons: Sequence[float]) -> dict[str, Any]:
    """Compare the survival times of clients.

    Args:
        ys: Times, and 1 for an event or 0, of each client, ``[n, 2]``.
        horizons: Times of the Kaplan-Meier curves to return.

    Returns:
        ``rows`` and ``pooled`` with ``events`` and ``survival`` by horizon, and ``test``, the log-rank test; None with more
        than ``MOST_GROUPS`` clients.
    """
    every = np.concatenate(ys)
    time, event, groups = every[:, 0], every[:, 1] > 0, np.repeat(np.arange(len(ys)), [len(y) for y in ys])
    curves = [kaplan_meier(y[:, 0], y[:, 1] > 0).at(np.array(horizons)) for y in (*ys, every)]
    *rows, pooled = (
        survival_row(int(y[:, 1].sum()), curve, horizons) for y, curve in zip((*ys, every), curves, strict=True)
    )
    test = log_rank_fields(log_rank_of_rows(time, event, groups)) if len(ys) <= MOST_GROUPS else None
    return {"rows": rows, "pooled": pooled, "test": test}


def survival_row(events: int, survival: np.ndarray, horizons: Sequence[float]) -> dict[str, Any]:
    """Return the survival of a client as plain values.

    Args:
        events: Number of events.
        survival: Survival at the horizons, ``[H]``; NaN after the follow-up, for which None is returned.
        horizons: Horizons, ``[H]``.
    """
    known = [None if math.isnan(value) else value for value in survival.tolist()]
    return {"events": events, "survival": dict(zip(time_names(horizons), known, strict=True))}


def log_rank_fields(test: LogRank, conservative: bool = False) -> dict[str, Any]:
    """Return a log-rank test as plain values.

    Args:
        test: The test.
        conservative: Whether its statistic is the sum of ``(O - E)²/E``.
    """
    return {"statistic": test.statistic, "df": test.df, "p": test.p, "conservative": conservative}


def share_of_pairs(pairs: np.ndarray) -> np.ndarray:
    """Return the share of comparable pairs that are concordant, NaN without any."""
    return np.where(pairs[..., 1] > 0, pairs[..., 0] / np.where(pairs[..., 1] > 0, pairs[..., 1], 1), math.nan)
