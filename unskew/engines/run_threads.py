"""Threads of runs that are trained together: one thread works at a time, until it asks for the training of a cohort."""

from __future__ import annotations

import contextvars
import signal
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

_current: ContextVar[RunThread | None] = ContextVar("current", default=None)


class Request(NamedTuple):
    """Request of a run.

    Attributes:
        order: Requests with the smallest value are answered first.
        kind: Requests with the same order and kind are answered together; None only waits for those of smaller order.
        work: What is asked for.
    """

    order: float
    kind: Hashable = None
    work: Any = None


Reply = tuple[Any, float] | BaseException
"""Answer and the run's share of the seconds, or an error to raise in the run."""


class RunThread(threading.Thread):
    """Thread of one run, which works only while ``resume`` waits for it.

    Args:
        function: Executes the run.
        stopped: List that is not empty once the run must end after its round.

    Attributes:
        request: Request that the run waits for; None if it has not started or has ended.
        waited: Called with the seconds that the run waited for others; None if it does not.
        result: Result of the function, once it has ended.
        error: Error that ended the function.
    """

    def __init__(self, function: Callable[[], Any], stopped: list[int]):
        super().__init__(daemon=True)
        self.function = function
        self.stopped = stopped
        self.request: Request | None = None
        self.waited: Callable[[float], None] | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self._requests: SimpleQueue[Request | None] = SimpleQueue()
        self._replies: SimpleQueue[Reply] = SimpleQueue()
        self._variables = contextvars.copy_context()
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run(self) -> None:
        """Execute the run; called in the thread."""
        try:
            self._variables.run(_current.set, self)
            if self._device is not None:  # the current device of PyTorch belongs to a thread
                torch.cuda.set_device(self._device)
            self.result = self._variables.run(self.function)
        except BaseException as error:  # raised by ``run_together``
            self.error = error
        self._requests.put(None)

    def ask(self, request: Request) -> Any:
        """Wait for the answer to a request; called in the thread."""
        began = time.perf_counter()
        self._requests.put(request)
        reply = self._replies.get()
        if isinstance(reply, BaseException):
            raise reply
        if self.waited is not None:
            self.waited(time.perf_counter() - began - reply[1])
        return reply[0]

    def resume(self, reply: Reply | None = None) -> None:
        """Let the run work until its next request or its end.

        Args:
            reply: Reply to its request; None starts the run.
        """
        if reply is None:
            self.start()
        else:
            self._replies.put(reply)
        try:
            self.request = self._requests.get()
        except BaseException:  # Ctrl-C, while the run works
            self.request = self._requests.get()
            raise
        if self.error is not None and not self.stopped:
            self.stopped.append(signal.SIGTERM)


def run_together(
    functions: Sequence[Callable[[], Any]], stopped: list[int], answer: Callable[[list[Any]], list[Reply]]
) -> list[Any]:
    """Execute runs in threads, answer their requests, and return the result of each.

    Requests of the earliest round are answered first, so that resumed runs catch up with each other. If a run fails, the
    others finish their round and end.

    Args:
        functions: Each executes a run.
        stopped: List that is not empty once all runs must end after their round; an error in a run adds a number.
        answer: Returns the replies to requests of one round and kind.

    Raises:
        BaseException: If a run failed or was interrupted.
    """
    threads = [RunThread(function, stopped) for function in functions]
    try:
        for thread in threads:
            if not stopped:
                thread.resume()
        while requests := {thread: thread.request for thread in threads if thread.request is not None}:
            first = min(requests.values(), key=lambda request: request.order)
            group = [thread for thread, request in requests.items() if request[:2] == first[:2]]
            works = [requests[thread].work for thread in group]
            replies = [(None, 0.0)] * len(group) if first.kind is None else answer(works)
            for thread in group:
                thread.resume(replies.pop(0))  # frees the updates that a run has applied
    finally:
        for thread in threads:
            while thread.request is not None:
                thread.resume(KeyboardInterrupt())
    errors = [thread.error for thread in threads if thread.error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, KeyboardInterrupt)):
        raise error
    return [thread.result for thread in threads]


def current_thread() -> RunThread | None:
    """Return the thread of this run, if it is trained together with others."""
    return _current.get()


def wait_for_runs(round: int) -> list[int]:
    """Wait until the runs that are trained together with this one have finished a round, so that all can end after it.

    Args:
        round: Number of the round that this run has finished, from 0.

    Returns:
        Signals, if all runs must end.
    """
    thread = _current.get()
    if thread is None:
        return []
    if thread.waited is not None:
        thread.ask(Request(round + 0.5))
    return thread.stopped
