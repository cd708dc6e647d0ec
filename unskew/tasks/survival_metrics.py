"""Metrics, curves and tests of right-censored survival times.

Kaplan-Meier: Kaplan and Meier 1958 (JASA 53). Concordance: Harrell et al. 1982 (JAMA 247); weights ``G(t)^-2``: Uno et al.
2011 (Stat. Med. 30). Brier score: Graf et al. 1999 (Stat. Med. 18). Log-rank test: Peto and Peto 1972 (JRSS A 135). Events
precede censorings at the same time, as in scikit-survival. ``counts [..., n]`` are the occurrences of each row, as in
resamples or in cells of a table, and the leading dimensions are those of the results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SMALLEST = 0.1
"""Smallest value of the censoring curve up to which weighted metrics are computed."""
RISK_CELLS = 10
"""Number of cells of risk of the calibration."""
CHUNK = 1 << 22
"""Maximum number of floats of a temporary array."""
NEGLIGIBLE = 1e-10
"""Smallest eigenvalue of a covariance, as a share of the largest one, that counts as a degree of freedom."""


@dataclass(frozen=True)
class Curve:
    """Curve over time that begins with 1 at time 0.

    Attributes:
        times: Increasing times, ``[m]``.
        values: Values from these times on, ``[..., m]``.
        step: Whether the curve is constant between the times; otherwise it is linear.
        end: Time until which the curve is known, ``[...]``, unless it is 0 there.
    """

    times: np.ndarray
    values: np.ndarray
    step: bool = True
    end: np.ndarray | float = math.inf

    def at(self, times: np.ndarray) -> np.ndarray:
        """Return the values at some times, ``[..., len(times)]``; after the last time, the last value; after the end, NaN."""
        if self.step:
            ones = np.ones((*self.values.shape[:-1], 1))
            steps = np.concatenate([ones, self.values], -1)
            values = steps[..., np.searchsorted(self.times, times, "right")]
        else:
            values = np.interp(times, np.append(0.0, self.times), np.append(1.0, self.values))
        unknown = (times > np.asarray(self.end)[..., None]) & (values > 0)
        return np.where(unknown, np.nan, values)


def kaplan_meier(time: np.ndarray, event: np.ndarray, counts: np.ndarray | None = None) -> Curve:
    """Compute the Kaplan-Meier curve of survival, which is unknown after the last time if some rows survive it.

    Args:
        time: Times, ``[n]``.
        event: Whether the event occurred at this time, bool ``[n]``.
        counts: Occurrences of each row, ``[..., n]``; 1 by default.
    """
    times, at_risk, events, _ = _life_table(time, event, counts)
    end = np.where(at_risk > 0, times, 0.0).max(-1, initial=0.0)
    return Curve(times, np.cumprod(1 - events / np.maximum(at_risk, 1), -1), end=end)


def censoring_curve(time: np.ndarray, event: np.ndarray) -> Curve:
    """Compute the Kaplan-Meier curve of being uncensored.

    Args:
        time: Times, ``[n]``.
        event: Whether the event occurred at this time, bool ``[n]``.
    """
    times, at_risk, events, censored = _life_table(time, event, None)
    return Curve(times, np.cumprod(1 - censored / np.maximum(at_risk - events, 1), -1))


def _life_table(
    time: np.ndarray, event: np.ndarray, counts: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the distinct times, and the rows at risk, the events and the censorings at each of them."""
    order = np.argsort(time, kind="stable")
    counts = np.ones(len(time)) if counts is None else counts
    times, first = np.unique(time[order], return_index=True)
    if not len(times):
        empty = np.zeros((*counts.shape[:-1], 0))
        return times, empty, empty, empty
    ordered = counts[..., order].astype(np.float64)
    leaving = np.add.reduceat(ordered, first, -1)
    events = np.add.reduceat(ordered * event[order], first, -1)
    return times, leaving[..., ::-1].cumsum(-1)[..., ::-1], events, leaving - events


