"""Discrete Laplace noise for counts, with integer arithmetic only.

Canonne, Kamath, Steinke, "The Discrete Gaussian for Differential Privacy", 2020, arXiv:2004.00010, algorithms 1 and 2. With a
rational epsilon, ``P(k)`` is exactly proportional to ``exp(-epsilon |k|)``: no floating-point number is involved, so none can
reveal the count (Mironov 2012).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from fractions import Fraction

Below = Callable[[int], int]
"""Returns a uniform integer from 0 to below its argument."""


def discrete_laplace(epsilon: float, count: int, below: Below = secrets.randbelow) -> list[int]:
    """Draw integers ``k`` with probability proportional to ``exp(-epsilon |k|)``.

    Args:
        epsilon: Privacy loss of a count to which one of them is added, if a row changes it by 1.
        count: Number of integers.
        below: Source of randomness; by default, the system's entropy.
    """
    exact = Fraction(str(epsilon))
    return [_draw(exact.numerator, exact.denominator, below) for _ in range(count)]


def _draw(s: int, t: int, below: Below) -> int:
    """Draw one integer for epsilon ``s / t``."""
    while True:
        # A geometric variable with ratio exp(-1 / t) has this remainder and this quotient modulo t.
        remainder = below(t)
        if not _decays(remainder, t, below):
            continue
        quotient = 0
        while _decays(1, 1, below):
            quotient += 1
        size = (remainder + t * quotient) // s
        negative = below(2) == 1
        if size or not negative:  # otherwise 0 would be drawn with both signs
            return -size if negative else size


def _decays(a: int, b: int, below: Below) -> bool:
    """Return true with probability ``exp(-a / b)``, for ``a <= b``."""
    k = 1
    while below(b * k) < a:
        k += 1
    return k % 2 == 1
