"""Processes engine: one worker process per core with one thread each, the fastest engine on a multi-core CPU.

Workers are forked, so they share the data without copying; vectors are passed through shared memory. The largest
clients are assigned first, so that no worker has to train a large one at the end. Updates are yielded in the order of
the cohort.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import multiprocessing
import multiprocessing.util  # its exit handler must be registered before ours
import signal
import sys
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import torch

from unskew.engines.base import EngineConfig
from unskew.engines.client_inputs import update_from_dict, update_to_dict
from unskew.engines.cpu import (
    check_may_start_processes,
    exit_with_parent,
    keep_freed_memory,
    may_start_processes,
    num_cores,
)
from unskew.engines.in_order import in_order
from unskew.engines.local_trainer import LocalTrainer
from unskew.engines.shared_memory import SharedMemory
from unskew.engines.vmap_trainer import GroupTrainer, schedule_groups, steps_per_client
from unskew.errors import EngineError, UnskewError
from unskew.models.grouped.context import MappedModel
from unskew.protocol.messages import Broadcast, Update

AHEAD = 2
"""Tasks assigned to a worker at the same time, so that it never waits for the next one."""
LARGE_BYTES = 16 << 20
"""Size of a model from which a worker has one task at a time: its training takes much longer than the wait."""
MAX_BUNDLE = 16
"""Largest number of clients in a task that a worker trains one after another."""
MAX_BUNDLE_BYTES = 8 << 20
"""Largest size of the updates of such a task, unless it has a single client."""
BUNDLES_PER_WORKER = 4
"""Number of tasks of equal work into which a worker's share of the remaining clients is divided at least."""


def fork_available() -> bool:
    """Return whether this process can fork workers safely."""
    can_fork = sys.platform.startswith("linux") and "fork" in multiprocessing.get_all_start_methods()
    return can_fork and may_start_processes()


def _work(
    setup: EngineConfig,
    form: MappedModel | None,
    inbox: SharedMemory,
    outboxes: Sequence[SharedMemory],
    pipe: Connection,
    inherited: Sequence[Connection],
) -> None:
    """Run a worker: receive broadcasts, train, write the updates to the next outbox."""
    # The parent handles signals and finishes the round. If the parent ends in another way, so does this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    exit_with_parent(signal.SIGKILL)
    for other_end in inherited:
        other_end.close()  # if a worker kept the parent's ends open, other workers would not notice the parent's death
    torch.set_num_threads(1)
    keep_freed_memory()
    setup = replace(setup, warn=lambda text: pipe.send((None, text)))
    single = LocalTrainer(setup)
    trainer = GroupTrainer(setup, single, form, views=True)
    for outbox in itertools.cycle(outboxes):
        try:
            groups = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        if groups is None:
            return
        outbox.clear()
        try:
            packed = []
            for group in groups:
                broadcasts = [update_from_dict(Broadcast, fields) for fields in inbox.unpack(group)]
                packed += [outbox.pack(update_to_dict(update)) for update in trainer.train(broadcasts)]
                outbox.forget()  # frees the updates before the next group is trained
            pipe.send((True, packed))
        except (BrokenPipeError, ConnectionResetError):
            return  # the parent has ended
        except UnskewError as error:
            _tell(pipe, error)
        except Exception:  # report bugs in rules to the user
            _tell(pipe, EngineError(f"Training failed in a worker:\n{traceback.format_exc()}"))


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped, for example by SIGSTOP."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _tell(pipe: Connection, error: UnskewError) -> None:
    """Report an error, unless the parent has already stopped because of another worker's error."""
    with contextlib.suppress(OSError):
        pipe.send((False, error))


