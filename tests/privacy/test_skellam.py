"""Noise at the sites: the sampler, the rounding and the grid against probabilities, and epsilon against the Gaussian's."""

import math

import numpy as np
import pytest
from scipy.stats import chisquare, poisson

from unskew.errors import ConfigError
from unskew.privacy.accounting import GaussianRounds, rdp_epsilon
from unskew.privacy.integer_noise import (
    centered_poisson,
    log_poisson,
    round_stochastically,
    round_within,
    skellam_noise,
)
from unskew.privacy.skellam import (
    ORDERS,
    SkellamRounds,
    skellam_epsilon,
    skellam_grid,
    skellam_noise_for,
)
from unskew.secret_draws import SystemEntropy

N = 1_000_000


def uniform(seed=0):
    return np.random.default_rng(seed).random


@pytest.mark.parametrize("rate", [1024, 20_000])
def test_poisson_draws_have_poisson_frequencies(rate):
    drawn = centered_poisson(rate, N, uniform(3)) + rate
    low, high = int(poisson.ppf(1e-4, rate)), int(poisson.ppf(1 - 1e-4, rate))
    observed = np.bincount(np.clip(drawn, low, high) - low, minlength=high - low + 1)
    expected = poisson.pmf(np.arange(low, high + 1), rate)
    expected[0], expected[-1] = poisson.cdf(low, rate), poisson.sf(high - 1, rate)
    assert chisquare(observed, expected / expected.sum() * N).pvalue > 1e-4


