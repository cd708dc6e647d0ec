"""Building blocks of the codes: packed integers, buckets, random numbers of long vectors, and validation of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.errors import UnskewError
from unskew.protocol.messages import Tensors
from unskew.seeding import fold, uniform

CHUNK = 1 << 14
"""Number of random numbers drawn at once: intermediate results stay in the processor's cache (ten times as fast)."""


def check_tensors(name: str, code: Tensors, expected: Mapping[str, tuple[torch.dtype, int]]) -> None:
    """Validate that a code has exactly the expected tensors.

    Args:
        name: Name of the compression method, for messages.
        code: Code from a client.
        expected: Data type and length of each tensor.

    Raises:
        UnskewError: If a tensor is missing, unexpected, or of another data type or shape.
    """
    if code.keys() != expected.keys():
        raise UnskewError(f"A {name} code must have exactly the tensors {', '.join(sorted(expected))}.")
    for key, (dtype, size) in expected.items():
        tensor = code[key]
        if not isinstance(tensor, Tensor) or tensor.dtype != dtype or tuple(tensor.shape) != (size,):
            wanted = str(dtype).removeprefix("torch.")
            raise UnskewError(f"The tensor {key} of a {name} code must have the type {wanted} and the shape [{size}].")


def to_buckets(v: Tensor, bucket: int) -> Tensor:
    """Split a vector ``[n]`` into rows of ``bucket`` entries; the last row is filled up with zeros.

    Args:
        v: Vector, ``[n]``.
        bucket: Number of entries of a bucket; ``n`` if it is larger.

    Returns:
        Buckets, ``[ceil(n / bucket), min(n, bucket)]``.
    """
    width = max(1, min(bucket, len(v)))
    return F.pad(v, (0, -len(v) % width)).reshape(-1, width)


def num_buckets(n: int, bucket: int) -> int:
    """Return the number of buckets of a vector, ``ceil(n / bucket)``.

    Args:
        n: Length of the vector.
        bucket: Number of entries of a bucket.
    """
    return -(-n // bucket)


def long_uniform(key: Tensor, n: int) -> Tensor:
    """Return uniform float32 numbers in [0, 1), ``[n]``, each chunk of which is drawn with a key of its own.

    Args:
        key: Random key, int64, one element.
        n: Number of random numbers.
    """
    key = key.reshape(())
    numbers = torch.empty(n, device=key.device)
    for index, chunk in enumerate(torch.split(numbers, CHUNK)):
        chunk.copy_(uniform(fold(key, index), (len(chunk),)))
    return numbers


def long_hashes(key: Tensor, n: int) -> Tensor:
    """Return ``n`` different int64 hashes of a key, ``[n]``: hashing is a bijection of 64-bit integers.

    Args:
        key: Random key, int64, one element.
        n: Number of hashes.
    """
    key = fold(key.reshape(()), 0)
    hashes = torch.arange(n, device=key.device)
    for chunk in torch.split(hashes, CHUNK):
        chunk.copy_(fold(key, chunk))
    return hashes


def _overlaps(bits: int) -> Iterator[tuple[int, int, int]]:
    """Yield the index of an integer and a byte that share bits in a group of eight integers, and the right shift."""
    for index in range(8):
        first, end = index * bits, (index + 1) * bits
        for byte in range(first // 8, (end + 7) // 8):
            yield index, byte, end - 8 * (byte + 1)


def _shift_right(values: Tensor, shift: int) -> Tensor:
    """Shift integers to the right, or to the left if ``shift`` is negative."""
    return values >> shift if shift >= 0 else values << -shift


def packed_size(n: int, bits: int) -> int:
    """Return the number of bytes of packed integers, ``ceil(n bits / 8)``.

    Args:
        n: Number of integers.
        bits: Number of bits of each integer.
    """
    return -(-n * bits // 8)


def pack_integers(values: Tensor, bits: int) -> Tensor:
    """Pack integers into bits, the highest bit first, without gaps; unused bits of the last byte are zero.

    Eight integers fill exactly ``bits`` bytes, so all such groups are packed at once.

    Args:
        values: Integers in ``[0, 2^bits)``, or booleans, ``[n]``.
        bits: Number of bits of each integer, at most 24.

    Returns:
        Bytes, uint8 ``[ceil(n bits / 8)]``.

    >>> pack_integers(torch.tensor([1, 2, 3]), 3).tolist()  # 001 010 011
    [41, 128]
    """
    working = torch.uint8 if bits == 1 else torch.int32
    groups = F.pad(values.to(working), (0, -len(values) % 8)).reshape(-1, 8)
    packed = torch.zeros(len(groups), bits, dtype=working, device=values.device)
    for index, byte, shift in _overlaps(bits):
        packed[:, byte] |= _shift_right(groups[:, index], shift) & 255
    return packed.to(torch.uint8).flatten()[: packed_size(len(values), bits)].clone()


def unpack_integers(name: str, packed: Tensor, n: int, bits: int) -> Tensor:
    """Unpack integers from bits: the inverse of ``pack_integers``.

    Args:
        name: Name of the compression method, for messages.
        packed: Bytes, uint8 ``[ceil(n bits / 8)]``.
        n: Number of integers.
        bits: Number of bits of each integer, at most 24.

    Returns:
        Integers, ``[n]``: uint8 for one bit, int32 otherwise.

    Raises:
        UnskewError: If an unused bit of the last byte is set.
    """
    working = torch.uint8 if bits == 1 else torch.int32
    groups = F.pad(packed, (0, -len(packed) % bits)).reshape(-1, bits).to(working)
    values = torch.zeros(len(groups), 8, dtype=working, device=packed.device)
    for index, byte, shift in _overlaps(bits):
        values[:, index] |= _shift_right(groups[:, byte], -shift)
    flat = (values & ((1 << bits) - 1)).flatten()
    if bool((flat[n:] != 0).any()):
        raise UnskewError(f"A {name} code has bits beyond its last entry.")
    return flat[:n]
