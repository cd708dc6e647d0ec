"""Tensors as the arrays of a message, and validation of received tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from unskew.deployment.wire.frames import Blob, Frame
from unskew.errors import UnskewError
from unskew.protocol.messages import Slices, Tensors

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class InvalidMessageError(UnskewError):
    """A received message does not match the request; it is rejected as a whole."""


def printable(value: object) -> str:
    """Return received text as one line that is safe to show and log, without terminal control characters.

    >>> printable("a" + chr(27) + "[2Jb")
    'a [2Jb'
    """
    return "".join(c if c.isprintable() else " " for c in str(value)[:1000])


def encode_tensor(tensor: Tensor) -> Blob:
    """Encode a tensor as bytes."""
    dense = tensor.detach().cpu().contiguous()
    return Blob(NAMES[dense.dtype], tuple(dense.shape), dense.reshape(-1).view(torch.uint8).numpy().tobytes())


def encode_record(record: str, tensors: Tensors) -> dict[str, Blob]:
    """Encode tensors as the arrays of one record.

    Args:
        record: Name of the record.
        tensors: Tensors by name.
    """
    return {f"{record}/{name}": encode_tensor(tensor) for name, tensor in tensors.items()}


def decode_tensor(array: Blob) -> Tensor:
    """Decode an array into a tensor with its own memory; images get the channels-last memory format."""
    dtype = DTYPES[array.dtype if array.dtype != "bool" else "uint8"]
    flat = torch.frombuffer(bytearray(array.data), dtype=dtype) if array.data else torch.empty(0, dtype=dtype)
    tensor = flat.view(array.shape)
    if array.dtype == "bool":
        tensor = tensor != 0  # other bytes than 0 and 1 are not booleans
    return channels_last_images(tensor)


def channels_last_images(tensor: Tensor) -> Tensor:
    """Convert images ``[n, c, h, w]`` to the channels-last memory format, which arrays and files do not preserve."""
    return tensor.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if tensor.dim() == 4 else tensor


def decode_record(frame: Frame, record: str) -> Tensors:
    """Decode the arrays of one record.

    Args:
        frame: Message that was received.
        record: Name of the record.
    """
    start = f"{record}/"
    return {name.removeprefix(start): decode_tensor(a) for name, a in frame.arrays.items() if name.startswith(start)}


def check_records(frame: Frame, allowed: Iterable[str]) -> None:
    """Validate that a message contains only expected records.

    Args:
        frame: Message that was received.
        allowed: Names of the expected records.

    Raises:
        InvalidMessageError: If the message contains other records.
    """
    known = set(allowed)
    for name in frame.arrays:
        if name.partition("/")[0] not in known:
            raise InvalidMessageError(f"it contains an array {name[:80]!r} that was not requested")


def check_tensor(name: str, tensor: Tensor | None, like: Tensor, size: int, norm: float, finite: bool = True) -> Tensor:
    """Validate a received vector and return it.

    Args:
        name: Name of the tensor in error messages.
        tensor: Received tensor, or None if it is missing.
        like: Tensor with the expected dtype.
        size: Expected length.
        norm: Largest accepted Euclidean norm.
        finite: Whether all values must be finite.

    Raises:
        InvalidMessageError: If the tensor is missing, has another dtype or length, or is not finite or too large.
    """
    if tensor is None:
        raise InvalidMessageError(f"it has no {name}")
    if tensor.dtype != like.dtype or tuple(tensor.shape) != (size,):
        raise InvalidMessageError(
            f"{name} is {NAMES[tensor.dtype]} {tuple(tensor.shape)}, not {NAMES[like.dtype]} ({size},)"
        )
    check_norm(name, tensor, norm, finite)
    return tensor


def euclidean_norm(tensor: Tensor) -> float:
    """Return the norm of a tensor of floating-point numbers; NaN if one of them is not finite.

    Squares of large numbers do not overflow: a site could otherwise pass off finite numbers as a training that diverged.

    >>> euclidean_norm(torch.tensor([0.0, 4e200], dtype=torch.float64))
    4e+200
    """
    norm = float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) if tensor.numel() else 0.0
    if math.isfinite(norm):
        return norm
    if not bool(tensor.isfinite().all()):
        return math.nan
    largest = tensor.abs().max()
    return float(largest) * float(torch.linalg.vector_norm(tensor / largest))


def check_norm(name: str, tensor: Tensor, norm: float, finite: bool = True) -> None:
    """Validate that a tensor is finite and its norm is not too large.

    Args:
        name: Name of the tensor.
        tensor: The tensor.
        norm: Largest accepted norm.
        finite: Whether all values must be finite.

    Raises:
        InvalidMessageError: If the values are not finite, or their norm is too large.
    """
    if not tensor.is_floating_point():
        return
    length = euclidean_norm(tensor)
    if math.isnan(length) and finite:
        raise InvalidMessageError(f"{name} contains non-finite values")
    if length > norm:
        raise InvalidMessageError(f"{name} has the norm {length:.3g}, above the limit of {norm:.3g}")


def slices_as_text(slices: Slices | None) -> str | None:
    """Return slices as text; None means all.

    >>> slices_as_text((slice(0, 4), slice(6, 9))), slices_as_text(())
    ('0:4,6:9', '')
    """
    return None if slices is None else ",".join(f"{span.start}:{span.stop}" for span in slices)


def parse_slices(text: object, size: int) -> Slices | None:
    """Parse the text of ``slices_as_text``, for a vector of ``size`` elements.

    Args:
        text: Text to parse.
        size: Length of the vector.

    Raises:
        InvalidMessageError: If the slices are invalid, out of order, or exceed the vector.
    """
    if text is None:
        return None
    slices, end = [], 0
    try:
        for part in str(text).split(",") if text else []:
            start, _, stop = part.partition(":")
            slices.append(slice(int(start), int(stop)))
            if not end <= slices[-1].start <= slices[-1].stop <= size:
                raise ValueError
            end = slices[-1].stop
    except ValueError:
        raise InvalidMessageError(f"{str(text)[:60]!r} is not a valid list of slices of {size} parameters") from None
    return tuple(slices)
