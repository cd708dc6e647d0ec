"""Metrics of predicted survival from sums over rows, as masked sums over sites give them.

A table counts rows by time, risk and event. The order of times in a cell is not known: of two events, each may be the
earlier one, so their pair counts as half concordant; of an event and a censored row, the pair is comparable with probability
1/2. Brier scores and mean risks are sums of one number per row, so they are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from unskew.tasks.survival_evaluation import SurvivalPredictions, metric_names, share_of_pairs
from unskew.tasks.survival_metrics import (
    Curve,
    brier_errors,
    concordant_pairs,
    curves_from_cells,
    integrated_errors,
    survival_at,
    uno_weights,
)
from unskew.tasks.survival_table import CELLS

RISKS = 100
"""Number of cells of risk: equal parts of ``r / (r + r_0)``, with the cumulative hazard ``r_0`` of all training rows."""
SHAPE = (CELLS + 1, RISKS, 2)
"""Cells of time, of which the last one has the rows that survive the last cut point; cells of risk; censored and events."""


def survival_sums(predictions: SurvivalPredictions, typical: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums over rows from which the metrics follow.

    Args:
        predictions: Predicted survival of the rows.
        typical: Cumulative hazard at the last cut point over all training rows.

    Returns:
        Numbers of rows by time, risk and event, int64 of shape ``SHAPE``, and the sums of the integrated Brier errors, of the
        Brier errors and of the predicted risks at each horizon, float64 ``[1 + 2 H]``.
    """
    rows, last, horizons = predictions, predictions.cuts[-1], np.array(predictions.horizons)
    time = np.where(np.isfinite(rows.time), np.maximum(np.ceil(rows.time * (CELLS / last)) - 1, 0), CELLS).astype(
        np.int64
    )
    risk = np.minimum(RISKS * rows.risk / (rows.risk + typical), RISKS - 1).astype(np.int64)
    index = (np.minimum(time, CELLS) * RISKS + risk) * 2 + rows.event
    table = np.bincount(index, minlength=math.prod(SHAPE)).reshape(SHAPE)
    survival = survival_at(rows.hazards, rows.cuts, horizons)
    brier = np.nan_to_num(brier_errors(survival, horizons, rows.time, rows.event, rows.censoring)).sum(0)
    ibs = 0.0
    if len(rows.edges) > 1:
        ibs = integrated_errors(rows.hazards, rows.cuts, rows.edges, rows.time, rows.event, rows.censoring).sum()
    return table, np.concatenate([[ibs], brier, (1 - survival).sum(0)])


def metrics_of_sums(
    table: np.ndarray, errors: np.ndarray, edges: np.ndarray, horizons: Sequence[float], censoring: Curve, last: float
) -> dict[str, float]:
    """Return the metrics of all rows; NaN where they are undefined.

    Args:
        table: Numbers of rows by time, risk and event, of shape ``SHAPE``.
        errors: Sums from ``survival_sums``, ``[1 + 2 H]``.
        edges: Edges of the cells of time, ``[CELLS + 1]``.
        horizons: Times at which risks are judged.
        censoring: Curve of being uncensored, over the training rows of all clients.
        last: Last time at which metrics are weighted.
    """
    time, risk, event = (index.reshape(-1) for index in np.indices(SHAPE))
    middle = np.append((edges[1:] + edges[:-1]) / 2, math.inf)[time]
    counts, kept = table.reshape(-1), table.reshape(-1) > 0
    rows, by_time = (time[kept], event[kept] > 0, risk[kept]), table.sum(1)
    same = by_time[:, 1] * (by_time[:, 1] - 1) / 2
    pairs = []
    for weight in (np.ones(len(middle)), uno_weights(middle, censoring, last)):
        every, inside = (concordant_pairs(*rows, weight[kept], counts[kept], groups) for groups in (None, time[kept]))
        tied = float(same @ weight.reshape(SHAPE)[:, 0, 0])
        pairs.append(every - inside / 2 + [tied / 2, tied])
    leaving = np.stack([by_time[:-1, 1], by_time[:-1, 0]])
    leaving[1, -1] += by_time[-1].sum()
    survival = curves_from_cells(leaving, edges)[0].at(np.array(horizons))
    n, count = max(1, int(table.sum())), len(horizons)
    defined = np.where(censoring.at(np.array(horizons)) > 0, 1.0, math.nan)
    ibs = [errors[0] / n if last > 0 else math.nan]
    brier, risks = errors[1 : 1 + count] / n * defined, errors[1 + count :] / n
    names = ("concordance", *metric_names(("uno", "ibs", "brier", "risk_gap"), horizons))
    values = [*map(float, map(share_of_pairs, pairs)), *ibs, *brier, *(risks - 1 + survival)]
    return dict(zip(names, map(float, values), strict=True))