@pytest.mark.parametrize("rate", [1024, 10**6, 10**10])
def test_the_logarithm_of_a_probability_is_exact(rate):
    """The probabilities add up to one, with the mean 0 and the variance of a Poisson variable."""
    width = 12 * math.isqrt(rate)
    every = max(
        1, width // 100_000
    )  # an integral by the trapezoid rule, exact far beyond float64 for this smooth function
    x = np.arange(-min(width, rate // 2 - 1) // every * every + every, width, every, dtype=float)
    p = np.exp(log_poisson(rate, x)) * every
    assert p.sum() == pytest.approx(1, abs=1e-12)
    assert (p * x).sum() == pytest.approx(0, abs=1e-9 * math.sqrt(rate))
    assert (p * x * x).sum() == pytest.approx(rate, rel=1e-11)


def test_large_rates_return_all_integers():
    """Numbers of the size of the rate have a spacing of 16 in float64, so a usual sampler returns multiples of it."""
    noise = skellam_noise(10**17, 100_000, uniform())
    for bit in range(5):
        ones = int((noise >> bit & 1).sum())
        assert abs(ones - 50_000) < 5 * math.sqrt(25_000)


def test_a_sum_of_skellam_variables_is_one_with_the_summed_variance():
    n, rate = 5, 4000
    total = sum(skellam_noise(rate, N, uniform(k)) for k in range(n)).astype(float)
    variance = 2 * n * rate
    fourth = variance + 3 * variance**2  # of one Skellam variable: its fourth cumulant equals its variance
    # Standard errors of the mean of squares and of fourth powers, with the moments of a Gaussian.
    assert (total**2).mean() == pytest.approx(variance, abs=5 * variance * math.sqrt(2 / N))
    assert (total**4).mean() == pytest.approx(fourth, abs=5 * variance**2 * math.sqrt(96 / N))
    assert total.mean() == pytest.approx(0, abs=5 * math.sqrt(variance / N))


def test_a_real_site_never_draws_the_same_noise_twice():
    first, second = SystemEntropy().stream("site noise"), SystemEntropy().stream("site noise")
    assert not np.array_equal(skellam_noise(5000, 9, first), skellam_noise(5000, 9, second))
    assert (skellam_noise(0, 9, first) == 0).all()


def test_rounding_is_unbiased_and_to_a_neighbor():
    x = np.array([-1.7, -0.5, 0.0, 0.2, 3.0, 2.9])
    draws = np.stack([round_stochastically(x, uniform(seed)) for seed in range(20_000)])
    assert (np.abs(draws - x) < 1).all()
    assert np.abs(draws.mean(0) - x).max() < 5 * 0.5 / math.sqrt(20_000)


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_no_rounded_vector_is_longer_than_the_bound(size):
    grid = skellam_grid(clip=0.7, noise=0.5, size=size, honest=3, sites=5)
    for seed in range(50):
        x = np.random.default_rng(seed).normal(size=size)
        x *= 0.7 / np.linalg.norm(x) / grid.step
        assert np.linalg.norm(round_within(x, grid.bound, uniform(seed))) <= grid.bound


def test_an_opened_sum_differs_from_the_plain_one_by_less_than_one_step_per_site():
    """Each site rounds every entry to a neighbor: ``n`` steps bound the error, and its deviation is at most sqrt(n) / 2."""
    n, size = 9, 5000
    grid = skellam_grid(clip=1.0, noise=0.0, size=size, honest=3, sites=n)
    vectors = np.random.default_rng(1).normal(size=(n, size))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    rounded = sum(round_within(v / grid.step, grid.bound, uniform(k)) for k, v in enumerate(vectors))
    error = np.abs(grid.step * rounded - vectors.sum(0))
    assert error.max() < n * grid.step
    assert math.sqrt((error**2).mean()) < grid.step * math.sqrt(n) / 2 * 1.05


@pytest.mark.parametrize("sites", [3, 100, 10_000])
def test_no_sum_wraps_around(sites):
    """Not even if all sites send the whole norm in the same entry."""
    grid = skellam_grid(clip=1.0, noise=1.0, size=1000, honest=3, sites=sites)
    noise = math.sqrt(2 * grid.rate * sites)
    largest = sites * (math.floor(1 / grid.step) + 1)
    assert largest + 9.9 * noise < 2**31
    drawn = largest + np.round(np.random.default_rng(0).normal(size=N) * noise).astype(np.int64)
    assert np.array_equal(drawn.astype(np.int32), drawn)


@pytest.mark.parametrize(("noise", "honest", "rounds"), [(1.0, 1, 1), (4.0, 7, 30), (10.0, 20, 100)])
def test_epsilon_is_within_one_percent_of_the_gaussians(noise, honest, rounds):
    spent = skellam_epsilon([skellam_grid(0.5, noise, 100_000, honest, 30).rounds(rounds)], 1e-5)
    gaussian = ORDERS * rounds / (2 * noise**2)
    bounds = gaussian + np.log1p(-1 / ORDERS) - np.log(1e-5 * ORDERS) / (ORDERS - 1)
    assert bounds.min() <= spent < 1.01 * bounds.min()
    pytest.importorskip("opacus")
    assert spent == pytest.approx(rdp_epsilon([GaussianRounds(noise, 1.0, rounds)], 1e-5), rel=0.02)


def test_the_divergence_is_that_of_the_paper_by_hand():
    """a = 2, l2 = 3, l1 = 5, mu = 7: 9/7 + min((27 + 30)/196, 15/14)."""
    rounds = SkellamRounds(3.0, 5.0, 7.0, steps=4)
    assert rounds.divergence(np.array([2.0])) == pytest.approx(4 * (9 / 7 + 57 / 196))
    assert SkellamRounds(3.0, 5.0, 0.1).divergence(np.array([2.0])) == pytest.approx(90 + 75)


def test_epsilon_increases_and_the_noise_lasts_all_rounds():
    def spent(noise, rounds, honest=4):
        return skellam_epsilon([skellam_grid(1.0, noise, 5000, honest, 10).rounds(rounds)], 1e-4)

    assert spent(2.0, 10) < spent(2.0, 11)
    assert spent(2.0, 10) < spent(1.9, 10)
    assert spent(0.0, 1) == math.inf
    assert skellam_epsilon([], 1e-4) == 0
    noise = skellam_noise_for(3.0, 1e-4, 1.0, 5000, 4, 10, 20)
    assert 2.99 < spent(noise, 20) <= 3.0
    # The variance of a sum with the noise of `honest` sites does not depend on their number.
    assert spent(2.0, 10, honest=10) == pytest.approx(spent(2.0, 10), rel=1e-3)


def test_a_cohort_too_large_for_the_bits_is_an_error():
    with pytest.raises(ConfigError, match="too few of 32 bits"):
        skellam_grid(1.0, 0.1, 1000, 10**6, 10**7)
