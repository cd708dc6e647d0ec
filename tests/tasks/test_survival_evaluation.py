"""Metrics of a survival task are the functions that scikit-survival confirms, and resamples are repeated rows."""

import math

import numpy as np
import pytest

from unskew.tasks.intervals import bootstrap_interval, resampled_counts
from unskew.tasks.metrics import MetricSet
from unskew.tasks.survival import Survival
from unskew.tasks.survival_evaluation import SurvivalPredictions, compare_rows, count_comparable, metric_names
from unskew.tasks.survival_metrics import (
    brier_errors,
    censoring_curve,
    concordant_pairs,
    integrated_errors,
    kaplan_meier,
    log_rank_of_rows,
    survival_at,
    uno_weights,
)
from unskew.tasks.survival_table import SurvivalTable, grid_edges

CUTS, HORIZONS = (20.0, 50.0, 90.0), (30.0, 60.0)
NAMES = ("concordance", *metric_names(("uno", "ibs", "brier", "risk_gap"), HORIZONS))


def drawn(n=80, seed=0):
    random = np.random.default_rng(seed)
    y = np.stack([random.integers(1, 120, n).astype(float), random.random(n) < 0.6], 1)
    return y, np.cumsum(random.random((n, 3)), 1)


def predictions(y, hazards, censoring=()):
    return SurvivalPredictions.of(y, hazards, CUTS, HORIZONS, censoring)


def test_rows_of_a_single_client_use_their_own_censoring_curve():
    """The follow-up of this client ends at 40; the curve of all clients would be that of other hospitals."""
    y, hazards = drawn()
    y = np.stack([np.minimum(y[:, 0], 40), (y[:, 1] > 0) & (y[:, 0] <= 40)], 1)
    task = Survival(cuts=CUTS, rates=(0.01, 0.01, 0.01), horizons=HORIZONS, censoring=(1.0,) * 257)
    found = task.of_other_rows.metrics_of_outputs(y, np.exp(-hazards), MetricSet())
    uncensored, share = 1.0, {0.0: 1.0}
    for time in np.unique(y[:, 0]):
        left, events = (y[:, 0] >= time).sum(), ((y[:, 0] == time) & (y[:, 1] > 0)).sum()
        censored = ((y[:, 0] == time) & (y[:, 1] == 0)).sum()
        uncensored *= 1 - censored / max(left - events, 1)
        share[time] = uncensored
    survives, total = survival_at(hazards, np.array(CUTS), np.array([30.0]))[:, 0], 0.0
    for (time, event), p in zip(y, survives, strict=True):
        if time > 30:
            total += (1 - p) ** 2 / share[max(t for t in share if t <= 30)]
        elif event:
            total += p**2 / share[time]
    assert found["brier/30"] == pytest.approx(total / len(y), rel=1e-12)
    assert math.isnan(found["brier/60"])  # all rows are censored by then
    assert math.isnan(found["risk_gap/60"])
    assert found["brier/30"] != pytest.approx(
        task.metrics_of_outputs(y, np.exp(-hazards), MetricSet())["brier/30"], rel=1e-3
    )


def test_metrics_are_the_functions_of_times_censored_at_the_last_cut_point():
    y, hazards = drawn()
    time, event = np.minimum(y[:, 0], 90), (y[:, 1] > 0) & (y[:, 0] <= 90)
    found, edges, times = predictions(y, hazards).metrics(NAMES), grid_edges(90.0), np.array(HORIZONS)
    censoring = predictions(y, hazards).censoring
    assert censoring.at(edges) == pytest.approx(
        censoring_curve(np.where(event | (time < 90), time, 99), event).at(edges), abs=1e-12
    )
    edges = edges[censoring.at(edges) >= 0.1]
    alive = np.where(~event & (time == 90), math.inf, time)
    survival = survival_at(hazards, np.array(CUTS), times)
    pairs = concordant_pairs(time, event, hazards[:, -1])
    weighted = concordant_pairs(time, event, hazards[:, -1], uno_weights(time, censoring, edges[-1]))
    gaps = (1 - survival).mean(0) - (1 - kaplan_meier(time, event).at(times))
    expected = [
        pairs[0] / pairs[1],
        weighted[0] / weighted[1],
        integrated_errors(hazards, np.array(CUTS), edges, alive, event, censoring).mean(),
        *brier_errors(survival, times, alive, event, censoring).mean(0),
        *gaps,
    ]
    assert [*found] == [*NAMES]
    assert [*found.values()] == pytest.approx(expected, abs=1e-12)


