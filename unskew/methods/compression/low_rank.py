"""Low-rank codes of matrices by one power iteration per round (PowerSGD).

Paper: Vogels et al. 2019, arXiv:1905.13727.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unskew.errors import UnskewError
from unskew.methods.compression.packing import check_tensors
from unskew.protocol.messages import Tensors
from unskew.seeding import normal


class _Layer(NamedTuple):
    """Layer of a vector as a matrix of ``rows x columns``; rank 0 if it is sent uncompressed."""

    size: int
    rows: int
    columns: int
    rank: int


def _layers(shapes: Sequence[tuple[int, ...]], rank: int) -> list[_Layer]:
    """Return the layers as matrices; vectors, and matrices that would shrink less than twofold, have rank 0."""
    layers = []
    for shape in shapes:
        size = math.prod(shape)
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (size, 1)
        r = min(rank, rows, columns)
        compressed = len(shape) > 1 and r > 0 and 2 * r * (rows + columns) <= rows * columns
        layers.append(_Layer(size, rows, columns, r if compressed else 0))
    return layers


def _sizes(layers: list[_Layer]) -> tuple[int, int, int]:
    """Return the total numbers of entries of all matrices ``P``, of all matrices ``Q``, and of uncompressed layers."""
    left = sum(layer.rows * layer.rank for layer in layers)
    right = sum(layer.columns * layer.rank for layer in layers)
    return left, right, sum(layer.size for layer in layers if not layer.rank)


def _concatenated(parts: list[Tensor], like: Tensor) -> Tensor:
    """Concatenate flattened tensors; an empty vector like ``like`` if there are none."""
    return torch.cat([part.flatten() for part in parts]) if parts else like.new_zeros(0)


def _orthonormalized(matrix: Tensor) -> Tensor:
    """Orthonormalize the columns of a matrix as Gram-Schmidt does: every column keeps its direction."""
    q, r = torch.linalg.qr(matrix)
    signed: Tensor = q * torch.where(r.diagonal() < 0, -1, 1)
    return signed


def initial_powersgd_start(
    shapes: Sequence[tuple[int, ...]], rank: int, key: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Draw the initial matrices ``Q`` of the first round from a standard normal distribution.

    Args:
        shapes: Shapes of the layers, in the order of the vector.
        rank: Largest rank of an approximation.
        key: Random key, int64, one element.
        dtype: Data type of the vector.

    Returns:
        The matrices ``Q``, each ``[columns, rank]``, as one vector.
    """
    _, right, _ = _sizes(_layers(shapes, rank))
    return normal(key.reshape(()), (right,)).to(dtype)


def encode_powersgd(
    v: Tensor, shapes: Sequence[tuple[int, ...]], rank: int, start: Tensor | None, key: Tensor
) -> tuple[Tensors, Tensor]:
    """Approximate every matrix ``M [a, b]`` by ``P Q'^T`` with orthonormalized ``P = M Q`` and ``Q' = M^T P``.

    A convolution is a matrix of outputs by remaining axes. Vectors, and matrices that would shrink less than twofold, are
    sent uncompressed. The columns of ``Q`` are scaled to the largest magnitude 1 before use, which changes no result but
    avoids overflow.

    Args:
        v: Vector, ``[n]``. A matrix with an entry that is not finite gets a ``P`` of NaN.
        shapes: Shapes of the layers, in the order of the vector.
        rank: Largest rank of an approximation.
        start: Matrices ``Q`` from the previous round, as one vector; None in the first round.
        key: Random key of the first ``Q``, int64, one element; not used with ``start``.

    Returns:
        The code: ``left`` (all ``P [a, r]``), ``right`` (all ``Q' [b, r]``) and ``uncompressed`` (all other layers), each as
        one vector; and ``start`` of the next round: all ``Q'``, where columns that are zero or not finite keep their value.

    Raises:
        UnskewError: If the shapes do not fit the vector, or ``start`` does not fit the shapes.
    """
    layers = _layers(shapes, rank)
    _, right_size, _ = _sizes(layers)
    if sum(layer.size for layer in layers) != len(v):
        raise UnskewError(f"The shapes of powersgd must have {len(v)} entries in total.")
    if start is None:
        start = initial_powersgd_start(shapes, rank, key.to(v.device), v.dtype)
    if tuple(start.shape) != (right_size,):
        raise UnskewError(f"The start of powersgd must have {right_size} entries.")
    lefts, rights, uncompressed, starts = [], [], [], []
    tensors = torch.split(v, [layer.size for layer in layers])
    initial = torch.split(start, [layer.columns * layer.rank for layer in layers])
    for layer, tensor, flat in zip(layers, tensors, initial, strict=True):
        if not layer.rank:
            uncompressed.append(tensor)
            continue
        finite = tensor.isfinite().all()
        matrix = torch.where(finite, tensor, 0).reshape(layer.rows, layer.columns)
        old = flat.reshape(layer.columns, layer.rank)
        peaks = old.abs().amax(dim=0)
        left = _orthonormalized(matrix @ (old / torch.where(peaks > 0, peaks, 1)))
        right = matrix.T @ left
        peaks = right.abs().amax(dim=0)
        starts.append(torch.where((peaks > 0) & peaks.isfinite(), right, old))
        lefts.append(torch.where(finite, left, torch.nan))
        rights.append(right)
    code = {
        "left": _concatenated(lefts, v),
        "right": _concatenated(rights, v),
        "uncompressed": _concatenated(uncompressed, v),
    }
    return code, _concatenated(starts, v)


def decode_powersgd(code: Tensors, shapes: Sequence[tuple[int, ...]], rank: int, dtype: torch.dtype) -> Tensor:
    """Decode a vector from low-rank approximations of its matrices.

    Args:
        code: Code from a client.
        shapes: Shapes of the layers, in the order of the vector.
        rank: Largest rank of an approximation.
        dtype: Data type of the vector.

    Returns:
        Vector, ``[n]``, where ``n`` is the number of entries of all layers.

    Raises:
        UnskewError: If the code is not valid.
    """
    layers = _layers(shapes, rank)
    left_size, right_size, uncompressed_size = _sizes(layers)
    sizes = {"left": left_size, "right": right_size, "uncompressed": uncompressed_size}
    check_tensors("powersgd", code, {name: (dtype, size) for name, size in sizes.items()})
    lefts = iter(torch.split(code["left"], [layer.rows * layer.rank for layer in layers if layer.rank]))
    rights = iter(torch.split(code["right"], [layer.columns * layer.rank for layer in layers if layer.rank]))
    uncompressed = iter(torch.split(code["uncompressed"], [layer.size for layer in layers if not layer.rank]))
    decoded = []
    for layer in layers:
        if not layer.rank:
            decoded.append(next(uncompressed))
            continue
        left = next(lefts).reshape(layer.rows, layer.rank)
        right = next(rights).reshape(layer.columns, layer.rank)
        decoded.append(left @ right.T)
    return _concatenated(decoded, code["uncompressed"])
