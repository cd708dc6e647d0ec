"""Distributed noise under secure aggregation: the grid of the integers that sites send, and epsilon of their noisy sum.

Agarwal, Kairouz, Liu, "The Skellam Mechanism for Differentially Private Federated Learning", 2021, arXiv:2110.04995;
Kairouz, Liu, Steinke, 2021, arXiv:2102.06387. A site divides its clipped vector of ``D`` numbers by the grid step ``gamma``,
rounds it stochastically to a norm of at most ``B``, and adds to each number the difference of two Poisson variables of rate
``lambda``::

    B = min( C/gamma + sqrt(D), sqrt( (C/gamma)^2 + D/4 + C/gamma + sqrt(D)/2 ) )
    2 lambda = (sigma / gamma)^2, sigma = z C / sqrt(t)

A sum of Skellam variables is a Skellam variable. So a sum with the noise of at least ``t`` sites has at least the variance
``mu = 2 lambda t``, whichever sites dropped out. Its Renyi divergence of order ``a``, an integer above 1, is at most::

    a l2^2 / (2 mu) + min( ((2a - 1) l2^2 + 6 l1) / (4 mu^2), 3 l1 / (2 mu) ), l2 = B, l1 = min(sqrt(D) B, B^2)

in units of the grid. As ``gamma`` decreases, this approaches the divergence of the Gaussian mechanism, ``a / (2 z^2)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from unskew.errors import ConfigError
from unskew.privacy.accounting import smallest_noise

BITS = 32
"""Number of bits of an entry of the sum."""
STEPS_PER_CLIP = 64
"""Grid steps in ``C / sqrt(D)``, the root mean square of an update of norm ``C``; the rounding then adds 1 % to the norm at
most, if there are 10,000 numbers or more."""
STEPS_PER_NOISE = 64
"""Smallest number of grid steps in the standard deviation of a site's noise."""
NOISE_RANGE = 10
"""Standard deviations of the summed noise for which the range has room; an entry exceeds it with probability below 1e-21."""
ORDERS = np.unique(np.concatenate([np.arange(2.0, 257.0), np.geomspace(256, 2**24, 400).round()]))
"""Orders of the Renyi divergence, integers."""


@dataclass(frozen=True)
class SkellamRounds:
    """A number of equal rounds of the Skellam mechanism, in units of the grid.

    Attributes:
        l2: Largest Euclidean norm of what one site contributes, without its noise.
        l1: Largest sum of magnitudes of the same.
        variance: Guaranteed variance of the noise of an entry of the sum; 0 without noise.
        steps: Number of rounds.
    """

    l2: float
    l1: float
    variance: float
    steps: int = 1

    def divergence(self, orders: np.ndarray) -> np.ndarray:
        """Return the Renyi divergence of all rounds.

        Args:
            orders: Orders, integers above 1.
        """
        small = ((2 * orders - 1) * self.l2**2 + 6 * self.l1) / (4 * self.variance**2)
        per_round = orders * self.l2**2 / (2 * self.variance) + np.minimum(small, 3 * self.l1 / (2 * self.variance))
        return np.asarray(self.steps * per_round)

    def doubled(self) -> SkellamRounds:
        """Return the rounds if the sum changes twice as much: a client is replaced, or another one takes its place."""
        return replace(self, l2=2 * self.l2, l1=2 * self.l1)


@dataclass(frozen=True)
class SkellamGrid:
    """Grid of the integers that sites send. It depends on public numbers only, never on data.

    Attributes:
        step: Grid step ``gamma``.
        bound: Largest norm ``B`` of a rounded vector, in steps.
        rate: Rate ``lambda`` of each of the two Poisson variables of an entry at one site; 0 without noise.
        size: Number of entries ``D``.
        honest: Number ``t`` of sites whose noise a sum contains at least.
    """

    step: float
    bound: float
    rate: int
    size: int
    honest: int

    def rounds(self, steps: int = 1) -> SkellamRounds:
        """Return a number of rounds of the mechanism on this grid."""
        l1 = min(math.sqrt(self.size) * self.bound, self.bound**2)
        return SkellamRounds(self.bound, l1, 2.0 * self.rate * self.honest, steps)