_engines: weakref.WeakSet[ProcessesEngine] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End all workers before multiprocessing would wait for workers that do not react to SIGTERM."""
    for engine in list(_engines):
        engine.close()


class RoundWork:
    """Groups of clients of one round that are not assigned yet.

    Args:
        groups: Groups by index in the cohort, the largest first.
        steps: Local steps of each client of the cohort.
        workers: Number of workers.
        max_bundle: Largest number of groups in a task.
    """

    def __init__(self, groups: deque[list[int]], steps: Sequence[int], workers: int, max_bundle: int):
        self.groups = groups
        self.steps = steps
        self.workers = workers
        self.max_bundle = max_bundle
        self.remaining = sum(steps)

    def next_task(self) -> list[list[int]]:
        """Return the groups of the next task, empty if all are assigned.

        Small clients are bundled, because each message costs as much as a step of a small model. Bundles shrink towards the
        end of a round, so that all workers finish at about the same time.
        """
        limit = self.remaining / (BUNDLES_PER_WORKER * self.workers)
        task: list[list[int]] = []
        work = 0
        while self.groups and len(task) < self.max_bundle:
            next_work = sum(self.steps[index] for index in self.groups[0])
            if task and work + next_work > limit:
                break
            task.append(self.groups.popleft())
            work += next_work
        self.remaining -= work
        return task


class ProcessesEngine:
    """Trains the clients of a cohort in forked worker processes.

    Args:
        setup: Configuration of the engine.
        workers: Number of processes; None for one per core that this process may use.
        clients_per_group: Number of clients that a worker trains at once.

    Raises:
        EngineError: If this platform cannot fork processes.

    Attributes:
        name: Name of the engine.
    """

    name = "processes"

    def __init__(self, setup: EngineConfig, workers: int | None = None, clients_per_group: int = 1):
        check_may_start_processes()
        if not fork_available():
            raise EngineError("The engine 'processes' needs Linux, because it forks. Use engine='inline'.")
        if setup.device.type != "cpu":
            raise EngineError(f"The engine 'processes' trains on the CPU, not on {setup.device}. Use 'vectorized'.")
        _engines.add(self)
        workers = workers or num_cores()
        # More threads of this process would compete with the workers for cores.
        self.threads_before = torch.get_num_threads()
        torch.set_num_threads(1)
        self.setup, self.clients_per_group = setup, clients_per_group
        form = setup.group_form() if clients_per_group > 1 else None
        self.inbox = SharedMemory()
        large = clients_per_group > 1 or setup.spec.largest_size * setup.spec.dtype.itemsize > LARGE_BYTES
        self.ahead = 1 if large else AHEAD
        # When a worker starts a task, the parent may still have to copy the results of the tasks assigned before.
        self.outboxes = [[SharedMemory() for _ in range(self.ahead + 1)] for _ in range(workers)]
        self.replies = [0] * workers
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        self._warnings: set[str] = set()
        context = multiprocessing.get_context("fork")
        for outboxes in self.outboxes:
            ours, child_end = context.Pipe()
            self.pipes.append(ours)
            args = (setup, form, self.inbox, outboxes, child_end, tuple(self.pipes))
            process = context.Process(target=_work, args=args, daemon=True)
            process.start()
            child_end.close()
            self.processes.append(process)

    def train(self, broadcasts: Sequence[Broadcast]) -> Iterator[Update]:
        """Train a cohort and yield its updates in order."""
        self.inbox.clear()
        steps = steps_per_client(self.setup, broadcasts)
        groups = deque(schedule_groups(broadcasts, steps, self.clients_per_group))
        round_work = RoundWork(groups, steps, len(self.pipes), self._max_bundle(broadcasts))
        busy: dict[Connection, deque[list[int]]] = {pipe: deque() for pipe in self.pipes}

        def send(pipe: Connection) -> None:
            """Assign the next task to a worker; only its broadcasts are written, so the first workers start at once."""
            task = round_work.next_task()
            if task:
                busy[pipe].append([index for group in task for index in group])
                packed = [[self.inbox.pack(update_to_dict(broadcasts[index])) for index in group] for group in task]
                with contextlib.suppress(BrokenPipeError):  # handled, with its reason, when the reply is read
                    pipe.send(packed)

        for _ in range(self.ahead):
            for pipe in self.pipes:
                send(pipe)

        def receive(needed: int) -> Iterator[tuple[int, Update]]:
            for ready in self._wait_for_replies([p for p in self.pipes if busy[p]]):
                pipe = cast(Connection, ready)
                packed, clients = self._receive(pipe), busy[pipe].popleft()
                worker = self.pipes.index(pipe)
                outbox = self.outboxes[worker][self.replies[worker] % (self.ahead + 1)]
                self.replies[worker] += 1
                send(pipe)  # before unpacking, so that the worker need not wait
                updates = (update_from_dict(Update, outbox.unpack(message, copy=True)) for message in packed)
                yield from zip(clients, updates, strict=True)

        yield from in_order(len(broadcasts), receive)

    def _max_bundle(self, broadcasts: Sequence[Broadcast]) -> int:
        """Return the largest number of clients per task; groups that are trained as one network are not bundled."""
        if self.clients_per_group > 1 or not broadcasts:
            return 1
        values = sum(tensor.numel() * tensor.element_size() for tensor in broadcasts[0].state.tensors().values())
        size = self.setup.spec.largest_size * self.setup.spec.dtype.itemsize + values
        return max(1, min(MAX_BUNDLE, MAX_BUNDLE_BYTES // size))

    def _wait_for_replies(self, asked: list[Connection]) -> list[Any]:
        """Wait for pipes with a reply and warn about missing workers if there is none for too long."""
        ready = wait(asked, self.setup.stall_warning_seconds)
        if not ready:
            pids = [self.processes[self.pipes.index(pipe)].pid for pipe in asked]
            stopped = [pid for pid in pids if pid is not None and is_stopped(pid)]
            why = f" Stopped by a signal: {stopped}; kill -CONT resumes them." if stopped else ""
            self.setup.warn(
                f"No reply from any worker for {self.setup.stall_warning_seconds:g} s (stall_warning_seconds); still waiting "
                f"for PIDs {pids}.{why} If they are stuck, kill them and resume the run."
            )
            ready = wait(asked)
        return ready

    def _receive(self, pipe: Connection) -> list[Any]:
        """Receive a worker's reply: the updates of a group, still in its outbox. Warnings may precede it."""
        try:
            ok, answer = pipe.recv()
            while ok is None:
                self._warn_once(answer)
                ok, answer = pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            process = self.processes[self.pipes.index(pipe)]
            process.join(timeout=1)
            raise EngineError(
                f"A worker process died (exit code {process.exitcode}), possibly out of memory. "
                "Resume the run, with fewer workers or engine='inline'."
            ) from error
        if not ok:
            raise answer
        return cast(list[Any], answer)

    def _warn_once(self, text: str) -> None:
        """Pass on a warning, which several workers may send."""
        if text not in self._warnings:
            self._warnings.add(text)
            self.setup.warn(text)

    def close(self) -> None:
        """End the workers."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
                pipe.close()
        patience = time.monotonic() + 2
        for process in self.processes:
            process.join(timeout=max(0.0, patience - time.monotonic()))
            if process.is_alive():
                process.kill()
        self.pipes, self.processes = [], []
        torch.set_num_threads(self.threads_before)
