"""Intervals and tests of differences between models: over clients, and for one client from two separate intervals.

Holm 1979 (Scandinavian Journal of Statistics 6, step-down correction); Zou and Donner 2008 (Statistics in Medicine 27,
MOVER: an interval of a difference from the intervals of its parts, which for shares is Newcombe's).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unskew.tasks.intervals import NORMAL_95, Interval, student_95

LEVEL = 0.05
"""Significance level of all decisions."""
ROUNDING = 1e-9
"""Largest spread of differences, relative to the largest one, that may be due to rounding."""
TINY = 1e-12
"""Differences of metrics below this are due to rounding, and count as zero."""


@dataclass(frozen=True)
class Estimate:
    """Value of a metric, or difference of two values.

    Attributes:
        value: Value or difference.
        interval: 95 % interval, or None.
        p: p-value of a difference; None without a test.
        clients: Number of clients.
    """

    value: float
    interval: Interval = None
    p: float | None = None
    clients: int = 1

    def decision(self, lower_is_better: bool) -> str:
        """Return whether a difference is a ``gain``, a ``loss`` or a ``tie`` at the level of 5 %, or ``untested``."""
        if self.p is None:
            return "untested"
        return "tie" if self.p > LEVEL else "gain" if (self.value > 0) != lower_is_better else "loss"


def difference(a: Estimate, b: Estimate) -> Estimate:
    """Return the difference ``a - b`` of two estimates on the same samples, with an interval by MOVER.

    The two estimates are treated as independent. On the same samples they are correlated, nearly always positively, so the
    interval is too wide rather than too narrow. The p-value is that of the normal distribution whose standard deviation
    the interval has on the side of zero.

    Args:
        a: Estimate of a model.
        b: Estimate of the model that it is compared with.
    """
    value = a.value - b.value
    if a.interval is None or b.interval is None:
        return Estimate(value)
    (a_low, a_high), (b_low, b_high) = a.interval, b.interval
    below, above = math.hypot(a.value - a_low, b_high - b.value), math.hypot(a_high - a.value, b.value - b_low)
    spread = below if value > 0 else above
    z = 0.0 if value == 0 else math.inf if spread == 0 else NORMAL_95 * abs(value) / spread
    return Estimate(value, (value - below, value + above), math.erfc(z / math.sqrt(2)))


def mean_over_clients(groups: Sequence[Sequence[float]]) -> Estimate:
    """Return the mean over clients with its interval by Student's t; no interval for a group of one client.

    Several groups are the clients of several seeds, which divide the same samples anew. The groups are treated as
    repetitions of one measurement, so that more seeds do not narrow the interval. If all clients of each seed have the same
    value, the interval is None, because it cannot be computed without a spread.

    Args:
        groups: Values of the clients of each group.

    >>> mean_over_clients([[1.0, 2.0, 3.0]]).interval, mean_over_clients([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]).interval
    ((-0.484..., 4.484...), (-0.484..., 4.484...))
    """
    mean, sizes = float(np.mean([np.mean(group) for group in groups])), list(map(len, groups))
    if min(sizes) < 2 or all(map(are_equal, groups)):
        return Estimate(mean, clients=sum(sizes))
    variance = float(np.mean([np.var(group, ddof=1) / len(group) for group in groups]))
    half = student_95(min(sizes)) * math.sqrt(variance)
    return Estimate(mean, (mean - half, mean + half), clients=sum(sizes))


def are_equal(differences: Sequence[float]) -> bool:
    """Return whether differences are equal up to rounding, so that no test can be based on their spread.

    >>> are_equal([0.3 - 0.2, 0.2 - 0.1]), are_equal([0.1, 0.2])
    (True, False)
    """
    return max(differences) - min(differences) <= max(ROUNDING * max(map(abs, differences)), TINY)


def paired_p(differences: Sequence[float]) -> float | None:
    """Return the p-value of the paired t-test (Student 1908); None for fewer than two differences and for equal ones."""
    from scipy.special import stdtr

    if len(differences) < 2 or are_equal(differences):
        return None
    mean, error = float(np.mean(differences)), float(np.std(differences, ddof=1)) / math.sqrt(len(differences))
    return 2 * float(stdtr(len(differences) - 1, -abs(mean) / error))


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for several tests: the i-th smallest of m is multiplied by m - i + 1, without decreasing.

    Args:
        p_values: p-values of the single tests.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for position, index in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, min(1.0, (len(p_values) - position) * p_values[index]))
        corrected[index] = largest
    return corrected
