"""Numbers of samples per class of which small ones are not reported."""

from __future__ import annotations

from collections.abc import Sequence

MIN_COUNT = 10
"""Smallest number of samples of a class that is reported."""


def reported_support(counts: Sequence[int], least: int, exclusive: bool = True) -> list[str]:
    """Return the numbers of samples per class as text: ``<10`` for small ones, and empty if they would reveal a small one.

    Args:
        counts: Number of samples of each class.
        least: Smallest number that is reported.
        exclusive: Whether every sample has one class, so that a single missing number follows from the others.

    >>> reported_support([3, 40, 20], 10), reported_support([3, 40, 2], 10)
    (['<10', '40', ''], ['<10', '40', '<10'])
    """
    shown = [str(count) if count >= least else f"<{least}" for count in counts]
    large = [index for index, count in enumerate(counts) if count >= least]
    if exclusive and large and len(counts) - len(large) == 1:
        shown[min(large, key=lambda index: counts[index])] = ""
    return shown
