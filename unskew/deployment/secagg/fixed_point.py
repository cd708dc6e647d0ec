"""Numbers of a sum that is masked: integers of 32 bits, as masks are only perfect where sums wrap around.

Each tensor has a step of its own, a power of two that follows from the largest entry of all sites and from how many they
are, so that their sum just fits. Rounding is to the nearest: the same update always gives the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

LOWEST = -200
"""The exponent of zero."""
PIECE = 1 << 22


@dataclass(frozen=True)
class SumPart:
    """One tensor of a sum, as all sites have it.

    Attributes:
        name: What it is called.
        dtype: Its type.
        shape: Its shape.
        exponent: No entry is larger than two to this.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    exponent: int = LOWEST

    @property
    def size(self) -> int:
        """Its entries."""
        return math.prod(self.shape)


def required_exponent(tensor: Tensor, weight: float) -> int:
    """The smallest integer so that no entry, times ``weight``, is larger than two to it.

    Args:
        tensor: Values to encode.
        weight: Factor of the values.

    >>> required_exponent(torch.tensor([3.0, -1.0]), 1.0), required_exponent(torch.zeros(2), 1.0)
    (2, -200)
    """
    if not tensor.numel():
        return LOWEST
    top = max(abs(float(tensor.min())), abs(float(tensor.max()))) * weight
    return LOWEST if top == 0 else max(LOWEST, math.frexp(top)[1])


def step_size(exponent: int, sites: int) -> float:
    """The step in which so many sites round entries up to ``2 ** exponent``: their sum stays below ``2 ** 31``.

    Args:
        exponent: Exponent of the largest value.
        sites: Number of summands.
    """
    return math.ldexp(1.0, exponent - (30 - math.ceil(math.log2(max(2, sites)))))


def quantize(tensors: Sequence[tuple[Tensor, float, float]]) -> tuple[np.ndarray, list[float]]:
    """Tensors times their weights, in their steps, one after another; and by how much rounding has moved an entry at most.

    Args:
        tensors: Each with its weight and its step.
    """
    integers = np.empty(sum(t.numel() for t, _, _ in tensors), np.int32)
    errors, at = [], 0
    for tensor, weight, by in tensors:
        worst = 0.0
        for chunk in _pieces(tensor):
            exact = chunk.double() * weight
            rounded = torch.round(exact / by)
            worst = max(worst, float((rounded * by - exact).abs().max()))
            integers[at : at + len(chunk)] = rounded.to(torch.int32).numpy()
            at += len(chunk)
        errors.append(worst)
    return integers.view(np.uint32), errors


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    flat = tensor.detach().cpu().reshape(-1)
    for start in range(0, flat.numel(), PIECE):
        yield flat[start : start + PIECE]


def dequantize(whole: np.ndarray, parts: Sequence[SumPart], sites: int) -> dict[str, Tensor]:
    """The sums in double precision, by name.

    Args:
        whole: Sum of the encoded values, uint32.
        parts: Layout of the sum.
        sites: Number of summands.
    """
    tensors, at = {}, 0
    for part in parts:
        numbers = torch.from_numpy(whole[at : at + part.size].view(np.int32))
        tensors[part.name] = (numbers.double() * step_size(part.exponent, sites)).view(part.shape)
        at += part.size
    return tensors
