"""Numbers of samples per class of which small ones are not reported."""

from __future__ import annotations

from collections.abc import Sequence

MIN_COUNT = 10
"""Smallest number of samples of a class that is reported."""


def follow_from_sum(counts: Sequence[int], lowest: int, highest: int) -> bool:
    """Return whether counts follow from their sum: a single one, only the smallest, or only the largest possible ones.

    Args:
        counts: Hidden counts, at least one.
        lowest: Smallest value that a hidden count may have.
        highest: Largest value that a small count may have.

    >>> follow_from_sum([3, 3], 1, 9), follow_from_sum([9, 9], 1, 9), follow_from_sum([3], 1, 9)
    (False, True, True)
    """
    return min(counts) == max(counts) and (len(counts) == 1 or counts[0] in (lowest, highest))


def reported_support(counts: Sequence[int], least: int, exclusive: bool = True) -> list[str]:
    """Return the numbers of samples per class as text: ``<10`` for small ones, or empty if they follow from the others.

    All classes with the smallest larger number are then empty as well, so that nobody knows which of them are small: every
    exchange of numbers among the empty classes gives the same texts.

    Args:
        counts: Number of samples of each class.
        least: Smallest number that is reported.
        exclusive: Whether every sample has one class, so that the sum of the numbers is known.

    >>> reported_support([3, 40, 20], 10), reported_support([3, 40, 2], 10)
    (['', '40', ''], ['<10', '40', '<10'])
    """
    small = [count for count in counts if count < least]
    if not (exclusive and small and follow_from_sum(small, 0, least - 1)):
        return [str(count) if count >= least else f"<{least}" for count in counts]
    smallest = min((count for count in counts if count >= least), default=least)
    return [str(count) if count > smallest else "" for count in counts]
