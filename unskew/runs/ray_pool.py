"""Independent runs as tasks of a Ray cluster: each in a process of its own on some node, with its share of the cores there.

A task starts the same worker process as the pool on one machine (``unskew.runs.pool_worker``) and relays its messages, so
a run uses the best engine of its node. Runs of a node that died are restarted elsewhere; a run with a folder resumes from
its last checkpoint.
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
"""Times that a run is begun whose node died."""
BEGINNING = 600.0
"""Seconds that a cluster has to begin a first task."""
ENDING = 600.0
"""Seconds that runs have to finish their round."""


def run_remote_job(given: list[Any], task: bytes, cores: int, cwd: str, marks: Sequence[str]) -> Iterator[Any]:
    """Run a job in its own process on a node; yields its messages, the result last.

    Args:
        given: Reference to what all works are given, laid out.
        task: The work, pickled.
        cores: That it may use.
        cwd: Where relative paths begin.
        marks: Files of the server that a node sees if it sees the folders of the work.
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
        # It ends at once with this one: who begins its work anew elsewhere must find its folder free.
        process = context.Process(target=run_job, args=(child_end, str(path), cores, signal.SIGKILL))
        process.start()
        child_end.close()
        try:
            ours.send_bytes(task)
            yield from _said(ours, process.terminate)
        except (EOFError, OSError):
            process.join(timeout=5)
            text = f"The process of a run at {os.uname().nodename} died (exit code {process.exitcode}); memory may have"
            yield "failed", EngineError(f"{text} run out. Finished runs are kept: resume, fewer at a time."), ""
        finally:  # also where Ray cancels this task between two messages
            _end(process, ours)


def _end(process: BaseProcess, pipe: Connection) -> None:
    """End a process; one that is at work finishes its round and saves it."""
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
    """Messages of a process up to its answer; who is cancelled lets it finish its round."""
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
        f"{os.uname().nodename} does not see {Path(mark).parent}: runs on a cluster need a folder that all nodes see "
        "under the same path."
    )


@dataclass
class _RemoteJob:
    """A work that a node does."""

    busy: RunningJob
    task: bytes
    stream: Any = None
    attempts: int = 1


class RayJobPool:
    """Carries out works on a cluster; stands where the processes of one machine would.

    Args:
        address: Of the cluster.
        number: Works at a time.
        auto: Whether fewer are better where there are fewer cores.
        small: Whether a core is enough for each, then.
        deadline: Seconds without a word of any work after which they are given up; None waits on.
        given: File with what all works are given.
        folders: Those that are named in it.

    Raises:
        EngineError: There is no such cluster, or one of other versions.
    """

    def __init__(
        self,
        address: str,
        number: int,
        auto: bool,
        small: bool,
        deadline: float | None,
        given: Path,
        folders: Sequence[Path],
    ):
        self.ray, self.folders, self.most, self.deadline = load_ray(), folders, number, deadline
        connect(address, None)
        ray = self.ray
        try:
            check_versions(ray.get(ray.remote(versions).options(num_cpus=0).remote(), timeout=BEGINNING))
        except ray.exceptions.GetTimeoutError as error:
            raise EngineError(f"The cluster {address} has not begun a task within {BEGINNING:g} seconds.") from error
        nodes = [(cores, gpus) for cores, gpus in list_nodes(ray) if cores]
        if not nodes:
            raise EngineError(f"No node of the cluster {address} offers a core: start more nodes.")
        every = [cores for cores, _ in nodes]
        self.cores = max(1, min(sum(every) // number, *every))
        if auto:
            self.cores = 1 if small else min(every)
            self.most = min(number, sum(cores // self.cores for cores in every))
        self.task = ray.remote(run_remote_job).options(
            num_cpus=self.cores,
            num_gpus=int(100 * min(1.0, sum(gpus for _, gpus in nodes) / self.most)) / 100,
            num_returns="streaming",
            max_retries=0,
        )
        self.given = ray.put(np.fromfile(given, dtype=np.uint8))
        self.flying: list[_RemoteJob] = []

    def carry_out(self, works: Sequence[Job], stopped: Sequence[int]) -> Iterator[tuple[Hashable, Any]]:
        """Run the jobs; ends early if ``stopped`` is not empty. See ``unskew.runs.parallel.run_jobs``.

        Args:
            works: Jobs to run.
            stopped: Signals that were received.
        """
        waiting, done, heard = list(works), set[Hashable](), time.monotonic()
        with _marked([*self.folders, *_folders(works)]) as marks:
            while (waiting or self.flying) and not stopped:
                while len(self.flying) < self.most and (work := next_job(waiting, done)) is not None:
                    busy = RunningJob.of(work)
                    self._submit(_RemoteJob(busy, busy.task()), marks)
                ready = self._ready()
                heard = time.monotonic() if ready else heard
                if self.deadline is not None and time.monotonic() - heard > self.deadline:
                    raise EngineError(
                        f"No run on the cluster has said anything for {self.deadline:g} s (ray.deadline). Go on with what is "
                        "there (resume), here or on another cluster."
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
        """One message of a work; one whose node died is begun again."""
        name = flying.busy.work.name
        try:
            message = self.ray.get(next(flying.stream))
        except (StopIteration, self.ray.exceptions.RayError) as error:
            self.flying.remove(flying)
            reason = (str(error) or "It ended without an answer.").splitlines()[0]
            if flying.attempts == ATTEMPTS:
                raise EngineError(
                    f"{name} could not be carried out on the cluster, in {ATTEMPTS} attempts: {reason} Go on with what is "
                    "there (resume)."
                ) from error
            notify_warning(
                flying.busy.callbacks,
                f"The node that was at {name} died; it is restarted from its last checkpoint. {reason}",
            )
            flying.attempts += 1
            self._submit(flying, marks)
            return None
        if message[0] != "call":
            self.flying.remove(flying)
        return flying.busy.hears(message)

    def wind_up(self) -> None:
        """Let those that are at work finish their round and save it, and wait for them."""
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
        """End what is still at work; the cluster goes on."""
        for flying in self.flying:
            with contextlib.suppress(self.ray.exceptions.RayError):
                self.ray.cancel(flying.stream, force=True)


def _folders(works: Sequence[Job]) -> list[Path]:
    return [value for work in works for value in work.arguments if isinstance(value, Path)]


@contextlib.contextmanager
def _marked(folders: Sequence[Path]) -> Iterator[list[str]]:
    """Context manager that puts a marker file into each existing folder.

    By which nodes check that they see the same files.
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