def skellam_grid(clip: float, noise: float, size: int, honest: int, sites: int) -> SkellamGrid:
    """Choose the grid: fine enough that rounding hardly costs privacy, and coarse enough that no sum exceeds 32 bits.

    The range has room for the largest possible sum of clipped vectors, ``sites * clip`` in one entry, and for the noise.

    Args:
        clip: Clipping norm ``C``.
        noise: Noise multiplier ``z`` of the sum of ``honest`` sites.
        size: Number of entries ``D`` of what a site sends.
        honest: Smallest number ``t`` of sites in a sum that add their noise.
        sites: Largest number ``n`` of sites in a sum.

    Raises:
        ConfigError: If the range leaves too few steps for the noise.

    >>> grid = skellam_grid(clip=1.0, noise=2.0, size=10_000, honest=4, sites=10)
    >>> round(1 / grid.step), grid.rate, round(grid.bound)
    (6400, 20480000, 6401)
    """
    deviation = noise * clip / math.sqrt(honest)
    step = clip / (STEPS_PER_CLIP * math.sqrt(size))
    if deviation > 0:
        step = min(step, deviation / STEPS_PER_NOISE)
    room = 2 ** (BITS - 1) * (1 - 1e-3) - sites
    step = max(step, (sites * clip + NOISE_RANGE * math.sqrt(sites) * deviation) / room) if room > 0 else math.inf
    if 0 < deviation < STEPS_PER_NOISE * step * (1 - 1e-9):
        raise ConfigError(
            f"The sum of {sites} sites leaves too few of {BITS} bits for noise_at=sites with noise {noise:g}. Use more "
            "noise, a smaller cohort, or noise_at=server."
        )
    norm, root = clip / step, math.sqrt(size)
    bound = min(norm + root, math.sqrt(norm**2 + size / 4 + norm + root / 2))
    return SkellamGrid(step, bound, math.ceil((deviation / step) ** 2 / 2), size, honest)


def skellam_epsilon(history: Iterable[SkellamRounds], delta: float) -> float:
    """Compute an upper bound of the ``epsilon`` spent by a history of rounds with noise at the sites.

    Args:
        history: Rounds so far.
        delta: Probability ``delta`` of the guarantee, in (0, 1).

    Returns:
        The bound; 0 for an empty history, infinity without noise.

    Raises:
        ConfigError: If ``delta`` is out of its range.
    """
    if not 0 < delta < 1:
        raise ConfigError(f"delta is {delta}; it must be between 0 and 1.")
    history = [entry for entry in history if entry.steps]
    if not history:
        return 0.0
    if any(entry.variance == 0 for entry in history):
        return math.inf
    divergence = sum(entry.divergence(ORDERS) for entry in history)
    # Conversion of Balle et al. 2020 (arXiv:1905.09982), as in opacus.
    bounds = divergence + np.log1p(-1 / ORDERS) - (math.log(delta) + np.log(ORDERS)) / (ORDERS - 1)
    return max(0.0, float(bounds.min()))


@lru_cache(maxsize=256)
def skellam_noise_for(
    target_epsilon: float, delta: float, clip: float, size: int, honest: int, sites: int, rounds: int
) -> float:
    """Find the smallest noise multiplier with which a number of rounds spends at most ``target_epsilon``.

    Args:
        target_epsilon: Privacy budget.
        delta: Probability ``delta`` of the guarantee, in (0, 1).
        clip: Clipping norm ``C``.
        size: Number of entries ``D`` of what a site sends.
        honest: Smallest number ``t`` of sites in a sum that add their noise.
        sites: Largest number ``n`` of sites in a sum.
        rounds: Number of rounds.

    Returns:
        The noise multiplier, at most 0.1 % larger than necessary.

    Raises:
        ConfigError: If no noise multiplier reaches the budget.
    """

    def is_within(noise: float) -> bool:
        try:
            grid = skellam_grid(clip, noise, size, honest, sites)
        except ConfigError:  # too little noise for the grid
            return False
        return skellam_epsilon([grid.rounds(rounds)], delta) <= target_epsilon

    return smallest_noise(is_within, target_epsilon, f"delta={delta:g} with noise at the sites")


Uniform = Callable[[int], np.ndarray]
"""Returns a number of independent float64 numbers, uniform in [0, 1)."""
