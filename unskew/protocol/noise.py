"""Standard normal noise of the server: reproducible in a simulation, from the system's entropy in a deployment."""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

from unskew.seeding import derive, fold, normal


class NoiseSource:
    """Source of standard normal noise.

    Args:
        seed: Seed of a simulated run; None draws from the system's entropy, because clients of a real run know its seed.
    """

    def __init__(self, seed: int | None):
        self.seed = seed

    def normal(self, round: int, number: int, like: Tensor) -> Tensor:
        """Return standard normal noise like a tensor; in a simulation it is a pure function of the arguments.

        Args:
            round: Number of the round, from 0.
            number: Number of the draw within the round.
            like: Tensor with the shape, dtype and device of the noise.
        """
        if self.seed is None:
            return system_normal(like.numel()).reshape(like.shape).to(like)
        key = torch.tensor(derive(self.seed, "server noise", round), device=like.device)
        return normal(fold(key, number), tuple(like.shape)).to(like.dtype)


def system_normal(count: int) -> Tensor:
    """Return standard normal float64 numbers from the system's entropy, ``[count]`` (Box-Muller transform).

    Args:
        count: Number of draws.
    """
    bits = torch.frombuffer(bytearray(os.urandom(16 * count)), dtype=torch.int64) if count else torch.empty(0).long()
    # 53 bits each, in (0, 1], so that the logarithm is finite.
    uniform = ((bits & ((1 << 53) - 1)) + 1).to(torch.float64) * 2.0**-53
    first, second = uniform[:count], uniform[count:]
    return torch.sqrt(-2 * torch.log(first)) * torch.cos(2 * math.pi * second)
