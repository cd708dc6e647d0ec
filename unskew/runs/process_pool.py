"""Works in processes of one machine: who does what, and what they say.

The processes are spawned, not forked, so whatever they are given must be found by its name there.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import signal
import time
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn, cast

from unskew.engines.cpu import num_cores
from unskew.errors import ConfigError, EngineError, UnskewError
from unskew.records.recorder import Callback, notify_warning
from unskew.runs.pool_worker import run_job
from unskew.simulation.round_loop import RunInterrupted

GLANCE = 0.2
"""Seconds between two looks whether Ctrl-C was pressed."""


@dataclass(frozen=True)
class Job:
    """A run, or anything else that takes long.

    Attributes:
        name: What its result is found by.
        function: Called in another process as ``function(given, *arguments, callbacks=...)``; it has a name there, too.
        arguments: Its own.
        follow: Gives its followers, which stay here, when it begins.
        after: Names of works that must be done before.
    """

    name: Hashable
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    follow: Callable[[], Sequence[Callback]] = tuple
    after: tuple[Hashable, ...] = ()


@contextlib.contextmanager
def raise_if_unpicklable() -> Iterator[None]:
    """Context manager that converts pickling errors to a readable error."""
    try:
        yield
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"Cannot run in parallel: an argument cannot be pickled: {error}. "
            "Define classes and functions at the top of a module and hold no open files, or leave out parallel."
        ) from error


@dataclass
class RunningJob:
    """A work that is being done."""

    work: Job
    callbacks: list[Callback]

    @classmethod
    def of(cls, work: Job) -> RunningJob:
        """A work that begins, with its followers."""
        return cls(work, list(work.follow()))

    def task(self) -> bytes:
        """The work as it travels.

        Raises:
            ConfigError: The job cannot be sent to another process.
        """
        with raise_if_unpicklable():
            return pickle.dumps((self.work.function, self.work.arguments))

    def hears(self, message: Sequence[Any]) -> tuple[Hashable, Any] | None:
        """A message of who does it: followers are told; the last one gives its name and result, or what went wrong."""
        kind, *rest = message
        if kind == "call":
            name, arguments = rest
            if name == "warn":
                notify_warning(self.callbacks, *arguments)
                return None
            for callback in self.callbacks:
                hook = getattr(callback, name, None)
                if hook is not None:
                    hook(*arguments)
            return None
        if kind == "failed":
            error, text = rest
            if not isinstance(error, UnskewError):
                error.add_note(text)
            raise error
        if kind == "stopped":
            raise RunInterrupted(signal.SIGTERM)
        return self.work.name, rest[0]


def next_job(waiting: list[Job], done: Container[Hashable]) -> Job | None:
    """The first work whose time has come, which waits no longer.

    Args:
        waiting: Jobs that have not started.
        done: Keys of finished jobs.
    """
    work = next((work for work in waiting if all(name in done for name in work.after)), None)
    if work is not None:
        waiting.remove(work)
    return work


@dataclass
class ProcessPool:
    """The processes, and who does what."""

    places: int
    given: Path
    processes: dict[Connection, BaseProcess] = field(default_factory=dict)
    busy: dict[Connection, RunningJob] = field(default_factory=dict)
    done: set[Hashable] = field(default_factory=set)

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        share = max(1, num_cores() // self.places)
        for _ in range(self.places):
            ours, child_end = context.Pipe()
            # Not daemons: these may have no worker processes of their own.
            process = context.Process(target=run_job, args=(child_end, str(self.given), share))
            process.start()
            child_end.close()
            self.processes[ours] = process

    def carry_out(self, works: Sequence[Job], stopped: Sequence[int]) -> Iterator[tuple[Hashable, Any]]:
        """Run the jobs; ends early if ``stopped`` is not empty. See ``unskew.runs.parallel.run_jobs``.

        Args:
            works: Jobs to run.
            stopped: Signals that were received.
        """
        waiting = list(works)
        while (waiting or self.busy) and not stopped:
            self._hand_out(waiting)
            for ready in wait(list(self.busy), GLANCE):
                yield from self._hear(cast(Connection, ready))

    def _hand_out(self, waiting: list[Job]) -> None:
        for pipe in self.processes:
            if pipe in self.busy:
                continue
            work = next_job(waiting, self.done)
            if work is None:
                return
            busy = RunningJob.of(work)
            task = busy.task()
            self.busy[pipe] = busy
            with contextlib.suppress(OSError):  # noticed, with its reason, when the answer is read
                pipe.send_bytes(task)

    def _hear(self, pipe: Connection) -> Iterator[tuple[Hashable, Any]]:
        """One message of a process; if that is the end of its work, its name and result."""
        busy = self.busy[pipe]
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            del self.busy[pipe]
            self._died(self.processes.pop(pipe), busy.work)
        if message[0] != "call":
            del self.busy[pipe]
        heard_from = busy.hears(message)
        if heard_from is not None:
            self.done.add(heard_from[0])
            yield heard_from

    @staticmethod
    def _died(process: BaseProcess, work: Job) -> NoReturn:
        process.join(timeout=5)
        if process.exitcode == 1:  # Python ended before it came to the work
            raise EngineError(
                "A worker process failed to start; the reason is above. A script that begins runs "
                'side by side does so under: if __name__ == "__main__".'
            )
        raise EngineError(
            f"The worker process of a parallel run died (exit code {process.exitcode}, {work.name}); memory may have run "
            "out. Finished runs are kept: resume with fewer runs at a time."
        )

    def wind_up(self) -> None:
        """Let those that are at work finish their round and save it, and wait for them."""
        for pipe in self.busy:
            self.processes[pipe].terminate()
        while self.busy:
            for ready in wait(list(self.busy)):
                with contextlib.suppress(Exception, RunInterrupted):  # the first reason to stop is the one that is told
                    list(self._hear(cast(Connection, ready)))

    def close(self) -> None:
        """End the processes: those that are still at work at once."""
        for pipe, process in self.processes.items():
            pipe.close()
            if pipe in self.busy:
                process.terminate()
        patience = time.monotonic() + 5
        for process in self.processes.values():
            process.join(timeout=max(0.0, patience - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
