"""Adapter of PyTorch: the PowerSGD hook of its data-parallel training, in a group of one process."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from conformance.trust import inputs


class _Bucket:
    """Gradients of all parameters in one buffer, with the interface that the hook reads."""

    def __init__(self, vector: np.ndarray, shapes: tuple[tuple[int, ...], ...]):
        self._vector = torch.tensor(vector)
        parts = torch.split(self._vector, [math.prod(shape) for shape in shapes])
        self._gradients = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def buffer(self) -> torch.Tensor:
        return self._vector

    def gradients(self) -> list[torch.Tensor]:
        return self._gradients

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def _decoded(shapes: tuple[tuple[int, ...], ...], rank: int, rounds: int, seed: int, rate: float) -> list[float]:
    """Return the decoded updates of all rounds, from the initial matrices of the inputs."""
    state = PowerSGDState(
        None, rank, start_powerSGD_iter=2, min_compression_rate=rate, use_error_feedback=True, warm_start=True
    )
    state.iter = 2
    rows = sum(rank * shape[0] for shape in shapes if len(shape) > 1)
    state.p_memory_dict[0] = torch.empty(rows, dtype=torch.float64)
    state.q_memory_dict[0] = torch.tensor(inputs.start(shapes, rank))
    decoded: list[float] = []
    for vector in inputs.matrices(shapes, rounds, seed):
        decoded += powerSGD_hook(state, _Bucket(vector, shapes)).wait().tolist()
    return decoded


def run() -> dict[str, list]:
    """Return the decoded updates over several rounds, with error feedback."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    edge = (inputs.EDGE_SHAPES, inputs.EDGE_RANK, 1, 20)
    found = {
        "powersgd": [_decoded(inputs.SHAPES, inputs.RANK, 4, seed, 2.0) for seed in (10,)],
        "powersgd, twofold": [_decoded(*edge, 2.0)],
        "powersgd, below twofold": [_decoded(*edge, 1.9)],
    }
    dist.destroy_process_group()
    return found


def version() -> str:
    """Return the version of the library."""
    return torch.__version__.partition("+")[0]
