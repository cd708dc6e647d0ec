"""Discrete Laplace noise against its formula."""

import math
import random

import pytest
from scipy.stats import chisquare

from unskew.privacy.discrete_laplace import discrete_laplace

DRAWS = 20_000


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1, 2.5])
def test_the_distribution_is_that_of_the_formula(epsilon):
    draws = discrete_laplace(epsilon, DRAWS, random.Random(11).randrange)
    # P(k) = (1 - q) / (1 + q) q^|k| with q = exp(-epsilon), and P(|k| > K) = 2 q^(K + 1) / (1 + q)
    q = math.exp(-epsilon)
    most = math.ceil(2 / epsilon)
    expected = [DRAWS * (1 - q) / (1 + q) * q ** abs(k) for k in range(-most, most + 1)]
    counts = [draws.count(k) for k in range(-most, most + 1)]
    beyond = DRAWS * 2 * q ** (most + 1) / (1 + q)
    assert sum(expected) + beyond == pytest.approx(DRAWS)
    assert chisquare([*counts, DRAWS - sum(counts)], [*expected, beyond]).pvalue > 0.01


@pytest.mark.parametrize(("epsilon", "deviation"), [(0.1, 14.1), (0.5, 2.80), (1, 1.36)])
def test_the_standard_deviation_is_that_of_the_documentation(epsilon, deviation):
    draws = discrete_laplace(epsilon, DRAWS, random.Random(5).randrange)
    error = 3 * deviation * math.sqrt(5 / DRAWS) / 2  # the kurtosis is 6
    assert math.sqrt(sum(k * k for k in draws) / DRAWS) == pytest.approx(deviation, abs=error + 0.05)
    assert sum(draws) / DRAWS == pytest.approx(0, abs=4 * deviation / math.sqrt(DRAWS))


def test_the_default_source_is_the_entropy_of_the_system():
    assert discrete_laplace(0.01, 20) != discrete_laplace(0.01, 20)
