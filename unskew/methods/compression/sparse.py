"""Sparse codes: the entries of largest magnitude (top-k), or entries drawn at random (rand-k).

Paper: sparsification with error feedback, Stich et al. 2018, arXiv:1809.07599.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unskew.errors import UnskewError
from unskew.methods.compression.packing import check_tensors, long_hashes, pack_integers, packed_size, unpack_integers
from unskew.protocol.messages import Tensors


def sparse_count(share: float, n: int) -> int:
    """Return the number of entries that a sparse code of a vector contains, ``ceil(share n)``.

    Products slightly above an integer, because of rounding, count as the integer.

    Args:
        share: Share of the entries, in (0, 1].
        n: Length of the vector.

    >>> sparse_count(0.07, 100), sparse_count(0.01, 1), 0.07 * 100
    (7, 1, 7.000000000000001)
    """
    product = share * n
    return min(n, max(1, math.ceil(round(product - 4 * math.ulp(product), 9))))


def _sends_indices(k: int, n: int) -> bool:
    """Return whether ``k`` int32 indices take at most as many bytes as a bitmap of ``n`` bits."""
    return 4 * k <= packed_size(n, 1)


def _largest_entries(v: Tensor, k: int) -> Tensor:
    """Return a mask of the ``k`` entries of largest magnitude, ``[n]``: NaN counts as infinite, ties go to small indices."""
    magnitude = v.abs()
    magnitude = torch.where(magnitude.isnan(), torch.inf, magnitude)
    threshold = magnitude.topk(k, sorted=False).values.min()  # deterministic on a GPU, unlike kthvalue
    mask = magnitude > threshold
    tied = (magnitude == threshold).nonzero().flatten()
    mask[tied[: k - int(mask.sum())]] = True
    return mask


def encode_topk(v: Tensor, share: float) -> Tensors:
    """Encode the entries of largest magnitude; ties go to the smallest index.

    NaN counts as infinite, so the code of a vector that is not finite contains such an entry.

    Args:
        v: Vector, ``[n]``, with ``n < 2^31``.
        share: Share of the entries to send, in (0, 1].

    Returns:
        ``values [k]`` by increasing index, ``count [1]`` (int32), and either ``indices [k]`` (int32) or
        ``bitmap [ceil(n / 8)]`` (uint8), whichever is smaller.
    """
    n, k = len(v), sparse_count(share, len(v))
    mask = _largest_entries(v, k) if k < n else torch.ones(n, dtype=torch.bool, device=v.device)
    indices = mask.nonzero().flatten()
    code = {"values": v[indices], "count": torch.tensor([k], dtype=torch.int32, device=v.device)}
    if _sends_indices(k, n):
        return {**code, "indices": indices.to(torch.int32)}
    return {**code, "bitmap": pack_integers(mask, 1)}


def decode_topk(code: Tensors, n: int, dtype: torch.dtype) -> Tensor:
    """Decode a vector from its entries of largest magnitude; other entries are zero.

    Args:
        code: Code from a client.
        n: Length of the vector.
        dtype: Data type of the vector.

    Returns:
        Vector, ``[n]``.

    Raises:
        UnskewError: If the code is not valid.
    """
    count = code.get("count")
    if not isinstance(count, Tensor) or count.dtype != torch.int32 or tuple(count.shape) != (1,):
        raise UnskewError("The tensor count of a topk code must have the type int32 and the shape [1].")
    k = int(count)
    if not min(n, 1) <= k <= n:
        raise UnskewError(f"The count of a topk code must be between {min(n, 1)} and {n}.")
    shared = {"values": (dtype, k), "count": (torch.int32, 1)}
    if _sends_indices(k, n):
        check_tensors("topk", code, {**shared, "indices": (torch.int32, k)})
        indices = code["indices"].to(torch.int64)
        if bool(((indices < 0) | (indices >= n)).any()) or bool((indices.diff() <= 0).any()):
            raise UnskewError(f"The indices of a topk code must increase and be between 0 and {n - 1}.")
    else:
        check_tensors("topk", code, {**shared, "bitmap": (torch.uint8, packed_size(n, 1))})
        indices = unpack_integers("topk", code["bitmap"], n, 1).nonzero().flatten()
        if len(indices) != k:
            raise UnskewError("The bitmap of a topk code must mark as many entries as the code counts.")
    decoded = torch.zeros(n, dtype=dtype, device=indices.device)
    decoded[indices] = code["values"]
    return decoded


def randk_indices(key: Tensor, k: int, n: int) -> Tensor:
    """Draw ``k`` of ``n`` indices without repetition, a pure function of ``key``.

    Each index has its own hash of the key, and the indices of the ``k`` smallest hashes are drawn.

    Args:
        key: Random key, int64, one element.
        k: Number of indices, at most ``n``.
        n: Number of possible indices.

    Returns:
        Increasing indices, int64 ``[k]``.
    """
    if k in (0, n):
        return torch.arange(k, device=key.device)
    hashes = long_hashes(key, n)
    return (hashes <= hashes.topk(k, largest=False, sorted=False).values.max()).nonzero().flatten()


def encode_randk(v: Tensor, share: float, key: Tensor) -> Tensors:
    """Encode entries that are drawn at random; the decoded vector is an unbiased estimate.

    Values are sent as they are and multiplied by ``n / k`` during decoding. So the ``values`` of several codes with the
    same seed can be summed, and the result decodes to the sum of the decoded vectors.

    Args:
        v: Vector, ``[n]``. If an entry is not finite, all values that are sent are NaN.
        share: Share of the entries to send, in (0, 1].
        key: Random key, int64, one element.

    Returns:
        ``values [k]`` and ``seed [1]`` (int64), the key, from which the indices follow.
    """
    indices = randk_indices(key.to(v.device), sparse_count(share, len(v)), len(v))
    values = torch.where(v.isfinite().all(), v[indices], torch.nan)
    return {"values": values, "seed": key.to(v.device).reshape(1)}


def decode_randk(code: Tensors, n: int, dtype: torch.dtype) -> Tensor:
    """Decode an unbiased estimate of a vector from entries drawn at random; other entries are zero.

    Args:
        code: Code from a client, or a sum of codes with the same seed.
        n: Length of the vector.
        dtype: Data type of the vector.

    Returns:
        Vector, ``[n]``.

    Raises:
        UnskewError: If the code is not valid.
    """
    values = code.get("values")
    k = values.numel() if isinstance(values, Tensor) else 0
    if not min(n, 1) <= k <= n:
        raise UnskewError(f"A randk code must have between {min(n, 1)} and {n} values.")
    check_tensors("randk", code, {"values": (dtype, k), "seed": (torch.int64, 1)})
    indices = randk_indices(code["seed"], k, n)
    decoded = torch.zeros(n, dtype=dtype, device=indices.device)
    decoded[indices] = code["values"] * (n / max(k, 1))
    return decoded
