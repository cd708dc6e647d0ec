"""Metrics, curves and tests of survival times equal loops over pairs of rows, and scikit-survival and lifelines."""

import numpy as np
import pytest

from unskew.tasks.survival_metrics import (
    Curve,
    at_risk_in_cells,
    brier_errors,
    censoring_curve,
    concordant_pairs,
    curves_from_cells,
    integrated_errors,
    kaplan_meier,
    last_time,
    log_rank,
    log_rank_of_rows,
    log_rank_of_terms,
    log_rank_term,
    risk_calibration,
    survival_at,
    uno_weights,
)

INDEX = np.arange(120)
TIME = 1.0 + INDEX * 37 % 41
EVENT = INDEX * 13 % 5 < 3
RISK = (INDEX * 29 % 17 - 8) / 8
GROUP = INDEX % 4
HORIZONS = np.array([5.0, 10.0, 20.0, 30.0])
SURVIVAL = np.exp(-np.exp(RISK)[:, None] * HORIZONS / 25)
# scikit-survival 0.28.0, y = Surv.from_arrays(EVENT, TIME):
CENSORED_INDEX = (0.4067796610169492, 1711, 2547, 226)  # concordance_index_censored(EVENT, TIME, RISK)[:4]
IPCW_INDEX = {15: 0.44464090707378245, 25: 0.40916769411151105}  # concordance_index_ipcw(y, y, RISK, tau=...)[0]
BRIER = (0.10669301276222788, 0.22619935977095124, 0.35174126007020895, 0.3078958955308983)  # brier_score(...)
INTEGRATED = 0.2808047923417714  # integrated_brier_score(y, y, SURVIVAL, HORIZONS)
KAPLAN_MEIER = (0.9238244508983081, 0.8350997730202214, 0.6821110555916954, 0.452692254389522)  # kaplan_meier_estimator
UNCENSORED = (0.956170117032947, 0.9180539756272957, 0.7696693898980865, 0.6074767070420748)  # the same, reverse=True
# lifelines 0.30.3, multivariate_logrank_test(TIME, GROUP, EVENT):
LOG_RANK = (0.24944340627293582, 0.9692383419626219)


def drawn(n, seed=0, distinct=30):
    """Times, events and risks of some rows, with ties in all of them."""
    random = np.random.default_rng(seed)
    time, risk = random.integers(1, distinct, n).astype(float), random.integers(0, 12, n) / 7
    return time, random.random(n) < 0.6, risk


def pairs_by_loop(time, event, risk, weights, counts, groups):
    total = np.zeros(2)
    for i in np.flatnonzero(event):
        for j in range(len(time)):
            later = time[j] > time[i] or (time[j] == time[i] and not event[j])
            if later and groups[i] == groups[j]:
                weight = weights[i] * counts[i] * counts[j]
                total += weight * ((risk[i] > risk[j]) + (risk[i] == risk[j]) / 2), weight
    return total


def cells_of(time, event, until, cells=256):
    index = np.clip(np.ceil(time / until * cells).astype(int) - 1, 0, cells - 1)
    return np.stack([np.bincount(index[chosen], minlength=cells) for chosen in (event, ~event)])


@pytest.mark.parametrize("n", [1, 2, 7, 64, 150])
def test_pairs_are_those_of_a_loop_over_all_pairs(n):
    time, event, risk = drawn(n, seed=n)
    random = np.random.default_rng(n)
    weights, counts, groups = random.random(n), random.integers(0, 4, (3, n)), random.integers(0, 3, n)
    ones, same = np.ones(n), np.zeros(n)
    assert concordant_pairs(time, event, risk) == pytest.approx(
        pairs_by_loop(time, event, risk, ones, ones, same), abs=1e-9
    )
    expected = [pairs_by_loop(time, event, risk, weights, row, groups) for row in counts]
    assert concordant_pairs(time, event, risk, weights, counts, groups) == pytest.approx(np.array(expected), abs=1e-9)


def test_repeated_rows_count_as_often_as_they_occur():
    time, event, risk = drawn(40)
    counts = np.random.default_rng(1).integers(0, 3, 40)
    repeated = [np.repeat(values, counts) for values in (time, event, risk)]
    assert concordant_pairs(time, event, risk, counts=counts) == pytest.approx(concordant_pairs(*repeated))
    times = np.arange(1.0, 30)
    assert kaplan_meier(time, event, counts).at(times) == pytest.approx(kaplan_meier(*repeated[:2]).at(times))


def test_concordance_is_that_of_scikit_survival():
    concordant, comparable = concordant_pairs(TIME, EVENT, RISK)
    share, right, wrong, ties = CENSORED_INDEX
    assert (concordant, comparable) == (right + ties / 2, right + wrong + ties)
    assert concordant / comparable == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize("until", [15, 25])
def test_weighted_concordance_is_that_of_scikit_survival(until):
    weights = uno_weights(TIME, censoring_curve(TIME, EVENT), until)
    concordant, comparable = concordant_pairs(TIME, EVENT, RISK, weights)
    assert concordant / comparable == pytest.approx(IPCW_INDEX[until], abs=1e-12)


