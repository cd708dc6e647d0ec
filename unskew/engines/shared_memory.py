"""Shared memory that passes tensors between processes without pickling: written once, read as views."""

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch import Tensor

from unskew.errors import EngineError

_ALIGN = 64  # vector instructions and BLAS give the same bits for the same alignment
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class TensorRef(tuple[int, torch.dtype, tuple[int, ...]]):
    """Location of a tensor in shared memory: offset in bytes, dtype and shape; small enough to send through a pipe."""

    __slots__ = ()


class SharedMemory:
    """Memory region that is mapped before workers are forked, so that all of them can access it.

    It reserves a large address range; only written pages use memory.
    """

    def __init__(self, capacity: int = 1 << 36):
        for size in (capacity, capacity >> 3, capacity >> 6):
            try:
                self.memory = mmap.mmap(-1, size, flags=mmap.MAP_SHARED | _NORESERVE)
                break
            except OSError:
                continue
        else:
            raise EngineError("The system provides no shared memory for worker processes. Use engine='inline'.")
        self.capacity = size
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.used = 0
        self._known: dict[int, tuple[Tensor, TensorRef]] = {}

    def clear(self) -> None:
        """Release all tensors; their memory is reused."""
        self.used = 0
        self._known.clear()

    def forget(self) -> None:
        """Keep the written tensors, but no longer recognize them if they are written again."""
        self._known.clear()

    def view(self, ref: TensorRef) -> Tensor:
        """Return the tensor at ``ref`` as a view of the region."""
        offset, dtype, shape = ref
        count = int(torch.Size(shape).numel())
        return self.bytes[offset : offset + count * dtype.itemsize].view(dtype).view(shape)

    def write(self, tensor: Tensor) -> TensorRef:
        """Copy a tensor into the region, unless the same tensor is already there."""
        known = self._known.get(id(tensor))
        if known is not None:
            return known[1]
        size = tensor.numel() * tensor.element_size()
        if self.used + size > self.capacity:
            raise EngineError(
                f"A round needs more than {self.capacity >> 30} GiB of shared memory. "
                "Use engine='inline' or a smaller cohort."
            )
        ref = TensorRef((self.used, tensor.dtype, tuple(tensor.shape)))
        self.view(ref).copy_(tensor)
        self.used += (size + _ALIGN - 1) // _ALIGN * _ALIGN
        # Keep the tensor alive, because the id of a freed tensor may be reused for another one.
        self._known[id(tensor)] = (tensor, ref)
        return ref

    def pack(self, value: Any) -> Any:
        """Replace all tensors in the value, also in dictionaries and lists, by their location in the region."""
        if isinstance(value, Tensor):
            return self.write(value)
        if isinstance(value, dict):
            return {key: self.pack(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.pack(item) for item in value]
        return value

    def unpack(self, value: Any, copy: bool = False) -> Any:
        """Invert ``pack``: views, or copies that outlive the next ``clear``; shared tensors remain shared.

        Args:
            value: Output of ``pack``.
            copy: Whether to copy the tensors.
        """
        return self._unpack(value, copy, {})

    def _unpack(self, value: Any, copy: bool, known: dict[TensorRef, Tensor]) -> Any:
        if isinstance(value, TensorRef):
            if value not in known:
                known[value] = self.view(value).clone() if copy else self.view(value)
            return known[value]
        if isinstance(value, dict):
            return {key: self._unpack(item, copy, known) for key, item in value.items()}
        if isinstance(value, list):
            return [self._unpack(item, copy, known) for item in value]
        return value
