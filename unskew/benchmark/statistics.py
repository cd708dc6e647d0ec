"""Statistics of a benchmark: paired differences with Holm's correction, and ranks over federations.

Holm 1979 (step-down correction), Friedman 1937 and Nemenyi 1963 as in Demsar 2006, Journal of Machine Learning
Research 7, section 3.2.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import stats

from unskew.comparison.significance import LEVEL, are_equal, holm

RESAMPLES = 10_000
"""Bootstrap samples of a mean over federations."""
Verdict = Literal["better", "worse", "tie"]


@dataclass(frozen=True)
class Difference:
    """Difference between a method and the baseline on one federation, over paired seeds.

    Attributes:
        mean: Mean difference; positive if the method is better.
        low: Lower end of the 95 % interval by Student's t, not corrected.
        high: Upper end of that interval.
        p: p-value of the paired t-test, corrected by Holm's method.
    """

    mean: float
    low: float
    high: float
    p: float

    @property
    def verdict(self) -> Verdict:
        """Decision at the level of 5 % after the correction."""
        if self.p > LEVEL:
            return "tie"
        return "better" if self.mean > 0 else "worse"


def paired_differences(
    values: Mapping[str, Sequence[float]], baseline: str, lower_is_better: bool = False
) -> dict[str, Difference]:
    """Compare methods with the baseline on the same seeds, with Holm's correction over the methods.

    Args:
        values: Metric of each seed, by method; all methods have the seeds in the same order.
        baseline: Method that the others are compared with.
        lower_is_better: Whether lower values are better.

    Returns:
        Difference of each method except the baseline.

    >>> paired_differences({"a": [1, 2, 3], "b": [2, 3.1, 3.9]}, "a")["b"].verdict
    'better'
    """
    sign = -1.0 if lower_is_better else 1.0
    reference = np.asarray(values[baseline], float)
    differences = {}
    for name, own in values.items():
        if name != baseline:
            differences[name] = _difference(sign * (np.asarray(own, float) - reference))
    corrected = holm([difference.p for difference in differences.values()])
    return {
        name: replace(difference, p=p) for (name, difference), p in zip(differences.items(), corrected, strict=True)
    }


def _difference(values: np.ndarray) -> Difference:
    """Return the mean, interval and uncorrected p-value of paired differences."""
    mean, count = float(values.mean()), len(values)
    if are_equal(values.tolist()):  # no spread to test against
        return Difference(mean, mean, mean, 1.0)
    error = float(values.std(ddof=1)) / math.sqrt(count)
    half = float(stats.t.ppf(1 - LEVEL / 2, count - 1)) * error
    p = 2 * float(stats.t.sf(abs(mean) / error, count - 1))
    return Difference(mean, mean - half, mean + half, p)


@dataclass(frozen=True)
class Ranks:
    """Ranks of methods over federations.

    Attributes:
        mean: Mean rank of each method that has a score on every federation; 1 is best, ties share the mean rank.
        federations: Number of federations.
        p: p-value of Friedman's test that all methods are equal; None with fewer than three methods or two federations.
        critical: Two mean ranks that differ by less are not distinguished (Nemenyi, 5 %); None as for ``p``.
    """

    mean: dict[str, float]
    federations: int
    p: float | None
    critical: float | None


def rank_methods(scores: Sequence[Mapping[str, float]]) -> Ranks:
    """Rank the methods that have a score on every federation.

    Args:
        scores: For each federation, the score of each method; higher is better.

    >>> rank_methods([{"a": 1, "b": 2}, {"a": 1, "b": 1}]).mean
    {'b': 1.25, 'a': 1.75}
    """
    names = [name for name in scores[0] if all(name in row for row in scores)] if scores else []
    table = np.array([[row[name] for name in names] for row in scores], float)
    if not names:
        return Ranks({}, len(scores), None, None)
    ranks = stats.rankdata(-table, axis=1).mean(axis=0)
    order = np.argsort(ranks, kind="stable")
    mean = {names[i]: float(ranks[i]) for i in order}
    count, federations = len(names), len(scores)
    if count < 3 or federations < 2:
        return Ranks(mean, federations, None, None)
    p = float(stats.friedmanchisquare(*table.T).pvalue)
    quantile = float(stats.studentized_range.ppf(1 - LEVEL, count, np.inf)) / math.sqrt(2)
    return Ranks(mean, federations, p, quantile * math.sqrt(count * (count + 1) / (6 * federations)))


def bootstrap_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return the 95 % percentile interval of a mean, from resampled federations.

    Args:
        values: Value of each federation.
        seed: Seed of the resampling.
    """
    drawn = np.random.default_rng(seed).choice(np.asarray(values, float), size=(RESAMPLES, len(values)))
    low, high = np.quantile(drawn.mean(axis=1), [LEVEL / 2, 1 - LEVEL / 2])
    return float(low), float(high)
