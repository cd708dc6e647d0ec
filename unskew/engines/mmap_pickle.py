"""Pickle files with memory-mapped arrays: processes of one machine that map such a file share one copy of the arrays.

Arrays that are already mapped from a file are not copied, but mapped again from that file.

As with every pickle, load only files that this program wrote and that no other user can write.
"""

from __future__ import annotations

import io
import mmap
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unskew.data.memory_map import locate_tensor, open_tensor
from unskew.engines.ray.messages import as_array, as_tensor
from unskew.filesystem import create_file

_ALIGN = 64  # vector instructions and BLAS give the same bits for the same alignment


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays, which are stored out of band."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and (location := locate_tensor(value)) is not None:
            return open_tensor, (location,)
        if (
            type(value) is Tensor
            and value.device.type == "cpu"
            and value.layout == torch.strided
            and not value.requires_grad
        ):
            return as_tensor, (as_array(value),)
        return NotImplemented


def dump_mmap(value: Any, path: Path) -> None:
    """Write an object to a new file.

    Args:
        value: Object to write.
        path: File to create.

    Raises:
        pickle.PicklingError: If the object, or a part of it, cannot be found by its name in another process.
    """
    locations: list[tuple[int, int]] = []
    with create_file(path) as file:

        def apart(buffer: pickle.PickleBuffer) -> None:
            file.seek(-(-file.tell() // _ALIGN) * _ALIGN)
            raw = buffer.raw()
            locations.append((file.tell(), raw.nbytes))
            file.write(raw)

        body = io.BytesIO()
        _Pickler(body, protocol=5, buffer_callback=apart).dump(value)
        start = file.tell()
        pickle.dump((body.getvalue(), locations), file)
        file.write(start.to_bytes(8, "little"))


def dumps_mmap(value: Any) -> bytes:
    """Pickle an object to bytes; arrays that are mapped from files are replaced by references to their files."""
    body = io.BytesIO()
    _Pickler(body, protocol=5).dump(value)
    return body.getvalue()


def load_mmap(path: Path) -> Any:
    """Load an object whose arrays are pages of the file; writing to an array copies the page."""
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    start = int.from_bytes(memory[-8:], "little")
    body, locations = pickle.loads(memory[start:-8])  # nosec B301
    buffer = memoryview(memory)
    buffers = [buffer[at : at + size] for at, size in locations]
    return pickle.loads(body, buffers=buffers)  # nosec B301
