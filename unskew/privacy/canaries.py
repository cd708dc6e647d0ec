"""Empirical lower bound of the privacy loss, from canary clients.

Andrew, Kairouz, Oh, Oprea, McMahan, Suriyakumar, "One-shot Empirical Privacy Estimation for Federated Learning", 2023,
arXiv:2302.03098. Each canary client sends a random unit direction times the clipping norm. After the run, the cosines between
the change of the model and the directions of canaries that took part are Gaussian with mean ``mu`` and deviation ``sigma``;
those of directions that nobody sent have mean 0 and deviation ``1 / sqrt(d)``. The epsilon that separates these two Gaussians
at ``delta`` is the estimate.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

LARGEST = 1e4
"""Largest epsilon that is reported."""
POINTS = 40_001
"""Number of points of the numerical integration."""


def gaussian_epsilon(mean: float, deviation: float, null: float, delta: float) -> float:
    """Return the smallest epsilon at which ``N(mean, deviation^2)`` and ``N(0, null^2)`` are (epsilon, delta)-close.

    Args:
        mean: Mean of the first distribution.
        deviation: Standard deviation of the first distribution, above 0.
        null: Standard deviation of the second distribution, above 0.
        delta: Delta of the guarantee.
    """
    low = min(mean - 40 * deviation, -40 * null)
    high = max(mean + 40 * deviation, 40 * null)
    # Dense around both centers, also if one distribution is much narrower.
    grids = [np.linspace(low, high, POINTS), np.linspace(mean - 12 * deviation, mean + 12 * deviation, POINTS)]
    x = np.unique(np.concatenate([*grids, np.linspace(-12 * null, 12 * null, POINTS)]))
    first = -(((x - mean) / deviation) ** 2) / 2 - math.log(deviation * math.sqrt(2 * math.pi))
    second = -((x / null) ** 2) / 2 - math.log(null * math.sqrt(2 * math.pi))

    def delta_of(epsilon: float) -> float:
        worst = 0.0
        for p, q in ((first, second), (second, first)):
            gap = np.where(p > epsilon + q, np.exp(p) * -np.expm1(np.minimum(epsilon + q - p, 0.0)), 0.0)
            worst = max(worst, float(np.trapezoid(gap, x)))
        return worst

    if delta_of(0.0) <= delta:
        return 0.0
    above, below = 1.0, 0.0
    while delta_of(above) > delta:
        below, above = above, 2 * above
        if above > LARGEST:
            return LARGEST
    for _ in range(60):
        middle = (below + above) / 2
        below, above = (middle, above) if delta_of(middle) > delta else (below, middle)
    return below


def empirical_epsilon(
    cosines: np.ndarray, parameters: int, delta: float, confidence: float = 0.95
) -> tuple[float, float]:
    """Return the estimated epsilon, and a lower bound that accounts for the number of canaries.

    Args:
        cosines: Cosine of each canary's direction and the change of the model, ``[n]``.
        parameters: Number of parameters ``d``.
        delta: Delta of the guarantee.
        confidence: Confidence of the lower bound.
    """
    count = len(cosines)
    mean, deviation = float(cosines.mean()), float(cosines.std(ddof=1))
    null = 1 / math.sqrt(parameters)
    # Without noise the cosines hardly differ; below this, rounding decides.
    deviation = max(deviation, 1e-3 * null)
    estimate = gaussian_epsilon(mean, deviation, null, delta)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    lower_mean = max(0.0, mean - z * deviation / math.sqrt(count))
    # A difference of the deviations counts only as far as it cannot be chance.
    margin = z / math.sqrt(2 * (count - 1))
    deviations = {max(null, deviation * (1 - margin)), max(null, deviation), max(null, deviation * (1 + margin))}
    lower = min(gaussian_epsilon(lower_mean, wide, null, delta) for wide in deviations)
    return estimate, min(lower, estimate)
