"""Progress of long operations: an operation reports it to the command that displays it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Follow = Callable[[str, float, float], None]
"""Receives the name of an operation, the finished amount and the total amount."""
PATIENCE = 2.0
"""Seconds after which progress is displayed."""
_follow: ContextVar[Follow | None] = ContextVar("follow", default=None)


@contextmanager
def report_progress_to(follow: Follow, after: float = PATIENCE) -> Iterator[None]:
    """Context manager that forwards progress to ``follow``, once the block has run for ``after`` seconds.

    Args:
        follow: Receives the name of the operation, the finished amount and the total amount.
        after: Seconds before the first report.

    >>> with report_progress_to(print, after=0):
    ...     report_progress("files read", 1, 2)
    files read 1 2
    >>> report_progress("files read", 2, 2)
    """
    begun = time.monotonic()

    def patient(text: str, done: float, total: float) -> None:
        if time.monotonic() - begun >= after:
            follow(text, done, total)

    token = _follow.set(patient)
    try:
        yield
    finally:
        _follow.reset(token)


def report_progress(text: str, done: float, total: float) -> None:
    """Report progress to the current receiver, if there is one.

    Args:
        text: Name of the operation.
        done: Finished amount.
        total: Total amount.
    """
    follow = _follow.get()
    if follow is not None:
        follow(text, done, total)
