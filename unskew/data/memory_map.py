"""Memory-mapped arrays: find the file that a tensor is mapped from, and map it again from its path.

Another process, or another machine that can read the file, can then map the same file instead of receiving a copy.
"""

from __future__ import annotations

import os
import warnings
import weakref
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unskew.errors import DataError

_known: dict[int, weakref.ref[np.memmap]] = {}
"""Weak references to memory-mapped arrays by memory address."""


@dataclass(frozen=True)
class MmapLocation:
    """Location of a tensor in a file.

    Attributes:
        path: Path of the file.
        bytes: Size of the file, to detect a different file with the same name.
        offset: Offset of the tensor in the file, in bytes.
        dtype: Data type of the tensor.
        shape: Shape of the tensor.
        strides: Steps between neighboring elements along each dimension, in elements.
    """

    path: str
    bytes: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def mapped_array(values: object) -> np.memmap | None:
    """Return the memory-mapped array that an array is or is a view of, and register it for ``locate_tensor``."""
    mapped: np.memmap | None = None
    while isinstance(values, np.ndarray):
        if isinstance(values, np.memmap) and values.filename is not None:
            mapped = values
        values = values.base
    if mapped is not None:
        address = mapped.__array_interface__["data"][0]
        _known[address] = weakref.ref(mapped, lambda _: _known.pop(address, None))
    return mapped


def locate_tensor(x: Tensor) -> MmapLocation | None:
    """Return the location of a tensor in a file; None if it is in memory or the file no longer exists."""
    if not _known or x.device.type != "cpu" or not x.numel():
        return None
    extent = x.element_size() * (1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)))
    for address, reference in list(_known.items()):
        base_tensor = reference()
        if (
            base_tensor is not None
            and address <= x.data_ptr()
            and x.data_ptr() + extent <= address + base_tensor.nbytes
        ):
            path, offset = str(base_tensor.filename), int(base_tensor.offset) + x.data_ptr() - address
            try:
                size = os.stat(path).st_size
            except OSError:
                return None
            return MmapLocation(path, size, offset, x.dtype, tuple(x.shape), tuple(x.stride()))
    return None


def open_tensor(piece: MmapLocation) -> Tensor:
    """Map a tensor from its file.

    Args:
        piece: Location of the tensor in a file.

    Raises:
        DataError: If this machine cannot read the file, or the file has a different size.
    """
    try:
        file_size = os.stat(piece.path).st_size
        mapped_file = np.memmap(piece.path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise DataError(
            f"{os.uname().nodename} cannot read {piece.path}, from which the data are mapped: {error}. Make the file "
            "available to all nodes under this path, or use ray.data=store."
        ) from error
    if file_size != piece.bytes:
        raise DataError(
            f"{piece.path} has {file_size:,} bytes on {os.uname().nodename}, but {piece.bytes:,} at the server. Make "
            "sure that all nodes have the same file."
        )
    mapped_array(mapped_file)
    count = 1 + sum((n - 1) * step for n, step in zip(piece.shape, piece.strides, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that the memory is read-only; nothing writes to it
        line = torch.frombuffer(mapped_file, dtype=piece.dtype, count=count, offset=piece.offset)
    return line.as_strided(piece.shape, piece.strides)
