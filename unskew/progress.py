"""Progress of long operations: the operation reports it, and a command that displays it subscribes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Follow = Callable[[str, float, float], None]
"""Told what is done, how much of it is done, and how much there is."""
PATIENCE = 2.0
"""Seconds after which a reader wants to know."""
_follow: ContextVar[Follow | None] = ContextVar("follow", default=None)


@contextmanager
def report_progress_to(follow: Follow, after: float = PATIENCE) -> Iterator[None]:
    """Context manager that forwards progress of operations longer than ``after`` seconds to ``follow``.

    Args:
        follow: Receives text, finished amount and total.
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
    """Say how much is done, if anybody listens.

    Args:
        text: Name of the operation.
        done: Finished amount.
        total: Total amount.
    """
    follow = _follow.get()
    if follow is not None:
        follow(text, done, total)
