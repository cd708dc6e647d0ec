"""A short trial: how long a local step takes, for one client alone and for several as one network.

It trains a client of the run for a few steps and throws the result away: no random number is drawn from a common source,
no state is written, nothing is sent.
"""

from __future__ import annotations

import multiprocessing
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

import torch

from unskew.engines.base import EngineConfig
from unskew.engines.cpu import keep_freed_memory, num_threads
from unskew.engines.local_trainer import LocalTrainer
from unskew.engines.vmap_trainer import GroupTrainer, preload_functorch
from unskew.models.grouped.context import GroupedModel
from unskew.protocol.messages import Broadcast, ClientState

MOST = 5
"""Times that a piece of work is measured, after once that is not."""
SAMPLED = 200
"""Clients whose sizes are looked at, about."""


def largest_client(setup: EngineConfig) -> int:
    """The client with the most samples, of some that are looked at."""
    clients = setup.federation.clients
    every = max(1, len(clients) // SAMPLED)
    return max(range(0, len(clients), every), key=lambda k: clients[k].examples)


def steps_workload(setup: EngineConfig, form: GroupedModel | None, k: int, steps: int) -> Callable[[], Any]:
    """So many local steps of ``k`` times the same client without any rule, as one network if there is more than one.

    Args:
        setup: Configuration of the engine.
        form: Grouped form of the model; None trains one client after another.
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


def median_seconds(work: Callable[[], Any], slot: float) -> float:
    """Seconds of some work: the median of a few times, no more than fit into ``slot`` seconds, but at least one.

    Args:
        work: Function to time.
        slot: Time limit in seconds.
    """
    until = time.perf_counter() + slot
    work()
    taken: list[float] = []
    while not taken or (len(taken) < MOST and time.perf_counter() < until):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _worker(
    setup: EngineConfig,
    form: GroupedModel | None,
    groups: Sequence[int],
    steps: int,
    slot: float,
    barrier: Barrier,
    pipe: Connection,
) -> None:
    """Measure the workload in one of several simultaneous processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        for k in groups:
            work = steps_workload(setup, form, k, steps)
            barrier.wait()
            pipe.send(median_seconds(work, slot))
    except Exception:  # such as for want of memory: the parent is told by the pipe that ends
        barrier.abort()
    pipe.close()


def time_in_processes(
    setup: EngineConfig, form: GroupedModel | None, groups: Sequence[int], steps: int, workers: int, seconds: float
) -> dict[int, float]:
    """Seconds of some steps of each number of clients together, in ``workers`` processes of one thread at the same time.

    Args:
        setup: The run.
        form: The model's stacked form, if any number is above 1.
        groups: Numbers of clients, the first ones measured first.
        steps: Local steps of each.
        workers: Number of processes.
        seconds: For all of it; what is not measured by then is left out.
    """
    until = time.perf_counter() + seconds
    if max(groups) > 1:
        preload_functorch()
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(workers)
    pipes, processes = [], []
    with num_threads(1):
        for _ in range(workers):
            here, there = context.Pipe(duplex=False)
            args = (setup, form, groups, steps, seconds / (2 * len(groups)), barrier, there)
            process = context.Process(target=_worker, args=args, daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        timings: dict[int, float] = {}
        try:
            for k in groups:
                answers = []
                for pipe in pipes:
                    if not pipe.poll(max(0.0, until - time.perf_counter())):
                        return timings
                    answers.append(pipe.recv())
                timings[k] = max(answers)
        except EOFError:  # a worker failed: nothing is learnt of the rest
            pass
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()
    return timings
