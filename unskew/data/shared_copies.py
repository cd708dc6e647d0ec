"""Copies of data on a device, which runs at the same time share."""

from __future__ import annotations

from typing import Any, TypeVar
from weakref import WeakValueDictionary

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
            copy.__dict__["original"] = data  # keeps the id of the data from being reused
            _copies[id(data), device] = copy
    return copy