def curves_from_cells(table: np.ndarray, edges: np.ndarray) -> tuple[Curve, Curve]:
    """Compute the curves of survival and of being uncensored from numbers of rows in cells of time.

    Within a cell, rows are censored after half of its length on average (actuarial estimate), and events occur likewise.
    Rows that are censored in the last cell reach its end, at which longer times are censored. The curve of survival is
    unknown after the last cell with rows at risk.

    Args:
        table: Events and censorings in each cell ``(edge, next edge]``, ``[2, m]``.
        edges: Edges of the cells, the first one 0, ``[m + 1]``.
    """
    events, censored = table[:2].astype(np.float64)
    at_risk = at_risk_in_cells(table)
    censored[-1] = 0
    survival = np.cumprod(1 - events / np.maximum(at_risk - censored / 2, 1))
    uncensored = np.cumprod(np.maximum(1 - censored / np.maximum(at_risk - events / 2, 1), 0))
    end = np.where(at_risk > 0, edges[1:], 0.0).max()
    return Curve(edges[1:], survival, False, end), Curve(edges[1:], uncensored, step=False)


def at_risk_in_cells(table: np.ndarray) -> np.ndarray:
    """Return the rows at risk at the beginning of each cell of time, ``[..., m]``.

    Args:
        table: Events and censorings in each cell, ``[..., 2, m]``; further rows are not read.
    """
    leaving = table[..., :2, :].sum(-2)
    return np.asarray(leaving[..., ::-1].cumsum(-1)[..., ::-1])


def concordant_pairs(
    time: np.ndarray,
    event: np.ndarray,
    risk: np.ndarray,
    weights: np.ndarray | None = None,
    counts: np.ndarray | None = None,
    groups: np.ndarray | None = None,
) -> np.ndarray:
    """Compute the weights of concordant and of comparable pairs, ``[..., 2]``; their ratio is the concordance.

    A pair is comparable if row ``i`` has its event at ``t_i``, and ``t_j > t_i``, or ``t_j = t_i`` and ``j`` is censored.
    It is concordant if ``r_i > r_j``, and half if the risks are equal. The ranks of two different times differ first in one
    bit, so each bit contributes pairs within blocks of rows, by one sort: O(n log² n) instead of O(n²).

    Args:
        time: Times, ``[n]``.
        event: Whether the event occurred at this time, bool ``[n]``.
        risk: Predicted risks, ``[n]``.
        weights: Weight of the pairs of each row that has the event, ``[n]``; 1 by default.
        counts: Occurrences of each row, ``[..., n]``; 1 by default.
        groups: Group of each row, ``[n]``; only pairs within a group count.

    >>> concordant_pairs(np.array([1, 2, 3]), np.array([True, False, True]), np.array([0.9, 0.1, 0.9]))
    array([1.5, 2. ])
    """
    counts = np.ones(len(time)) if counts is None else counts
    total = np.zeros((*counts.shape[:-1], 2))
    if not len(time):
        return total
    rank = 2 * _ranks(time) + ~event
    bits = int(rank.max()).bit_length()
    code = rank if groups is None else (_ranks(groups) << bits) + rank
    by_risk = np.argsort(risk, kind="stable")
    for bit in range(bits):
        block = code >> (bit + 1)
        order = by_risk[np.argsort(block[by_risk], kind="stable")]
        later = (code[order] >> bit & 1).astype(bool)
        ordered = counts[..., order].astype(np.float64)
        sums = np.zeros((*ordered.shape[:-1], len(order) + 1))
        np.cumsum(ordered * later, -1, out=sums[..., 1:])
        early = np.flatnonzero(event[order] & ~later)
        changes = np.diff(block[order]) != 0
        start, end = (ends[early] for ends in _run_ends(changes))
        first, last = (ends[early] for ends in _run_ends(changes | (np.diff(risk[order]) != 0)))
        own = ordered[..., early] * (1 if weights is None else weights[order[early]])
        below = (sums[..., first] + sums[..., last]) / 2 - sums[..., start]
        total[..., 0] += (own * below).sum(-1)
        total[..., 1] += (own * (sums[..., end] - sums[..., start])).sum(-1)
    return total


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return the ranks of values, equal for equal values, from 0."""
    return np.unique(values, return_inverse=True)[1].reshape(-1)


def _run_ends(changes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first position of each element's run, and the one after its last, ``[n]`` each.

    Args:
        changes: Whether a run ends between neighbors, ``[n - 1]``.
    """
    bounds = np.concatenate([[0], np.flatnonzero(changes) + 1, [len(changes) + 1]])
    index = np.append(0, np.cumsum(changes))
    return bounds[index], bounds[index + 1]


def last_time(censoring: Curve, edges: np.ndarray) -> float:
    """Return the last edge at which at least ``SMALLEST`` of the rows are uncensored, up to which metrics are weighted.

    Args:
        censoring: Curve of being uncensored.
        edges: Increasing edges, the first one 0.
    """
    return float(edges[np.flatnonzero(censoring.at(edges) >= SMALLEST)[-1]])