def test_many_rows_need_no_table_of_all_pairs():
    random = np.random.default_rng(0)
    time, risk = random.random((2, 100_000))
    concordant, comparable = concordant_pairs(time, np.ones(100_000, bool), risk)
    assert comparable == 100_000 * 99_999 / 2
    # The concordance of independent ranks has the variance of Kendall's tau, divided by 4.
    assert concordant / comparable == pytest.approx(0.5, abs=6 * (1 / (9 * 100_000)) ** 0.5)


def test_concordance_in_cells_of_time_and_risk_loses_little():
    random = np.random.default_rng(0)
    hazard = np.exp(0.8 * random.normal(size=2000))
    event_time, censored_time = random.exponential(1 / hazard), random.uniform(0, 1.2, 2000)
    time = np.minimum(np.minimum(event_time, censored_time), 1)
    event = event_time <= time
    exact = concordant_pairs(time, event, hazard)
    table = np.zeros((256, 100, 2), np.int64)
    cell = np.clip(np.ceil(time * 256).astype(int) - 1, 0, 255)
    np.add.at(table, (cell, (100 * hazard / (1 + hazard)).astype(int), event.astype(int)), 1)
    times, risks, events = (index.reshape(-1) for index in np.indices(table.shape))
    pairs = concordant_pairs(times, events.astype(bool), risks, counts=table.reshape(-1))
    assert pairs[0] / pairs[1] == pytest.approx(exact[0] / exact[1], abs=1e-3)


def test_curves_are_those_of_scikit_survival():
    assert kaplan_meier(TIME, EVENT).at(HORIZONS) == pytest.approx(KAPLAN_MEIER, abs=1e-12)
    assert censoring_curve(TIME, EVENT).at(HORIZONS) == pytest.approx(UNCENSORED, abs=1e-12)
    assert kaplan_meier(TIME, EVENT).at(np.array([0.0, 0.5])).tolist() == [1, 1]


def test_curves_end_with_the_follow_up():
    """Of two rows, one is censored at 5; the curve of resamples with the other one only falls to 0 at 3."""
    time, event, times = np.array([3.0, 5.0]), np.array([True, False]), np.array([0.0, 3.0, 5.0, 5.5])
    np.testing.assert_array_equal(kaplan_meier(time, event).at(times), [1, 0.5, 0.5, np.nan])
    of_resamples = kaplan_meier(time, event, np.array([[2, 0], [0, 2]])).at(times)
    np.testing.assert_array_equal(of_resamples, [[1, 0, 0, 0], [1, 1, 1, np.nan]])
    np.testing.assert_array_equal(kaplan_meier(time[:0], event[:0]).at(times[:2]), [1, np.nan])
    survival, _ = curves_from_cells(np.array([[0, 1, 0, 0], [0, 0, 1, 0]]), np.arange(0, 9, 2.0))
    np.testing.assert_array_equal(survival.at(np.array([2.0, 4, 6, 7])), [1, 0.5, 0.5, np.nan])
    np.testing.assert_array_equal(risk_calibration(np.array([0.2, 0.2]), time, event, 6.0), [[0.2, np.nan, 2]])


def test_curves_from_cells_are_exact_if_every_time_is_an_edge():
    time, event, _ = drawn(300)
    time, until = np.minimum(time, 20), 20.0
    event = event & (time < until)
    table = cells_of(time - 0.5 * event, event, until, 40)  # events and censorings of a time are in different cells
    survival, uncensored = curves_from_cells(table, np.linspace(0, until, 41))
    times = np.arange(1.0, 20)
    assert survival.at(times) == pytest.approx(kaplan_meier(time, event).at(times), abs=1e-12)
    assert uncensored.at(times) == pytest.approx(censoring_curve(time, event).at(times), abs=1e-12)


def test_curves_from_cells_of_drawn_times_are_close():
    random = np.random.default_rng(3)
    event_time, censored_time = random.exponential(size=(2, 500))
    time, event = np.minimum(event_time, censored_time), event_time < censored_time
    edges = np.linspace(0, time.max(), 257)
    curves = curves_from_cells(cells_of(time, event, time.max()), edges)
    exact = kaplan_meier(time, event), censoring_curve(time, event)
    early = edges[edges < 1.5]
    for curve, known in zip(curves, exact, strict=True):
        assert curve.at(early) == pytest.approx(known.at(early), abs=2e-3)  # a row is 0.002 of the 500 at first


def test_rows_censored_at_the_end_survive_it():
    """All 10 rows reach the end: 4 events before it, 6 censored there."""
    table = np.array([[4, 0], [0, 6]])
    survival, uncensored = curves_from_cells(table, np.array([0.0, 1, 2]))
    assert (survival.at(np.array([2.0])).tolist(), uncensored.at(np.array([2.0])).tolist()) == ([0.6], [1])


