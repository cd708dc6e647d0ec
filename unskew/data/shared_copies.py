"""Copies of data on a device, which runs at the same time share."""

from __future__ import annotations

from typing import Any, TypeVar
from weakref import WeakValueDictionary, finalize

import torch

Data = TypeVar("Data")
_copies: WeakValueDictionary[tuple[int, torch.device], Any] = WeakValueDictionary()


def shared_copy(data: Data, device: torch.device) -> Data:
    """Return data on a device; runs at the same time share the copy, which exists as long as one of them uses it.

    Args:
        data: Tensor or clients, which are not changed in place.
        device: Device of the result.
    """
    copy: Data | None = _copies.get((id(data), device))
    if copy is None:
        copy = data.to(device)  # type: ignore[attr-defined]
        if copy is not data:
            finalize(copy, _release, data).atexit = False  # keeps the id of the data from being reused
            _copies[id(data), device] = copy
    return copy


def _release(data: object) -> None:
    """Called at the end of a copy: until then, the call has kept the data. A pickled copy does not contain them."""
