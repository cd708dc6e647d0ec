"""Integers that a site sends with noise: stochastic rounding, and Skellam noise from a sampler with integer arithmetic.

A Skellam variable is the difference of two Poisson variables. They are drawn by transformed rejection (Hörmann 1993, PTRS).
With large rates, the usual implementation in float64 is not exact: from 2^53 on, it never returns some integers, and below,
the logarithms of its test cancel. Here the rate is an integer, only the distance from it is drawn, and the logarithm of the
probability is computed from this distance (Loader 2000), so that little cancels. What remains are the 53 bits of a uniform
number: the probability of an integer has a relative error of about ``sqrt(rate) 2^-52``, such as 2e-11 for a rate of 1e10.
"""

from __future__ import annotations

import math

import numpy as np

from unskew.privacy.skellam import Uniform

CHUNK = 1 << 20
"""Number of entries that are drawn at a time."""
SMALLEST_RATE = 1024
"""Smallest rate for which the expansion of the factorial is exact in float64."""


def round_stochastically(x: np.ndarray, uniform: Uniform) -> np.ndarray:
    """Round each number up or down at random, so that its expectation does not change.

    Args:
        x: Numbers, ``[D]``.
        uniform: Source of random numbers.

    Returns:
        Integers, int64 ``[D]``.
    """
    lower = np.floor(x)
    rounded: np.ndarray = lower + (uniform(len(x)) < x - lower)
    return rounded.astype(np.int64)


def round_within(x: np.ndarray, bound: float, uniform: Uniform) -> np.ndarray:
    """Round stochastically until the norm is at most ``bound``; an attempt succeeds with a probability of at least 0.39.

    Args:
        x: Numbers, ``[D]``; their norm is that of the clipping.
        bound: Largest norm.
        uniform: Source of random numbers.
    """
    while True:
        rounded = round_stochastically(x, uniform)
        if float(np.linalg.norm(rounded)) <= bound:
            return rounded


def skellam_noise(rate: int, count: int, uniform: Uniform) -> np.ndarray:
    """Draw differences of two Poisson variables, whose variance is ``2 rate``.

    Args:
        rate: Rate of each Poisson variable; 0 for no noise.
        count: Number of draws.
        uniform: Source of random numbers.

    Returns:
        Integers, int64 ``[count]``.
    """
    noise = np.zeros(count, np.int64)
    for start in range(0, count if rate else 0, CHUNK):
        chunk = noise[start : start + CHUNK]
        chunk += centered_poisson(rate, len(chunk), uniform)
        chunk -= centered_poisson(rate, len(chunk), uniform)
    return noise


def centered_poisson(rate: int, count: int, uniform: Uniform) -> np.ndarray:
    """Draw Poisson variables minus their rate.

    Args:
        rate: Rate, at least 1024.
        count: Number of draws.
        uniform: Source of random numbers.

    Returns:
        Integers, int64 ``[count]``.
    """
    assert rate >= SMALLEST_RATE, "the expansion of the factorial needs a larger rate"
    b = 0.931 + 2.53 * math.sqrt(rate)
    a = -0.059 + 0.02483 * b
    inverse_alpha = 1.1239 + 1.1328 / (b - 3.4)
    surely = 0.9277 - 3.6224 / (b - 2)
    drawn = np.empty(count, np.int64)
    missing = np.arange(count)
    while len(missing):
        u, v = uniform(len(missing)) - 0.5, uniform(len(missing))
        distance = np.maximum(0.5 - np.abs(u), 2.0**-54)
        x = np.floor((2 * a / distance + b) * u + 0.43)
        accepted = (distance >= 0.07) & (v <= surely)
        # Farther than half the rate below it, probabilities are under 1e-50.
        undecided = np.flatnonzero(~accepted & (x > -rate / 2) & ((distance >= 0.013) | (v <= distance)))
        ratio = np.maximum(v[undecided], 2.0**-54) * inverse_alpha / (a / distance[undecided] ** 2 + b)
        accepted[undecided] = np.log(ratio) <= log_poisson(rate, x[undecided])
        drawn[missing[accepted]] = x[accepted].astype(np.int64)
        missing = missing[~accepted]
    return drawn


def log_poisson(rate: int, x: np.ndarray) -> np.ndarray:
    """Return the logarithm of the probability that a Poisson variable equals ``rate + x``, without cancellation.

    Args:
        rate: Rate, at least 1024.
        x: Distances from the rate, integers above ``-rate / 2``.
    """
    k, share = rate + x, x / rate
    factorial = 1 / (12 * k) - 1 / (360 * k**3)  # logarithm of k! divided by Stirling's approximation
    return -factorial - rate * ((1 + share) * np.log1p(share) - share) - np.log(2 * math.pi * k) / 2
