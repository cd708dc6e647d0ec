"""Arrays that are mapped from files: which file the memory of a tensor is from, so that it can be opened by its path.

Another process, or another machine that sees the file, then maps it as well, and nothing of it is copied or sent.
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
"""Mapped files by their address in memory, for as long as somebody holds them."""


@dataclass(frozen=True)
class MmapLocation:
    """Location of a tensor in a file.

    Attributes:
        path: Of the file.
        bytes: Of the whole file, by which another one of the same name is noticed.
        offset: In bytes.
        dtype, shape, strides: Of the tensor.
    """

    path: str
    bytes: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def mapped_array(values: object) -> np.memmap | None:
    """The mapped file that an array is, or is a part of; it is remembered for ``locate_tensor``."""
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
    """The tensor, mapped from its file.

    Raises:
        DataError: This machine does not see the file, or sees another one.
    """
    try:
        there = os.stat(piece.path).st_size
        mapped_file = np.memmap(piece.path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise DataError(
            f"{os.uname().nodename} does not see {piece.path}, which the data are mapped from: {error}. Put it where all "
            "nodes see it under this path, or use ray.data=store."
        ) from error
    if there != piece.bytes:
        raise DataError(
            f"{piece.path} has {there:,} bytes at {os.uname().nodename}, but {piece.bytes:,} at the server: give all nodes "
            "the same file."
        )
    mapped_array(mapped_file)
    count = 1 + sum((n - 1) * step for n, step in zip(piece.shape, piece.strides, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may not be written to, and nobody does
        line = torch.frombuffer(mapped_file, dtype=piece.dtype, count=count, offset=piece.offset)
    return line.as_strided(piece.shape, piece.strides)
