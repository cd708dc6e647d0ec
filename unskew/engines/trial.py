"""A short trial: how long a local step takes, for one client alone and for several as one network.

It computes steps on a run's own model and batch and throws the results away: no random number is drawn, no state is
written, nothing is sent.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from threading import BrokenBarrierError
from typing import Any

import torch

from unskew.data.federation import take
from unskew.engines.base import Setup
from unskew.engines.batches import Normaliser
from unskew.engines.local import base_loss
from unskew.engines.machine import keep_freed_memory, threads
from unskew.models.together import Together, together
from unskew.models.trainable import Batch, BoundModel, FunctionalModel

MOST = 5
"""Steps of one measurement, after one that is not measured."""


def step_of(setup: Setup, form: Together | None, k: int) -> Callable[[], Any]:
    """One local step of ``k`` clients: together with ``form``, else of one."""
    spec, client = setup.spec, setup.federation.clients[0]
    index = torch.arange(setup.training.batch_size) % client.examples
    inputs = Normaliser(setup.federation.normalisation, setup.federation.shape, spec.dtype, setup.device)
    x, y = inputs(take(client.x, index.to(client.y.device))), client.y[index.to(client.y.device)].to(setup.device)
    v, b, at = spec.flatten().to(setup.device), spec.flatten_buffers().to(setup.device), torch.tensor(0)
    if k == 1 or form is None:
        model = BoundModel(spec, setup.device)
        model.start(b)
        own, gradient = Batch(x, y, at, at), model.gradient(base_loss(model, setup.task))
        return lambda: v.sub_(gradient(v, own), alpha=1e-9)

    def step(v: torch.Tensor, b: torch.Tensor, batch: Batch) -> torch.Tensor:
        mapped = FunctionalModel(spec, b)
        return mapped.gradient(base_loss(mapped, setup.task))(v, batch)

    vs, bs, keys = v.repeat(k, 1), b.repeat(k, 1), torch.arange(k)
    several = Batch(torch.stack([x] * k), torch.stack([y] * k), keys, at)
    dims = (0, 0, Batch(0, 0, 0, None, None, None))  # type: ignore[arg-type]

    def run() -> None:
        with together(spec, form):
            vs.sub_(torch.func.vmap(step, in_dims=dims, randomness="different")(vs, bs, several), alpha=1e-9)

    return run


def seconds_of(step: Callable[[], Any], slot: float) -> float:
    """Seconds of a step: the median of a few, no more than fit into ``slot`` seconds, but at least one."""
    until = time.perf_counter() + slot
    step()
    taken: list[float] = []
    while not taken or (len(taken) < MOST and time.perf_counter() < until):
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _worker(
    setup: Setup, form: Together | None, groups: Sequence[int], slot: float, barrier: Barrier, pipe: Connection
) -> None:
    """What each of the processes measures, all at the same time."""
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        for k in groups:
            step = step_of(setup, form, k)
            barrier.wait(10 * slot + 1)
            pipe.send(seconds_of(step, slot))
    except (BrokenBarrierError, BrokenPipeError):
        pass  # the parent has heard enough
    pipe.close()


def in_processes(
    setup: Setup, form: Together | None, groups: Sequence[int], workers: int, seconds: float
) -> dict[int, float]:
    """Seconds of a step of each number of clients together, in ``workers`` processes of one thread at the same time.

    Args:
        setup: The run.
        form: The model's stacked form, if any number is above 1.
        groups: Numbers of clients, the most promising first.
        workers: Number of processes.
        seconds: For all of it; what is not measured by then is left out.
    """
    context = multiprocessing.get_context("fork")
    barrier, until = context.Barrier(workers), time.perf_counter() + seconds
    pipes, processes = [], []
    with threads(1):
        for _ in range(workers):
            here, there = context.Pipe(duplex=False)
            args = (setup, form, groups, seconds / (2 * len(groups)), barrier, there)
            process = context.Process(target=_worker, args=args, daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        found: dict[int, float] = {}
        try:
            for k in groups:
                answers = []
                for pipe in pipes:
                    if not pipe.poll(max(0.0, until - time.perf_counter())):
                        return found
                    answers.append(pipe.recv())
                found[k] = max(answers)
        except EOFError:  # a worker that failed, such as for want of memory: nothing is learnt of the rest
            pass
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()
    return found
