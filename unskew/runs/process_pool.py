"""Process pool for independent jobs on one machine.

The processes are spawned, not forked, so all functions and classes of a job must be importable there.
"""

from __future__ import annotations

import contextlib
import math
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
from unskew.records.notebook import notebook_progress
from unskew.records.recorder import Callback, notify_warning
from unskew.runs.pool_worker import run_job
from unskew.simulation.round_loop import RunInterrupted

GLANCE = 0.2
"""Seconds between two checks whether Ctrl-C was pressed."""


@dataclass(frozen=True)
class Job:
    """Unit of work for the process pool, such as a run.

    Attributes:
        name: Key of the job and its result.
        function: Module-level function, called in another process as ``function(given, *arguments, callbacks=...)``.
        arguments: Arguments of this job.
        follow: Creates the job's callbacks in the parent process when the job starts.
        after: Names of jobs that must finish first.
        ready: Returns whether the job may start now.
    """

    name: Hashable
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    follow: Callable[[], Sequence[Callback]] = tuple
    after: tuple[Hashable, ...] = ()
    ready: Callable[[], bool] = lambda: True


@contextlib.contextmanager
def raise_if_unpicklable() -> Iterator[None]:
    """Context manager that converts pickling errors to a readable error."""
    try:
        yield
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"Cannot run in parallel: an argument cannot be pickled: {error}. "
            "Define classes and functions at module level and pass no open files, or remove parallel."
        ) from error


@dataclass
class RunningJob:
    """Running job and its callbacks."""

    work: Job
    callbacks: list[Callback]

    @classmethod
    def of(cls, work: Job) -> RunningJob:
        """Create the callbacks of a job that starts; in another process, it cannot show its progress in a notebook."""
        return cls(work, [*work.follow(), *notebook_progress()])

    def task(self) -> bytes:
        """Return the pickled job.

        Raises:
            ConfigError: If the job cannot be pickled.
        """
        with raise_if_unpicklable():
            return pickle.dumps((self.work.function, self.work.arguments))

    def hears(self, message: Sequence[Any]) -> tuple[Hashable, Any] | None:
        """Process a message of the worker: call the callbacks, or raise the job's error.

        Args:
            message: Kind of the message, followed by its values.

        Returns:
            The job's name and result if the job has finished, otherwise None.
        """
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
    """Remove and return the first job that is ready and whose dependencies have finished, or None.

    Args:
        waiting: Jobs that have not started.
        done: Names of finished jobs.
    """
    work = next((work for work in waiting if all(name in done for name in work.after) and work.ready()), None)
    if work is not None:
        waiting.remove(work)
    return work


@dataclass
class ProcessPool:
    """Pool of worker processes.

    Attributes:
        places: Number of processes.
        given: File with the object that all jobs receive.
        jobs: Number of jobs that will be run.
        processes: Processes by their connection.
        busy: Running jobs by the connection of their process.
        done: Names of finished jobs.
    """

    places: int
    given: Path
    jobs: int = 1
    processes: dict[Connection, BaseProcess] = field(default_factory=dict)
    busy: dict[Connection, RunningJob] = field(default_factory=dict)
    done: set[Hashable] = field(default_factory=set)

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        share, runs = max(1, num_cores() // self.places), math.ceil(self.jobs / self.places)
        for _ in range(self.places):
            ours, child_end = context.Pipe()
            # Not daemons, because a daemon must not start worker processes.
            process = context.Process(target=run_job, args=(child_end, str(self.given), share, signal.SIGTERM, runs))
            process.start()
            child_end.close()
            self.processes[ours] = process

    def carry_out(self, works: Sequence[Job], stopped: Sequence[int]) -> Iterator[tuple[Hashable, Any]]:
        """Run jobs; ends early once ``stopped`` is not empty, or no job is running or ready.

        Args:
            works: Jobs to run.
            stopped: Received signals; filled while the jobs run.

        Yields:
            Name and result of each finished job.
        """
        waiting = list(works)
        self._hand_out(waiting)
        while self.busy and not stopped:
            for ready in wait(list(self.busy), GLANCE):
                yield from self._hear(cast(Connection, ready))
            self._hand_out(waiting)

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
            with contextlib.suppress(OSError):  # reported with its reason when the reply is read
                pipe.send_bytes(task)

    def _hear(self, pipe: Connection) -> Iterator[tuple[Hashable, Any]]:
        """Process one message of a worker; yields name and result if its job has finished."""
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
        if process.exitcode == 1:  # Python failed before the worker started
            raise EngineError(
                "A worker process failed to start; see the traceback above. In a script, start parallel runs under "
                'if __name__ == "__main__". A script that is read from standard input must be saved to a file.'
            )
        raise EngineError(
            f"The worker process of a parallel run died (exit code {process.exitcode}, {work.name}), possibly out of "
            "memory. Finished runs are kept: resume with fewer parallel runs."
        )

    def wind_up(self) -> None:
        """Stop running jobs after their current round, which they save, and wait for them."""
        for pipe in self.busy:
            self.processes[pipe].terminate()
        while self.busy:
            for ready in wait(list(self.busy)):
                with contextlib.suppress(Exception, RunInterrupted):  # only the first error is reported
                    list(self._hear(cast(Connection, ready)))

    def close(self) -> None:
        """End all processes; running jobs are terminated."""
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
