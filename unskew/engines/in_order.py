"""Reordering of results that arrive in any order into the order of their tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Value = TypeVar("Value")


def in_order(count: int, receive: Callable[[int], Iterable[tuple[int, Value]]]) -> Iterator[Value]:
    """Yield the results of the tasks 0 to ``count - 1`` in this order, in whichever order they arrive.

    Args:
        count: Number of tasks.
        receive: Called with the number of the task whose result is needed next. It starts tasks if possible, waits for
            at least one result, and returns the new results with their task numbers.

    Yields:
        The result of each task.

    >>> list(in_order(3, lambda needed: [(2, "c"), (0, "a")] if needed == 0 else [(1, "b")]))
    ['a', 'b', 'c']
    """
    early: dict[int, Value] = {}
    for needed in range(count):
        while needed not in early:
            early.update(receive(needed))
        yield early.pop(needed)
