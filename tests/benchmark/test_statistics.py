"""Statistics of the benchmark against scipy, published tables and hand computations."""

import math

import numpy as np
import pytest
from scipy import stats

from unskew.benchmark.statistics import bootstrap_interval, paired_differences, rank_methods


def test_differences_are_those_of_the_paired_t_test():
    draws = np.random.default_rng(0)
    base = draws.normal(70, 2, 5)
    values = {"base": base, "a": base + draws.normal(1, 0.5, 5), "b": base + draws.normal(0, 3, 5)}
    differences = paired_differences(values, "base")
    alone = {name: stats.ttest_rel(values[name], base) for name in ("a", "b")}
    smaller, larger = sorted(alone, key=lambda name: alone[name].pvalue)
    expected = {smaller: 2 * alone[smaller].pvalue}
    expected[larger] = max(expected[smaller], alone[larger].pvalue)
    for name, difference in differences.items():
        low, high = alone[name].confidence_interval(0.95)
        np.testing.assert_allclose((difference.low, difference.high), (low, high), rtol=1e-10)
        np.testing.assert_allclose(difference.p, min(1, expected[name]), rtol=1e-10)
        np.testing.assert_allclose(difference.mean, np.mean(values[name] - base), rtol=1e-12)


def test_lower_is_better_turns_the_sign_and_equal_seeds_are_a_tie():
    values = {"base": [1.0, 2.0, 3.0], "same": [1.0, 2.0, 3.0], "lower": [0.5, 1.5, 2.4]}
    differences = paired_differences(values, "base", lower_is_better=True)
    assert differences["same"].verdict == "tie"
    assert differences["lower"].mean == pytest.approx(1.6 / 3)
    assert differences["lower"].verdict == "better"
    assert paired_differences(values, "base")["lower"].verdict == "worse"
    equal = paired_differences({"base": [90.0, 80.3, 85.1], "other": [91.0, 81.3, 86.1]}, "base")["other"]
    assert (equal.mean, equal.verdict) == (pytest.approx(1), "tie")  # no spread, so nothing is decided


def test_critical_difference_of_published_tables():
    # Demsar 2006, Table 5(a): q = 2.569 for four classifiers; critical difference 1.25 for 14 data sets.
    scores = [
        {name: float(value) for name, value in zip("abcd", row, strict=True)}
        for row in np.eye(4)[[0, 1, 2, 3] * 4][:14]
    ]
    ranks = rank_methods(scores)
    assert ranks.critical == pytest.approx(2.569 * math.sqrt(4 * 5 / (6 * 14)), rel=1e-3)
    assert ranks.critical == pytest.approx(1.25, abs=0.005)


def test_ranks_share_ties_and_leave_out_incomplete_methods():
    scores = [{"a": 3.0, "b": 2.0, "c": 2.0, "d": 9.0}, {"a": 1.0, "b": 2.0, "c": 3.0}]
    ranks = rank_methods(scores)
    assert ranks.mean == {"c": 1.75, "a": 2.0, "b": 2.25}
    expected = stats.friedmanchisquare([3, 1], [2, 2], [2, 3]).pvalue
    assert ranks.p == pytest.approx(expected)
    assert rank_methods([]).mean == {}


def test_bootstrap_of_a_mean_is_near_the_normal_interval():
    values = np.random.default_rng(1).normal(size=400)
    low, high = bootstrap_interval(values)
    half = 1.96 * values.std() / math.sqrt(len(values))
    # The quantiles of 10,000 resamples have a standard error of about 3 % of the half width.
    np.testing.assert_allclose((low, high), (values.mean() - half, values.mean() + half), atol=0.12 * half)
    assert bootstrap_interval([2.0]) == (2.0, 2.0)