def uno_weights(time: np.ndarray, censoring: Curve, until: float) -> np.ndarray:
    """Return the weights of Uno's concordance, ``G(t)^-2`` before a time and 0 from it on, ``[n]``.

    Args:
        time: Times, ``[n]``.
        censoring: Curve of being uncensored.
        until: End of the weighted times.
    """
    early, share = time < until, censoring.at(time)
    return np.where(early & (share > 0), np.where(share > 0, share, 1) ** -2.0, 0.0)


def survival_at(hazards: np.ndarray, cuts: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return predicted survival, ``[n, m]``: the cumulative hazard is linear between cut points, and constant after the last.

    Args:
        hazards: Cumulative hazard of each row at the cut points, ``[n, J]``.
        cuts: Increasing cut points, ``[J]``.
        times: Times, ``[m]``.
    """
    starts = np.append(0.0, cuts[:-1])
    share = np.clip((times - starts[:, None]) / (cuts - starts)[:, None], 0, 1)
    return np.asarray(np.exp(-np.diff(hazards, axis=1, prepend=0) @ share))


def brier_errors(
    survival: np.ndarray, times: np.ndarray, time: np.ndarray, event: np.ndarray, censoring: Curve
) -> np.ndarray:
    """Compute the summands of the Brier score at some times, ``[n, m]``; their mean over the rows is the score.

    They are NaN from the time on at which all rows are censored.

    Args:
        survival: Predicted survival at the times, ``[n, m]``.
        times: Times, ``[m]``.
        time: Observed times, ``[n]``; infinite for rows that are known to survive all times.
        event: Whether the event occurred at the observed time, bool ``[n]``.
        censoring: Curve of being uncensored.
    """
    late = time[:, None] > times
    share = np.where(late, censoring.at(times), censoring.at(time)[:, None])
    used = late | event[:, None]
    errors = np.where(late, 1 - survival, survival) ** 2 * used / np.where(used & (share > 0), share, 1)
    return np.where(censoring.at(times) > 0, errors, np.nan)


def integrated_errors(
    hazards: np.ndarray, cuts: np.ndarray, edges: np.ndarray, time: np.ndarray, event: np.ndarray, censoring: Curve
) -> np.ndarray:
    """Compute the summands of the integrated Brier score, ``[n]``: the trapezoid rule, divided by the length.

    Args:
        hazards: Cumulative hazard of each row at the cut points, ``[n, J]``.
        cuts: Increasing cut points, ``[J]``.
        edges: Increasing times at which the score is evaluated, ``[m]`` with at least two.
        time: Observed times, ``[n]``; infinite for rows that are known to survive all times.
        event: Whether the event occurred at the observed time, bool ``[n]``.
        censoring: Curve of being uncensored.
    """
    lengths = np.diff(edges)
    shares = (np.append(lengths, 0) + np.append(0, lengths)) / (2 * lengths.sum())
    rows = max(1, CHUNK // len(edges))
    parts = [slice(first, first + rows) for first in range(0, len(time), rows)]
    return np.concatenate(
        [
            brier_errors(survival_at(hazards[part], cuts, edges), edges, time[part], event[part], censoring) @ shares
            for part in parts
        ]
        or [np.zeros(0)]
    )


def risk_calibration(
    risk: np.ndarray, time: np.ndarray, event: np.ndarray, horizon: float, cells: int = RISK_CELLS
) -> np.ndarray:
    """Compare predicted risks with Kaplan-Meier risks in cells of equally many rows, ordered by risk.

    Rows with equal risks are in the same cell, so there may be fewer cells. The Kaplan-Meier risk of a cell whose follow-up
    ends before the horizon is NaN.

    Args:
        risk: Predicted risk of an event up to the horizon, ``[n]``.
        time: Observed times, ``[n]``.
        event: Whether the event occurred at the observed time, bool ``[n]``.
        horizon: Time up to which events count.
        cells: Number of cells.

    Returns:
        Mean prediction, Kaplan-Meier risk and number of rows of each cell, ``[cells, 3]``.
    """
    index = np.searchsorted(np.sort(risk), risk, "left") * cells // max(1, len(risk))
    rows = []
    for cell in np.unique(index):
        own = index == cell
        observed = 1 - kaplan_meier(time[own], event[own]).at(np.array([horizon]))[0]
        rows.append((risk[own].mean(), observed, own.sum()))
    return np.array(rows, dtype=np.float64).reshape(-1, 3)


@dataclass(frozen=True)
class LogRank:
    """Result of a log-rank test.

    Attributes:
        statistic: Chi-square statistic.
        df: Degrees of freedom: groups with rows at risk at an event, minus 1.
        p: P-value; 1 without degrees of freedom.
        observed: Events of each group, ``[K]``; empty if only sums are known.
        expected: Events of each group that are expected without differences between groups, ``[K]``.
    """

    statistic: float
    df: int
    p: float
    observed: np.ndarray
    expected: np.ndarray


def log_rank(events: np.ndarray, at_risk: np.ndarray) -> LogRank:
    """Test whether groups have the same hazards.

    Args:
        events: Events of each group at each time, or in each cell of time, ``[K, m]``.
        at_risk: Rows of each group at risk, ``[K, m]``.
    """
    d, n = events.sum(0).astype(np.float64), at_risk.sum(0).astype(np.float64)
    used = d > 0
    d, n, own = d[used], n[used], at_risk[:, used].astype(np.float64)
    observed, expected = events.sum(1).astype(np.float64), own @ (d / n)
    spread = d * (n - d) / np.maximum(n - 1, 1) / n**2
    covariance = np.diag(own @ (spread * n)) - (own * spread) @ own.T
    values, vectors = np.linalg.eigh(covariance)
    counted = values > NEGLIGIBLE * max(values.max(initial=0), NEGLIGIBLE)
    statistic = float(np.square((observed - expected) @ vectors[:, counted] / np.sqrt(values[counted])).sum())
    return LogRank(statistic, int(counted.sum()), _tail(statistic, int(counted.sum())), observed, expected)


def log_rank_of_rows(time: np.ndarray, event: np.ndarray, groups: np.ndarray) -> LogRank:
    """Test whether groups of rows have the same hazards, exactly.

    Args:
        time: Times, ``[n]``.
        event: Whether the event occurred at this time, bool ``[n]``.
        groups: Group of each row, ``[n]``.
    """
    index, times = _ranks(groups), np.unique(time[event])
    groups_of_rows = range(int(index.max(initial=-1)) + 1)
    events, at_risk = np.zeros((2, len(groups_of_rows), len(times)), np.int64)
    for k in groups_of_rows:
        own = index == k
        at_risk[k] = own.sum() - np.searchsorted(np.sort(time[own]), times, "left")
        events[k] = np.bincount(np.searchsorted(times, time[own & event]), minlength=len(times))
    return log_rank(events, at_risk)


def log_rank_term(events: np.ndarray, at_risk: np.ndarray, hazard: np.ndarray) -> tuple[float, float]:
    """Return a site's term ``(O - E)²/E`` of the conservative log-rank test, and ``E > 0`` as a number; both are summed.

    Args:
        events: Events of the site in each cell of time, ``[m]``.
        at_risk: Rows of the site at risk, ``[m]``.
        hazard: Events of all sites divided by their rows at risk, ``[m]``.
    """
    expected = float(at_risk @ hazard)
    return ((float(events.sum()) - expected) ** 2 / expected, 1.0) if expected > 0 else (0.0, 0.0)


def log_rank_of_terms(statistic: float, sites: float) -> LogRank:
    """Return the conservative log-rank test from the sums of ``log_rank_term`` over sites.

    Args:
        statistic: Sum of ``(O - E)²/E``.
        sites: Number of sites with expected events.
    """
    df = max(0, round(sites) - 1)
    return LogRank(statistic, df, _tail(statistic, df), np.zeros(0), np.zeros(0))


def _tail(statistic: float, df: int) -> float:
    from scipy.stats import chi2

    return float(chi2.sf(statistic, df)) if df else 1.0


def number_text(value: float, digits: int = 6) -> str:
    """Return a time as a text.

    Args:
        value: Time.
        digits: Number of digits, if it is not whole.

    >>> number_text(1826.0), number_text(263.9140625)
    ('1826', '263.914')
    """
    return f"{value:.0f}" if value == round(value) else f"{value:.{digits}g}"


def time_names(times: Sequence[float]) -> list[str]:
    """Return times as texts with as many digits as distinguish them, at least six.

    Args:
        times: Times.

    >>> time_names([263.9140625, 365.0]), time_names([100.0001, 100.0002])
    (['263.914', '365'], ['100.0001', '100.0002'])
    """
    tried = ([number_text(time, digits) for time in times] for digits in range(6, 18))  # 17 digits determine a float
    return next(names for names in tried if len({*names}) == len({*times}))
