"""Pool of independent runs on a Ray cluster; each run has its own process on a node, with a share of its cores.

A task starts the same worker process as the pool on one machine (``unskew.runs.pool_worker``) and forwards its messages,
so a run uses the best engine of its node. Runs of a dead node are restarted on another one; a run with a folder resumes
from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from unskew.engines.ray.cluster import connect, list_nodes, load_ray
from unskew.engines.ray.worker import check_versions, versions
from unskew.errors import DataError, EngineError
from unskew.filesystem import disk_errors
from unskew.records.recorder import notify_warning
from unskew.runs.pool_worker import run_job
from unskew.runs.process_pool import GLANCE, Job, RunningJob, next_job

ATTEMPTS = 5
"""Maximum number of times that a run is started if its nodes die."""
BEGINNING = 600.0
"""Seconds within which the cluster must start a first task."""
ENDING = 600.0
"""Seconds within which runs must finish their current round."""


def run_remote_job(given: list[Any], task: bytes, cores: int, cwd: str, marks: Sequence[str]) -> Iterator[Any]:
    """Run a job in its own process on a node; yields its messages, the result last.

    Args:
        given: List with one reference, to the serialized object that all jobs receive.
        task: Pickled job.
        cores: Number of cores that the job uses.
        cwd: Working directory, for relative paths.
        marks: Marker files in the folders of the jobs; a node that shares these folders sees them.
    """
    import ray

    with contextlib.suppress(OSError):
        os.chdir(cwd)
    for mark in marks:
        if not Path(mark).is_file():
            yield "failed", _unseen(mark), ""
            return
    with tempfile.TemporaryDirectory(prefix="unskew-") as folder:
        path = Path(folder) / "given"
        path.write_bytes(memoryview(ray.get(given[0])))
        context = multiprocessing.get_context("spawn")
        ours, child_end = context.Pipe()
        # SIGKILL ends it immediately with this process: a restart on another node needs the lock of the run folder.
        process = context.Process(target=run_job, args=(child_end, str(path), cores, signal.SIGKILL))
        process.start()
        child_end.close()
        try:
            ours.send_bytes(task)
            yield from _said(ours, process.terminate)
        except (EOFError, OSError):
            process.join(timeout=5)
            text = f"The process of a run on {os.uname().nodename} died (exit code {process.exitcode}), possibly out of"
            yield "failed", EngineError(f"{text} memory. Finished runs are kept: resume with fewer parallel runs."), ""
        finally:  # also if Ray cancels this task between two messages
            _end(process, ours)


def _end(process: BaseProcess, pipe: Connection) -> None:
    """End a process after its current round, which it saves."""
    process.terminate()
    end = time.monotonic() + ENDING
    while process.is_alive() and time.monotonic() < end:
        try:
            if pipe.poll(GLANCE) and pipe.recv()[0] != "call":
                break
        except (EOFError, OSError):
            break
    pipe.close()
    process.join(timeout=5)
    if process.is_alive():
        process.kill()
        process.join()


def _said(pipe: Connection, stop: Callable[[], None]) -> Iterator[Any]:
    """Yield the messages of a process up to its result; if cancelled, call ``stop`` and continue until the result."""
    while True:
        try:
            message = pipe.recv()
            yield message
        except KeyboardInterrupt:
            stop()
            continue
        if message[0] != "call":
            return


def _unseen(mark: str) -> DataError:
    return DataError(
        f"Node {os.uname().nodename} cannot access {Path(mark).parent}. Parallel runs on a cluster need a shared folder "
        "with the same path on all nodes."
    )


@dataclass
class _RemoteJob:
    """Job that runs on a node."""

    busy: RunningJob
    task: bytes
    stream: Any = None
    attempts: int = 1


class ParallelOn(int):
    """Number of parallel runs on a Ray cluster.

    Attributes:
        address: Address of the cluster.
        auto: Whether the number is only an upper limit, to be fitted to the cluster.
        small: Whether one core per run is enough.
        deadline: Seconds without a message from any run after which all runs are aborted; None waits indefinitely.
    """

    address: str
    auto: bool
    small: bool
    deadline: float | None


class RayJobPool:
    """Pool of jobs on a Ray cluster, with the interface of ``ProcessPool``.

    Args:
        number: Maximum number of parallel jobs, with the cluster.
        given: File with the object that all jobs receive.
        folders: Folders that this object names.

    Raises:
        EngineError: If there is no such cluster, its versions differ, it has no cores, or it does not start a task.
    """

    def __init__(self, number: ParallelOn, given: Path, folders: Sequence[Path]):
        self.ray = load_ray()
        self.folders = folders
        self.most = int(number)
        self.deadline = number.deadline
        connect(number.address, None)
        ray = self.ray
        try:
            check_versions(ray.get(ray.remote(versions).options(num_cpus=0).remote(), timeout=BEGINNING))
        except ray.exceptions.GetTimeoutError as error:
            raise EngineError(
                f"The cluster {number.address} did not start a task within {BEGINNING:g} s. Check that it has free cores."
            ) from error
        nodes = [(cores, gpus) for cores, gpus in list_nodes(ray) if cores]
        if not nodes:
            raise EngineError(f"The nodes of the cluster {number.address} have no CPU cores. Start more nodes.")
        every = [cores for cores, _ in nodes]
        self.cores = max(1, min(sum(every) // self.most, *every))
        if number.auto:
            self.cores = 1 if number.small else min(every)
            self.most = min(self.most, sum(cores // self.cores for cores in every))
        self.task = ray.remote(run_remote_job).options(
            num_cpus=self.cores,
            num_gpus=int(100 * min(1.0, sum(gpus for _, gpus in nodes) / self.most)) / 100,
            num_returns="streaming",
            max_retries=0,
        )
        self.given = ray.put(np.fromfile(given, dtype=np.uint8))
        self.flying: list[_RemoteJob] = []

    def carry_out(self, works: Sequence[Job], stopped: Sequence[int]) -> Iterator[tuple[Hashable, Any]]:
        """Run jobs; ends early once ``stopped`` is not empty, or no job is running or ready.

        Args:
            works: Jobs to run.
            stopped: Received signals; filled while the jobs run.

        Yields:
            Name and result of each finished job.
        """
        waiting = list(works)
        done = set[Hashable]()
        heard = time.monotonic()
        with _marked([*self.folders, *_folders(works)]) as marks:
            while not stopped:
                while len(self.flying) < self.most and (work := next_job(waiting, done)) is not None:
                    busy = RunningJob.of(work)
                    self._submit(_RemoteJob(busy, busy.task()), marks)
                if not self.flying:
                    return
                ready = self._ready()
                heard = time.monotonic() if ready else heard
                if self.deadline is not None and time.monotonic() - heard > self.deadline:
                    raise EngineError(
                        f"No message from any run on the cluster for {self.deadline:g} s (ray.deadline). Finished runs are "
                        "kept: resume here or on another cluster."
                    )
                for flying in ready:
                    finished = self._hear(flying, marks)
                    if finished is not None:
                        done.add(finished[0])
                        yield finished

    def _submit(self, flying: _RemoteJob, marks: Sequence[str]) -> None:
        flying.stream = self.task.remote([self.given], flying.task, self.cores, os.getcwd(), marks)
        self.flying.append(flying)

    def _ready(self) -> list[_RemoteJob]:
        streams = [flying.stream for flying in self.flying]
        ready, _ = self.ray.wait(streams, num_returns=1, timeout=GLANCE, fetch_local=False)
        return [flying for flying in self.flying if any(flying.stream is reference for reference in ready)]

    def _hear(self, flying: _RemoteJob, marks: Sequence[str]) -> tuple[Hashable, Any] | None:
        """Process one message of a job; restart the job if its node died."""
        name = flying.busy.work.name
        try:
            message = self.ray.get(next(flying.stream))
        except (StopIteration, self.ray.exceptions.RayError) as error:
            self.flying.remove(flying)
            reason = (str(error) or "The task ended without a result.").splitlines()[0]
            if flying.attempts == ATTEMPTS:
                raise EngineError(
                    f"{name} failed on the cluster after {ATTEMPTS} attempts: {reason} Finished runs are kept and can be "
                    "resumed."
                ) from error
            notify_warning(
                flying.busy.callbacks, f"The node running {name} died; restarting it from its last checkpoint. {reason}"
            )
            flying.attempts += 1
            self._submit(flying, marks)
            return None
        if message[0] != "call":
            self.flying.remove(flying)
        return flying.busy.hears(message)

    def wind_up(self) -> None:
        """Stop running jobs after their current round, which they save, and wait for them."""
        for flying in self.flying:
            self.ray.cancel(flying.stream)
        end = time.monotonic() + min(ENDING, self.deadline or ENDING)
        while self.flying and time.monotonic() < end:
            for flying in self._ready():
                try:
                    last = self.ray.get(next(flying.stream))[0] != "call"
                except (StopIteration, self.ray.exceptions.RayError):
                    last = True
                if last:
                    self.flying.remove(flying)

    def close(self) -> None:
        """Cancel running jobs; the cluster keeps running."""
        for flying in self.flying:
            with contextlib.suppress(self.ray.exceptions.RayError):
                self.ray.cancel(flying.stream, force=True)


def _folders(works: Sequence[Job]) -> list[Path]:
    return [value for work in works for value in work.arguments if isinstance(value, Path)]


@contextlib.contextmanager
def _marked(folders: Sequence[Path]) -> Iterator[list[str]]:
    """Context manager that puts a marker file into each folder, or into its closest existing parent.

    Nodes look for these files to check that they share the folders.
    """
    there = {
        next(parent for parent in (absolute, *absolute.parents) if parent.is_dir())
        for absolute in map(Path.absolute, folders)
    }
    marks = [folder / f".{uuid4().hex}.new" for folder in there]
    try:
        for mark in marks:
            with disk_errors(mark):
                mark.touch()
        yield [str(mark) for mark in marks]
    finally:
        for mark in marks:
            mark.unlink(missing_ok=True)
