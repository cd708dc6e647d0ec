"""Intervals and tests of differences, against published examples, SciPy and statsmodels."""

import numpy as np
import pytest
from scipy import stats

from unskew.comparison.significance import Estimate, difference, holm, mean_over_clients, paired_p
from unskew.tasks.intervals import wilson_interval


def share(hits, n):
    return Estimate(hits / n, wilson_interval(hits, n))


@pytest.mark.parametrize(
    ("a", "b", "low", "high"),
    [  # Newcombe 1998, Statistics in Medicine 17, Table II, method 10
        (share(56, 70), share(48, 80), 0.0524, 0.3339),
        (share(9, 10), share(3, 10), 0.1705, 0.8090),
        (share(6, 7), share(2, 7), 0.0582, 0.8062),
        (share(5, 56), share(0, 29), -0.0381, 0.1926),
        (share(10, 10), share(0, 10), 0.6075, 1.0),
    ],
)
def test_the_difference_of_two_shares_has_newcombes_interval(a, b, low, high):
    found = difference(a, b)
    assert found.interval == pytest.approx((low, high), abs=5.1e-5)
    back = difference(b, a)
    assert back.interval == pytest.approx((-found.interval[1], -found.interval[0]))
    assert back.p == found.p


@pytest.mark.parametrize("b", [share(30, 60), share(38, 60), share(40, 60), share(20, 60)])
def test_the_p_value_is_below_the_level_exactly_if_the_interval_excludes_zero(b):
    found = difference(share(30, 60), b)
    assert (found.p < 0.05) == (not found.interval[0] <= 0 <= found.interval[1])


def test_equal_estimates_tie_and_estimates_without_intervals_are_not_tested():
    assert difference(share(3, 9), share(3, 9)).p == 1
    assert difference(Estimate(0.5, (0.5, 0.5)), Estimate(0.5, (0.5, 0.5))).decision(False) == "tie"
    assert difference(Estimate(0.6, (0.6, 0.6)), Estimate(0.5, (0.5, 0.5))).decision(False) == "gain"
    assert difference(Estimate(0.9), share(3, 9)).decision(False) == "untested"
    assert difference(share(95, 100), share(30, 100)).decision(lower_is_better=True) == "loss"


def test_the_mean_over_clients_has_an_interval_of_student():
    values = np.random.default_rng(0).normal(size=12)
    found = mean_over_clients([values])
    wanted = stats.t.interval(0.95, 11, values.mean(), stats.sem(values))
    assert found.interval == pytest.approx(wanted, abs=1e-6)
    assert mean_over_clients([[1.0]]) == Estimate(1.0)


def test_repeating_the_same_clients_in_more_seeds_does_not_narrow_the_interval():
    values = [1.0, 4.0, 2.0, 7.0]
    one, many = mean_over_clients([values]), mean_over_clients([values] * 5)
    assert (one.value, *one.interval) == pytest.approx((many.value, *many.interval))
    assert (one.clients, many.clients) == (4, 20)


def test_the_paired_p_value_is_that_of_scipy():
    values = np.random.default_rng(1).normal(0.5, size=7)
    assert paired_p(values) == pytest.approx(stats.ttest_1samp(values, 0).pvalue, rel=1e-12)


@pytest.mark.parametrize("values", [[0.3], [0.0, 0.0], [0.01, 0.01], [0.9 - 0.8, 0.8 - 0.7, 0.3 - 0.2], [1e-17, 2e-17]])
def test_differences_without_a_spread_are_not_tested(values):
    assert paired_p(values) is None
    assert mean_over_clients([values, values]).interval is None


def test_holm_equals_values_by_hand():
    assert holm([0.01, 0.02, 0.03, 0.04]) == pytest.approx([0.04, 0.06, 0.06, 0.06])
    assert holm([0.9, 0.5]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def test_holm_is_that_of_a_plain_loop():
    p = np.random.default_rng(2).random(20) ** 3
    wanted, order = np.empty(20), np.argsort(p)
    for rank, at in enumerate(order):
        wanted[at] = min(1.0, max((20 - earlier) * p[other] for earlier, other in enumerate(order[: rank + 1])))
    assert holm(p) == pytest.approx(wanted)
