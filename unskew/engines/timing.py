"""Timing of local training for ``engine: auto``: seconds of a client's local steps, alone and as one network with others.

A trial trains clients of the run for a few steps and discards the result: it draws no shared random number, writes no state
and sends nothing. Workers report CPU seconds, because a busy neighbor process changes these less than wall-clock seconds.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

import torch

from unskew.engines.base import EngineConfig
from unskew.engines.cpu import keep_freed_memory, num_threads
from unskew.engines.local_trainer import LocalTrainer
from unskew.engines.vmap_trainer import GroupTrainer
from unskew.models.grouped.context import GroupedModel, MappedModel
from unskew.protocol.messages import Broadcast, ClientState

MIN_REPETITIONS = 2
MAX_REPETITIONS = 6
ENOUGH_SECONDS = 0.05
"""A workload is repeated at least ``MIN_REPETITIONS`` times, then until it took this long or ``MAX_REPETITIONS`` times."""
MAX_INSPECTED = 200
"""Approximate number of clients whose sizes are inspected."""
TIMEOUT_SECONDS = 60.0
"""Wall-clock limit of a trial in worker processes; what is not measured by then is left out."""


def largest_client(setup: EngineConfig) -> int:
    """Return the client with the most samples, among about ``MAX_INSPECTED`` clients."""
    clients = setup.federation.clients
    every = max(1, len(clients) // MAX_INSPECTED)
    return max(range(0, len(clients), every), key=lambda k: clients[k].num_samples)


def steps_workload(setup: EngineConfig, form: MappedModel | None, k: int, steps: int) -> Callable[[], Any]:
    """Return a function that trains ``k`` copies of one client without any rule.

    Args:
        setup: Configuration of the engine.
        form: Form of several clients, used if ``k > 1``.
        k: Number of clients.
        steps: Number of local steps of each client.
    """
    training = replace(setup.training, local_steps=steps, local_epochs=None, counted=None)
    plain = replace(setup, rules=(), training=training, common={})
    spec = setup.spec
    sent = Broadcast(0, largest_client(setup), spec.flatten(), spec.flatten_buffers(), {}, ClientState(), 1.0)
    single = LocalTrainer(plain)
    if k == 1:
        return lambda: single.train(sent)
    group = GroupTrainer(plain, single, form)
    return lambda: group.mapped([sent] * k)


def can_be_mapped(setup: EngineConfig, form: MappedModel | None) -> bool:
    """Return whether a step of two clients can be mapped; the operators of a grouped network always can.

    Args:
        setup: Configuration of the engine.
        form: Form of several clients.
    """
    if form is None or isinstance(form, GroupedModel):
        return True
    try:
        steps_workload(setup, form, 2, 1)()
    except Exception:  # such as values of tensors that the model reads
        return False
    return True


def min_seconds(workloads: Mapping[int, Callable[[], Any]], clock: Callable[[], float]) -> dict[int, float]:
    """Time workloads in turn and return the smallest time of each; every workload first runs once untimed.

    Args:
        workloads: Functions to time, by an arbitrary key.
        clock: Returns seconds, such as ``time.process_time`` or ``time.perf_counter``.
    """
    for workload in workloads.values():
        workload()
    times: dict[int, list[float]] = {key: [] for key in workloads}
    for repetition in range(MAX_REPETITIONS):
        for key, workload in workloads.items():
            if repetition >= MIN_REPETITIONS and sum(times[key]) >= ENOUGH_SECONDS:
                continue
            start = clock()
            workload()
            times[key].append(clock() - start)
    return {key: min(values) for key, values in times.items()}


def _worker(
    setup: EngineConfig,
    form: MappedModel | None,
    groups: Sequence[int],
    steps: int,
    barrier: Barrier,
    pipe: Connection,
) -> None:
    """Time the workloads in one of several simultaneous processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        workloads = {k: steps_workload(setup, form, k, steps) for k in groups}
        barrier.wait()
        pipe.send(min_seconds(workloads, time.process_time))
    except Exception:  # for example too little memory; the closed pipe tells the parent
        barrier.abort()
    pipe.close()


def time_in_processes(
    setup: EngineConfig, form: MappedModel | None, groups: Sequence[int], steps: int, workers: int
) -> dict[int, float]:
    """Time groups of clients in simultaneous worker processes of one thread each.

    Args:
        setup: Configuration of the engine.
        form: Form of several clients; needed if a group has more than one client.
        groups: Sizes of the groups to time.
        steps: Local steps of each client.
        workers: Number of processes.

    Returns:
        CPU seconds of ``steps`` local steps of each group, the mean over the workers; empty if a worker failed.
    """
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(workers)
    pipes, processes = [], []
    deadline = time.monotonic() + TIMEOUT_SECONDS
    with num_threads(1):
        for _ in range(workers):
            parent_end, child_end = context.Pipe(duplex=False)
            process = context.Process(
                target=_worker, args=(setup, form, groups, steps, barrier, child_end), daemon=True
            )
            process.start()
            child_end.close()
            pipes.append(parent_end)
            processes.append(process)
        replies: list[dict[int, float]] = []
        try:
            for pipe in pipes:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    return {}
                replies.append(pipe.recv())
        except EOFError:  # a worker failed
            return {}
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()
    return {k: sum(reply[k] for reply in replies) / workers for k in groups}
