"""Exact encoding of float64 numbers for masked sums: fixed point with 256 bits, in eight pieces of 32 bits.

The summands of federated sums differ by many orders of magnitude, and no site may know the others' largest. So a number is
an integer multiple of ``2^-96``, and its eight pieces are added modulo ``2^64``, each with room for ``2^31`` sites. Only
summands below ``2^-96`` are rounded, and the sum once, to float64, as in Kulisch's accumulator. A summand that is not
finite, or ``2^156`` and more, is encoded as ``2^157``, so that the sum is NaN at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from unskew.sums.base import SumRequest, Sums
from unskew.sums.registry import SUMS

FRACTION = 96
"""Bits after the binary point."""
PIECES = 8
"""Pieces of 32 bits of a number."""
UNDEFINED = 2.0**157
"""Number that makes a sum undefined; other summands are smaller than half of it."""


def split(values: np.ndarray) -> np.ndarray:
    """Split float64 numbers into signed pieces of 32 bits, int64 ``[n, PIECES]``, the lowest first.

    >>> split(np.array([-1.5]))[0].tolist()
    [0, 0, -2147483648, -1, 0, 0, 0, 0]
    """
    values = np.where(np.abs(values) < UNDEFINED / 2, values, UNDEFINED)
    scaled = np.rint(np.ldexp(np.abs(values), FRACTION))
    mantissa, exponent = np.frexp(scaled)
    integer, shift = np.ldexp(mantissa, 53).astype(np.uint64), exponent - 53
    integer >>= np.maximum(-shift, 0).astype(np.uint64)  # exact: the number is an integer
    piece, within = np.divmod(np.maximum(shift, 0), 32)
    low, high = integer & np.uint64(0xFFFFFFFF), integer >> np.uint64(32)
    low, high = low << within.astype(np.uint64), high << within.astype(np.uint64)
    pieces = np.zeros((len(values), PIECES + 2), np.int64)
    rows = np.arange(len(values))
    for offset, part in ((0, low & np.uint64(0xFFFFFFFF)), (1, low >> np.uint64(32))):
        pieces[rows, piece + offset] += part.astype(np.int64)
    for offset, part in ((1, high & np.uint64(0xFFFFFFFF)), (2, high >> np.uint64(32))):
        pieces[rows, piece + offset] += part.astype(np.int64)
    return np.asarray(pieces[:, :PIECES] * np.sign(values).astype(np.int64)[:, None])


def join(pieces: np.ndarray) -> np.ndarray:
    """Return the float64 numbers of summed pieces ``[n, PIECES]``, each rounded once; NaN if a summand was undefined.

    >>> join(split(np.array([np.inf])) + split(np.array([-1.0])))
    array([nan])
    """
    one = 1 << FRACTION
    sums = np.array([sum(int(p) << 32 * i for i, p in enumerate(row)) / one for row in pieces.tolist()], np.float64)
    return np.where(np.abs(sums) < UNDEFINED / 2, sums, np.nan)


def encode(requests: Sequence[SumRequest], sums: Sequence[Sums]) -> Tensor:
    """Encode summands as integers, int64 ``[m]``: counts as they are, sums in pieces.

    Args:
        requests: Requests.
        sums: Summands of a site for each request.
    """
    parts = [np.zeros(0, np.int64)]
    for request, own in zip(requests, sums, strict=True):
        for name in SUMS[request.kind].shapes(request):
            flat = own[name].detach().cpu().reshape(-1).numpy()
            parts.append(flat if flat.dtype == np.int64 else split(flat).reshape(-1))
    return torch.from_numpy(np.concatenate(parts))


def decode(requests: Sequence[SumRequest], integers: np.ndarray) -> list[Sums]:
    """Decode the sums over all sites.

    Args:
        requests: Requests.
        integers: Sum of what ``encode`` returned, int64.
    """
    decoded, at = [], 0
    for request in requests:
        tensors = {}
        for name, (dtype, shape) in SUMS[request.kind].shapes(request).items():
            size = int(np.prod(shape, dtype=np.int64))
            length = size if dtype == torch.int64 else size * PIECES
            flat = integers[at : at + length]
            values = flat if dtype == torch.int64 else join(flat.reshape(-1, PIECES))
            tensors[name] = torch.from_numpy(np.ascontiguousarray(values)).view(shape)
            at += length
        decoded.append(tensors)
    return decoded


def encoded_size(requests: Sequence[SumRequest]) -> int:
    """Return the number of integers of ``encode``."""
    shapes = [one for request in requests for one in SUMS[request.kind].shapes(request).values()]
    return sum(int(np.prod(shape, dtype=np.int64)) * (1 if dtype == torch.int64 else PIECES) for dtype, shape in shapes)
