"""Estimated seconds of local training from the layers of a model, for runs that are too short to measure them.

The constants were fitted by hand to CPU seconds of single-threaded steps (one core of an AMD EPYC with AVX-512, torch 2.13).
Measured times are 0.6 to 1.5 times the estimates for one client and 0.4 to 1.4 times for eight clients together, and up to
1.9 and 2.7 times for VGG-11 with batches of 1 (``python -m speed.costs``). Only the ratios matter, so a machine that is
slower as a whole decides the same.
"""

from __future__ import annotations

import math
import time

import torch
from torch import nn

from unskew.engines import timing
from unskew.engines.cpu import num_threads
from unskew.models.spec import ModelSpec

STEP = 100e-6
"""Seconds of a step, and of a client before and after its steps, of a model without layers."""
LAYER = 45e-6
"""Additional seconds of a step for each layer: starting its operations, forward and backward."""
TOGETHER = 4.0
"""Factor of the time to start operations in a group of clients of any size."""
PARAMETER = 2e-9
"""Seconds of a step for each parameter: update, and passes over the gradient."""
PARAMETER_TOGETHER = 5e-9
"""The same in a group, whose vectors do not fit into the cache."""
VALUE = 4e-9
"""Seconds for each output of a layer other than a convolution or a linear layer."""
PRODUCT = 1 / 15e9
"""Seconds for each multiplication of a convolution or a linear layer, forward and backward."""
CHANNELS = 16
"""Output channels below which a convolution is slower in proportion."""
START = 0.04
"""Seconds to start and end the workers of ``processes``."""
MESSAGE = 150e-6
"""Seconds of the main process for each client that a worker trains."""
ONE_THREAD = 1e-3
"""Seconds of a local step below which ``inline`` uses one thread: more cost more than they give."""
FEW_THREADS = 5e-3
"""Seconds of a local step below which threads give little."""
EFFICIENCY = 0.8
"""Speedup of a local step by threads, relative to that of a matrix product."""
CROWDED = 1.1
"""Factor of the time of a local step of a large model while other workers use the same caches and memory."""


def step_seconds(spec: ModelSpec, batch_size: int, clients: int = 1) -> float:
    """Estimate the seconds of a local step of one thread.

    Args:
        spec: Model.
        batch_size: Samples per client.
        clients: Number of clients that are trained as one network.
    """
    modules = dict(spec.module.named_modules())
    per_sample = 0.0
    for name, values in spec.outputs.items():
        module = modules[name]
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd) and weight is not None:
            narrow = 1.0 if isinstance(module, nn.Linear) else min(1.0, weight.shape[0] / CHANNELS)
            per_sample += values * weight[0].numel() * PRODUCT / narrow
        else:
            per_sample += values * VALUE
    starting = (STEP + LAYER * len(spec.outputs)) * (TOGETHER if clients > 1 else 1)
    return starting + clients * (
        per_sample * batch_size + spec.size * (PARAMETER_TOGETHER if clients > 1 else PARAMETER)
    )


def round_seconds(workers: int, group: int, cohort: int, steps: float, step: float) -> float:
    """Return the seconds of a round.

    Args:
        workers: Number of worker processes; 0 for training in the main process.
        group: Clients per group.
        cohort: Clients per round.
        steps: Local steps of a client.
        step: Seconds of a local step of a group.
    """
    turns = math.ceil(math.ceil(cohort / group) / max(1, workers))
    return turns * (steps * step + group * STEP) + (cohort * MESSAGE if workers else 0.0)


def threads_of(step: float, cores: int) -> int:
    """Return the number of threads of ``inline``.

    Args:
        step: Estimated seconds of a local step of one thread.
        cores: Number of cores.
    """
    return 1 if step < ONE_THREAD else cores


def speedup(step: float, threads: int) -> float:
    """Return how much faster a local step is with several threads, by timing a matrix product of a few milliseconds.

    Other programs on the same cores can make several threads slower than one.

    Args:
        step: Estimated seconds of a local step of one thread.
        threads: Number of threads.
    """
    if step < FEW_THREADS or threads == 1:
        return 1.0
    matrix, times = torch.ones(512, 512), []
    for number in (1, threads):
        with num_threads(number):
            times.append(timing.min_seconds({1: lambda: matrix @ matrix}, time.perf_counter)[1])
    return max(1.0, EFFICIENCY * times[0] / times[1])