def test_the_censoring_curve_is_that_of_the_training_rows():
    y, hazards = drawn()
    table = SurvivalTable.of(*drawn(500, seed=1)[0].T, grid_edges(90.0))
    found = predictions(y, hazards, tuple(table.censoring()))
    assert found.censoring.at(grid_edges(90.0)) == pytest.approx(table.censoring())
    assert found.metrics(["brier/60"]) != predictions(y, hazards).metrics(["brier/60"])


@pytest.mark.parametrize("name", NAMES)
def test_a_resample_has_the_metric_of_repeated_rows(name):
    y, hazards = drawn()
    censoring = tuple(SurvivalTable.of(*drawn(500, seed=1)[0].T, grid_edges(90.0)).censoring())
    counts = next(resampled_counts(np.arange(80)))[:3].astype(int)
    expected = [
        predictions(np.repeat(y, row, 0), np.repeat(hazards, row, 0), censoring).metrics([name])[name] for row in counts
    ]
    assert predictions(y, hazards, censoring).statistic(name)(counts) == pytest.approx(expected, abs=1e-12)


def test_bootstrap_intervals_contain_the_concordance():
    y, hazards = drawn()
    low, high = bootstrap_interval(predictions(y, hazards).statistic("concordance"), np.arange(80))
    assert low < predictions(y, hazards).metrics(["concordance"])["concordance"] < high


def test_metrics_are_undefined_without_pairs_or_rows():
    y, hazards = np.array([[5.0, 0], [7.0, 0]]), np.ones((2, 3))
    assert math.isnan(predictions(y, hazards).metrics(["concordance"])["concordance"])
    assert all(map(math.isnan, predictions(y[:0], hazards[:0]).metrics(NAMES).values()))
    assert predictions(y, hazards).statistic("brier/77") is None
    assert count_comparable(y) == {"events": 0, "comparable_pairs": 0}


def test_the_task_computes_what_was_requested():
    y, hazards = drawn()
    task = Survival(cuts=CUTS, rates=(0.01,) * 3, shares=(0.1,) * 3, horizons=HORIZONS)
    found = task.requested_metrics(MetricSet(known=("ibs", "risk_gap")), y, np.exp(-hazards), "here")
    expected = predictions(y, hazards).metrics(["ibs", "risk_gap/30", "risk_gap/60"])
    assert found == pytest.approx(expected)
    assert task.measure_all(y, np.exp(-hazards)) == pytest.approx(predictions(y, hazards).metrics(["concordance"]))
    nothing = task.requested_metrics(MetricSet(known=("brier",)), y, np.full((80, 3), np.nan), "here")
    assert [*nothing] == ["brier/30", "brier/60"]
    assert all(map(math.isnan, nothing.values()))


def test_clients_are_compared_by_their_curves_and_the_log_rank_test():
    ys = [drawn(60, seed)[0] for seed in range(3)]
    found, every = compare_rows(ys, HORIZONS), np.concatenate(ys)
    for row, y in zip((*found["rows"], found["pooled"]), (*ys, every), strict=True):
        expected = kaplan_meier(y[:, 0], y[:, 1] > 0).at(np.array(HORIZONS))
        assert row == {"events": y[:, 1].sum(), "survival": dict(zip(("30", "60"), expected.tolist(), strict=True))}
    test = log_rank_of_rows(every[:, 0], every[:, 1] > 0, np.repeat(range(3), 60))
    assert found["test"] == {"statistic": test.statistic, "df": 2, "p": test.p, "conservative": False}


def test_curves_begin_at_one_and_have_the_names_of_their_rows():
    y, hazards = drawn()
    curve = predictions(y, hazards).mean_curve("clinic 3")
    assert (curve["name"], curve["rows"], curve["events"]) == ("clinic 3", 80, int((y[y[:, 0] <= 90, 1]).sum()))
    assert (curve["x"][0], curve["y"][0], curve["predicted"][0], curve["x"][-1]) == (0, 1, 1, 90)
    assert curve["predicted"][-1] == pytest.approx(np.exp(-hazards[:, -1]).mean(), abs=1e-4)
    assert [sum(entry["rows"]) for entry in predictions(y, hazards).calibration().values()] == [80, 80]
