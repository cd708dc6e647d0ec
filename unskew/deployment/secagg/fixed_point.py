"""Fixed-point encoding of masked sums: 32-bit integers, because masks are perfectly hiding only in modular arithmetic.

Tensors of 32-bit integers are added as they are, modulo ``2^32``. The step size of each other tensor is a power of two that
follows from the largest entry of all sites and the number of sites, so that the sum just fits. Rounding is to nearest, so the
same update always gives the same integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

LOWEST = -200
"""Exponent of a zero tensor."""
PIECE = 1 << 22


@dataclass(frozen=True)
class SumPart:
    """Layout of one tensor of a sum, equal for all sites.

    Attributes:
        name: Name of the tensor.
        dtype: Dtype of the tensor.
        shape: Shape of the tensor.
        exponent: Upper bound of the entries' magnitude, as a power of two; unused for 32-bit integers.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    exponent: int = LOWEST

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    def step(self, sites: int) -> float:
        """Return the step size, such that the sum over ``sites`` stays below ``2 ** 31``; 1 for 32-bit integers."""
        return 1.0 if self.dtype == torch.int32 else step_size(self.exponent, sites)


def required_exponent(tensor: Tensor, weight: float) -> int:
    """Return the smallest exponent such that no entry times ``weight`` exceeds two to this power.

    For 32-bit integers it is a constant, because they are added as they are, and it would depend on the data.

    Args:
        tensor: Values to encode.
        weight: Factor of the values, positive.

    >>> required_exponent(torch.tensor([3.0, -1.0]), 1.0), required_exponent(torch.zeros(2), 1.0)
    (2, -200)
    """
    if not tensor.numel() or tensor.dtype == torch.int32:
        return LOWEST
    top = max(abs(float(tensor.min())), abs(float(tensor.max()))) * weight
    return LOWEST if top == 0 else max(LOWEST, math.frexp(top)[1])


def step_size(exponent: int, sites: int) -> float:
    """Return the step size for entries up to ``2 ** exponent`` such that the sum over the sites stays below ``2 ** 31``.

    Args:
        exponent: Exponent of the largest entry.
        sites: Number of summands.
    """
    return math.ldexp(1.0, exponent - (30 - math.ceil(math.log2(max(2, sites)))))


def quantize(tensors: Sequence[tuple[Tensor, float, float]]) -> tuple[np.ndarray, list[float]]:
    """Encode weighted tensors as integers.

    Args:
        tensors: Tensors with weight and step size.

    Returns:
        The concatenated integers, uint32, and the largest rounding error of each tensor.
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
    """Decode a sum to tensors in double precision, by name.

    Args:
        whole: Sum of the integers, uint32.
        parts: Layout of the sum.
        sites: Number of summands.
    """
    tensors, at = {}, 0
    for part in parts:
        numbers = torch.from_numpy(whole[at : at + part.size].view(np.int32))
        tensors[part.name] = (numbers.double() * part.step(sites)).view(part.shape)
        at += part.size
    return tensors
