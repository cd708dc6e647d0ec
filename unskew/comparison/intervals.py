"""Confidence intervals for means over few seeds: Student's t (Student 1908, Biometrika 6)."""

from __future__ import annotations

import math
from collections.abc import Sequence

TWO_SIDED_95 = (
    *(12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157, 2.228139),
    *(2.200985, 2.178813, 2.160369, 2.144787, 2.131450, 2.119905, 2.109816, 2.100922, 2.093024, 2.085963),
    *(2.079614, 2.073873, 2.068658, 2.063899, 2.059539, 2.055529, 2.051831, 2.048407, 2.045230, 2.042272),
)
"""Quantiles at 97.5 % for 1 to 30 degrees of freedom; the last one is used for more, which is slightly too wide."""


def interval95(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean of normal values, ``mean -+ t s / sqrt(n)``; None for fewer than two values.

    >>> interval95([1.0, 2.0, 3.0])
    (-0.484..., 4.484...)
    """
    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = TWO_SIDED_95[min(n - 2, len(TWO_SIDED_95) - 1)] * std / math.sqrt(n)
    return mean - half, mean + half
