"""An object in a file, its arrays as they lie in memory: processes of one machine that map it share one copy of them.

Arrays that are mapped from a file already are not copied: they are opened there.

Only for files of this program's own that no other user can write, as everything that is pickled.
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
    """Pickles tensors as arrays, which are then written apart."""

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
    """Write an object into a new file.

    Args:
        value: Object to write.
        path: File to create.

    Raises:
        pickle.PicklingError: The object, or a part of it, cannot be found by its name in another process.
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
    """An object as bytes, but for arrays that are mapped from files: these are named by their files."""
    body = io.BytesIO()
    _Pickler(body, protocol=5).dump(value)
    return body.getvalue()


def load_mmap(path: Path) -> Any:
    """The object in a file; its arrays are the file's pages. Whoever writes to one gets a copy of that page."""
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    start = int.from_bytes(memory[-8:], "little")
    body, locations = pickle.loads(memory[start:-8])  # nosec B301
    buffer = memoryview(memory)
    buffers = [buffer[at : at + size] for at, size in locations]
    return pickle.loads(body, buffers=buffers)  # nosec B301