def test_the_last_time_has_a_tenth_of_the_rows_uncensored():
    curve = Curve(np.array([1.0, 2, 3]), np.array([0.5, 0.1, 0.09]))
    assert last_time(curve, np.array([0.0, 1, 2, 3])) == 2


def test_predicted_survival_has_a_constant_hazard_between_cut_points():
    hazards = np.array([[0.2, 1.2]])
    expected = np.exp(-np.array([0, 0.1, 0.2, 0.7, 1.2, 1.2]))
    assert survival_at(hazards, np.array([1.0, 3]), np.array([0, 0.5, 1, 2, 3, 9]))[0] == pytest.approx(expected)


def test_brier_scores_are_those_of_scikit_survival():
    censoring = censoring_curve(TIME, EVENT)
    errors = brier_errors(SURVIVAL, HORIZONS, TIME, EVENT, censoring)
    assert errors.mean(0) == pytest.approx(BRIER, abs=1e-12)
    hazards = -np.log(SURVIVAL)
    assert integrated_errors(hazards, HORIZONS, HORIZONS, TIME, EVENT, censoring).mean() == pytest.approx(
        INTEGRATED, abs=1e-12
    )


def test_brier_scores_are_undefined_once_all_rows_are_censored():
    censoring = censoring_curve(np.array([1.0, 2]), np.array([True, False]))
    errors = brier_errors(
        np.full((2, 2), 0.5), np.array([1.0, 2]), np.array([1.0, 2]), np.array([True, False]), censoring
    )
    assert np.isnan(errors[:, 1]).all()
    assert errors[:, 0].tolist() == [0.25, 0.25]


def test_calibration_compares_means_with_kaplan_meier_in_each_cell():
    time, event, risk = drawn(200)
    cells = risk_calibration(risk, time, event, 12.0, cells=4)
    assert cells[:, 2].sum() == 200
    bounds = np.sort(risk)
    for mean, observed, size in cells:
        members = [r for r in range(200) if np.searchsorted(bounds, risk[r]) * 4 // 200 in _cell(risk, bounds, mean)]
        assert size == len(members)
        assert mean == pytest.approx(risk[members].mean())
        survival = 1.0
        for t in np.unique(time[members]):
            if t <= 12:
                deaths = sum(event[r] and time[r] == t for r in members)
                survival *= 1 - deaths / sum(time[r] >= t for r in members)
        assert observed == pytest.approx(1 - survival)
    assert risk_calibration(np.full(20, 0.3), time[:20], event[:20], 12.0).shape == (1, 3)


def _cell(risk, bounds, mean):
    """Cell whose mean risk is given."""
    cells = np.searchsorted(bounds, risk) * 4 // 200
    return [c for c in np.unique(cells) if risk[cells == c].mean() == pytest.approx(mean)]


def test_the_log_rank_test_is_that_of_lifelines():
    test = log_rank_of_rows(TIME, EVENT, GROUP)
    assert (test.statistic, test.p, test.df) == (*(pytest.approx(value, abs=1e-10) for value in LOG_RANK), 3)


def test_the_log_rank_test_of_two_groups_is_a_loop_over_times():
    time, event, _ = drawn(80)
    group, difference, variance = np.arange(80) % 3 == 0, 0.0, 0.0
    for t in np.unique(time[event]):
        n, own = (time >= t).sum(), ((time >= t) & group).sum()
        d = (event & (time == t)).sum()
        difference += (event & (time == t) & group).sum() - d * own / n
        variance += d * own * (n - own) * (n - d) / n**2 / max(n - 1, 1)
    test = log_rank_of_rows(time, event, group)
    assert test.statistic == pytest.approx(difference**2 / variance)
    assert test.observed.sum() == pytest.approx(test.expected.sum())


def test_a_group_without_rows_at_risk_takes_no_degree_of_freedom():
    time, event, _ = drawn(60)
    test = log_rank_of_rows(time, event, np.arange(60) % 2)
    early = log_rank_of_rows(np.append(time, 0.5), np.append(event, False), np.append(np.arange(60) % 2, 2))
    assert (early.statistic, early.df) == (pytest.approx(test.statistic), 1)
    assert log_rank_of_rows(time, event, np.zeros(60)).p == 1


def test_the_sum_of_terms_is_smaller_than_the_test_and_needs_one_number_per_site():
    time, event, _ = drawn(400)
    group = np.random.default_rng(2).integers(0, 5, 400)
    tables = np.stack([cells_of(time[group == k], event[group == k], 30.0) for k in range(5)])
    at_risk = at_risk_in_cells(tables)
    exact = log_rank(tables[:, 0], at_risk)
    hazard = tables[:, 0].sum(0) / np.maximum(at_risk.sum(0), 1)
    terms = [log_rank_term(table[0], n, hazard) for table, n in zip(tables, at_risk, strict=True)]
    test = log_rank_of_terms(*np.sum(terms, axis=0))
    assert test.statistic == pytest.approx(((exact.observed - exact.expected) ** 2 / exact.expected).sum())
    assert 0 < test.statistic < exact.statistic
    assert (test.df, test.p > exact.p) == (4, True)
