"""Intervals over seeds, against an integral of Student's density."""

import math

import numpy as np
import pytest

from unskew.comparison.intervals import TWO_SIDED_95, interval95


@pytest.mark.parametrize("df", [1, 2, 3, 9, 30])
def test_quantiles_hold_95_percent_of_students_density(df):
    t = TWO_SIDED_95[df - 1]
    x = np.linspace(0, t, 200_001)
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
    density = scale * (1 + x**2 / df) ** (-(df + 1) / 2)
    # The quantiles have six decimals.
    assert 2 * np.trapezoid(density, x) == pytest.approx(0.95, abs=1e-6)


def test_an_interval_is_as_wide_as_its_seeds_differ():
    low, high = interval95([1.0, 2.0, 3.0, 6.0])
    assert (low + high) / 2 == pytest.approx(3)
    assert high - low == pytest.approx(2 * TWO_SIDED_95[2] * np.std([1, 2, 3, 6], ddof=1) / 2)
    assert interval95([1.0]) is None
    assert interval95([2.0] * 40) == (2.0, 2.0)
