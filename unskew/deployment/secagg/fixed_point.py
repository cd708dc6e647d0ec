"""Fixed-point encoding of masked sums: 64-bit integers, because masks are perfectly hiding only in modular arithmetic.

The grid is a constant and the number of sites: the same for every experiment, round and tensor. Neither the server nor a site
chooses it, and it tells nothing about the data. The 64 bits suffice for entries from ``2^-28`` to ``2^32``. Rounding is to
nearest, so the same update always gives the same integers. Tensors of 64-bit integers are added as they are, and those of
32-bit integers modulo ``2^32``: they fill the upper half of the 64 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

RANGE = 2.0**32
"""Bound of the magnitude of an entry times its weight."""
PIECE = 1 << 22


@dataclass(frozen=True)
class SumPart:
    """Layout of one tensor of a sum, equal for all sites.

    Attributes:
        name: Name of the tensor.
        dtype: Dtype of the tensor.
        shape: Shape of the tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)


def step_size(sites: int) -> float:
    """Return the step size, with which the sum of entries up to ``RANGE`` over the sites stays below ``2 ** 62``.

    Args:
        sites: Number of summands.

    >>> step_size(4) == 2.0**-28
    True
    """
    return math.ldexp(RANGE, math.ceil(math.log2(max(2, sites))) - 62)


def is_in_range(tensor: Tensor, weight: float) -> bool:
    """Return whether all entries times the weight are finite and below ``RANGE``.

    Args:
        tensor: Values to encode.
        weight: Factor of the values.
    """
    if not tensor.numel() or tensor.dtype in (torch.int32, torch.int64):
        return True
    return float(tensor.abs().max()) * abs(weight) < RANGE


def quantize(tensors: Sequence[tuple[Tensor, float]], sites: int) -> np.ndarray:
    """Encode weighted tensors as one vector of integers, uint64.

    Args:
        tensors: Tensors with their weights, see ``is_in_range``.
        sites: Number of summands.
    """
    integers = np.empty(sum(t.numel() for t, _ in tensors), np.int64)
    at, step = 0, step_size(sites)
    for tensor, weight in tensors:
        for chunk in _pieces(tensor):
            if tensor.dtype == torch.int64:
                encoded = chunk
            elif tensor.dtype == torch.int32:
                encoded = chunk.to(torch.int64) << 32
            else:
                encoded = torch.round(chunk.double() * weight / step).to(torch.int64)
            integers[at : at + len(chunk)] = encoded.numpy()
            at += len(chunk)
    return integers.view(np.uint64)


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    flat = tensor.detach().cpu().reshape(-1)
    for start in range(0, flat.numel(), PIECE):
        yield flat[start : start + PIECE]


def dequantize(integer_sum: np.ndarray, parts: Sequence[SumPart], sites: int) -> dict[str, Tensor]:
    """Decode a sum to tensors in double precision, or int64 if the summands are, by name.

    Args:
        integer_sum: Sum of the integers, uint64.
        parts: Layout of the sum.
        sites: Number of summands.
    """
    tensors, at, step = {}, 0, step_size(sites)
    for part in parts:
        numbers = torch.from_numpy(integer_sum[at : at + part.size].view(np.int64))
        values = numbers
        if part.dtype != torch.int64:
            values = (numbers >> 32).double() if part.dtype == torch.int32 else numbers.double() * step
        tensors[part.name] = values.view(part.shape)
        at += part.size
    return tensors
