"""Quantized codes: stochastic levels (QSGD), signs, 8-bit integers, and 16-bit floating-point numbers.

Papers: QSGD, Alistarh et al. 2017, arXiv:1610.02132; scaled signs, Karimireddy et al. 2019, arXiv:1901.09847.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.errors import UnskewError
from unskew.methods.compression.packing import (
    check_tensors,
    long_uniform,
    num_buckets,
    pack_integers,
    packed_size,
    to_buckets,
    unpack_integers,
)
from unskew.protocol.messages import Tensors

_SENT = {torch.float16: torch.int16, torch.bfloat16: torch.bfloat16}
"""Data types in which rounded numbers are sent."""


def _check_not_negative(name: str, scales: Tensor) -> None:
    """Validate that no scale is negative; scales that are not finite pass, and so does the update that they spoil."""
    if bool((scales < 0).any()):
        raise UnskewError(f"The scales of a {name} code must not be negative.")


def _divisor(scales: Tensor) -> Tensor:
    """Return scales as a column to divide by, with 1 in place of 0."""
    return torch.where(scales > 0, scales, 1).unsqueeze(1)


def _level_bits(s: int) -> int:
    """Return the number of bits of a signed level, ``ceil(log2(2 s + 1))``."""
    return (2 * s).bit_length()


def encode_qsgd(v: Tensor, s: int, bucket: int, key: Tensor) -> Tensors:
    """Encode magnitudes as stochastically rounded levels ``0, ..., s`` relative to the norm of each bucket.

    The decoded vector is an unbiased estimate; its expected squared error is at most ``min(b / s^2, sqrt(b) / s)`` times
    the squared norm for each bucket of ``b`` entries.

    Args:
        v: Vector, ``[n]``. A bucket with an entry that is not finite gets such a norm.
        s: Number of levels above zero, below 2^23.
        bucket: Number of entries of a bucket.
        key: Random key, int64, one element.

    Returns:
        ``norms [ceil(n / bucket)]`` and ``levels`` (uint8): signed levels plus ``s``, packed into ``ceil(log2(2 s + 1))``
        bits each.
    """
    bits = _level_bits(s)
    rows = to_buckets(v, bucket)
    peaks = rows.abs().amax(dim=1)
    norms = peaks * (rows / _divisor(peaks)).norm(dim=1)  # without overflow or underflow of squares
    ratios = ((rows / _divisor(norms)).flatten()[: len(v)] * s).nan_to_num(0.0).clamp(-s, s)
    magnitudes = ratios.abs()
    floors = magnitudes.floor()
    up = long_uniform(key.to(v.device), len(v)) < magnitudes - floors
    levels = torch.where(ratios < 0, -(floors + up), floors + up).to(torch.int32) + s
    return {"norms": norms, "levels": pack_integers(levels, bits)}


def decode_qsgd(code: Tensors, s: int, bucket: int, n: int, dtype: torch.dtype) -> Tensor:
    """Decode an unbiased estimate of a vector from stochastic levels.

    Args:
        code: Code from a client.
        s: Number of levels above zero.
        bucket: Number of entries of a bucket.
        n: Length of the vector.
        dtype: Data type of the vector.

    Returns:
        Vector, ``[n]``.

    Raises:
        UnskewError: If the code is not valid.
    """
    bits = _level_bits(s)
    sizes = {"norms": (dtype, num_buckets(n, bucket)), "levels": (torch.uint8, packed_size(n, bits))}
    check_tensors("qsgd", code, sizes)
    _check_not_negative("qsgd", code["norms"])
    levels = unpack_integers("qsgd", code["levels"], n, bits)
    if bool((levels > 2 * s).any()):
        raise UnskewError(f"The levels of a qsgd code must be between {-s} and {s}.")
    rows = to_buckets((levels - s).to(dtype) / s, bucket)
    return (rows * code["norms"].unsqueeze(1)).flatten()[:n]


def encode_sign(v: Tensor, sizes: Sequence[int]) -> Tensors:
    """Encode the signs of the entries, and the mean magnitude of each layer; zero counts as positive.

    Args:
        v: Vector, ``[n]``. A layer with an entry that is not finite gets such a scale.
        sizes: Numbers of entries of the layers, whose sum is ``n``.

    Returns:
        ``scales [L]`` and ``signs [sum of ceil(size / 8)]`` (uint8): one bit per entry, each layer from a new byte on.
    """
    layers = torch.split(v, list(sizes))
    scales = [layer.abs().sum(dtype=torch.float64) / max(1, len(layer)) for layer in layers]
    signs = [F.pad(layer >= 0, (0, -len(layer) % 8)) for layer in layers]
    return {
        "scales": torch.stack(scales).to(v.dtype) if scales else v.new_zeros(0),
        "signs": pack_integers(torch.cat(signs) if signs else v >= 0, 1),
    }


def decode_sign(code: Tensors, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Decode a vector from signs and the mean magnitude of each layer.

    Args:
        code: Code from a client.
        sizes: Numbers of entries of the layers.
        dtype: Data type of the vector.

    Returns:
        Vector, ``[n]``, where ``n`` is the sum of the sizes.

    Raises:
        UnskewError: If the code is not valid.
    """
    padded_sizes = [8 * packed_size(size, 1) for size in sizes]
    total = sum(padded_sizes)
    check_tensors("sign", code, {"scales": (dtype, len(sizes)), "signs": (torch.uint8, total // 8)})
    scales = code["scales"]
    _check_not_negative("sign", scales)
    positive = torch.split(unpack_integers("sign", code["signs"], total, 1).to(torch.bool), padded_sizes)
    decoded = torch.empty(sum(sizes), dtype=dtype, device=scales.device)
    unused = torch.zeros((), dtype=torch.bool, device=scales.device)
    for layer, signs, scale in zip(torch.split(decoded, list(sizes)), positive, scales, strict=True):
        layer.copy_(torch.where(signs[: len(layer)], scale, -scale))
        unused |= signs[len(layer) :].any()
    if bool(unused):
        raise UnskewError("A sign code has bits beyond the last entry of a layer.")
    return decoded


def encode_int8(v: Tensor, bucket: int) -> Tensors:
    """Round entries to the nearest of 255 equidistant values between plus and minus the largest magnitude of their bucket.

    Args:
        v: Vector, ``[n]``. A bucket with an entry that is not finite gets such a scale.
        bucket: Number of entries of a bucket.

    Returns:
        ``values [n]`` (int8) and ``scales [ceil(n / bucket)]``, the largest magnitude of each bucket divided by 127.
    """
    rows = to_buckets(v, bucket)
    scales = rows.abs().amax(dim=1) / 127
    values = (rows / _divisor(scales)).round().nan_to_num(0.0).clamp(-127, 127)
    return {"values": values.flatten()[: len(v)].to(torch.int8), "scales": scales}


def decode_int8(code: Tensors, bucket: int, n: int, dtype: torch.dtype) -> Tensor:
    """Decode a vector from 8-bit integers and the scale of each bucket.

    Args:
        code: Code from a client.
        bucket: Number of entries of a bucket.
        n: Length of the vector.
        dtype: Data type of the vector.

    Returns:
        Vector, ``[n]``.

    Raises:
        UnskewError: If the code is not valid.
    """
    check_tensors("int8", code, {"values": (torch.int8, n), "scales": (dtype, num_buckets(n, bucket))})
    _check_not_negative("int8", code["scales"])
    if bool((code["values"] == -128).any()):
        raise UnskewError("The values of an int8 code must be between -127 and 127.")
    rows = to_buckets(code["values"].to(dtype), bucket)
    return (rows * code["scales"].unsqueeze(1)).flatten()[:n]


def encode_rounded(v: Tensor, rounded: torch.dtype) -> Tensors:
    """Round entries to 16-bit floating-point numbers; finite values beyond their range become the largest finite number.

    Args:
        v: Vector, ``[n]``.
        rounded: ``float16`` or ``bfloat16``.

    Returns:
        ``values [n]``: bfloat16, or the bits of float16 as int16, because messages have no data type float16.
    """
    limit = torch.finfo(rounded).max
    return {"values": torch.where(v.isinf(), v, v.clamp(-limit, limit)).to(rounded).view(_SENT[rounded])}


def decode_rounded(name: str, code: Tensors, rounded: torch.dtype, n: int, dtype: torch.dtype) -> Tensor:
    """Decode a vector from 16-bit floating-point numbers.

    Args:
        name: Name of the compression method, for messages.
        code: Code from a client.
        rounded: ``float16`` or ``bfloat16``.
        n: Length of the vector.
        dtype: Data type of the vector.

    Returns:
        Vector, ``[n]``.

    Raises:
        UnskewError: If the code is not valid.
    """
    check_tensors(name, code, {"values": (_SENT[rounded], n)})
    return code["values"].view(rounded).to(dtype)
