"""Messages to and from a Ray cluster: tensors as NumPy arrays; tensors shared by clients are sent once."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SHARED = 1024
"""Minimum number of elements for which a tensor shared by several clients of a round is sent only once."""


@dataclass(frozen=True)
class SharedTensorRef:
    """Index of a tensor in the list of shared tensors."""

    number: int


def extract_shared(broadcasts: list[dict[str, Any]]) -> tuple[list[Tensor], list[Any]]:
    """Move large tensors that several records share to a list, and replace them in the records by references.

    >>> v = torch.zeros(2000)
    >>> shared, records = extract_shared([{"v": v, "client": 0}, {"v": v, "client": 1}])
    >>> len(shared), records[1]
    (1, {'v': SharedTensorRef(number=0), 'client': 1})
    """
    message: Counter[int] = Counter()
    tensors: dict[int, Tensor] = {}

    def look(value: Any) -> None:
        if isinstance(value, Tensor):
            message[id(value)] += 1
            tensors[id(value)] = value
        for inner in value.values() if isinstance(value, dict) else ():
            look(inner)

    for broadcast in broadcasts:
        look(broadcast)
    keys = [key for key, count in message.items() if count > 1 and tensors[key].numel() >= SHARED]
    references = {key: SharedTensorRef(number) for number, key in enumerate(keys)}

    def placed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: placed(inner) for key, inner in value.items()}
        return references.get(id(value), value) if isinstance(value, Tensor) else value

    return [tensors[key] for key in keys], [placed(broadcast) for broadcast in broadcasts]


def restore_shared(record: Any, shared: list[Tensor]) -> Any:
    """Invert ``extract_shared`` for one record.

    Args:
        record: Record with references instead of shared tensors.
        shared: Shared tensors.
    """
    if isinstance(record, dict):
        return {key: restore_shared(inner, shared) for key, inner in record.items()}
    return shared[record.number] if isinstance(record, SharedTensorRef) else record


def copy_record(value: Any, device: torch.device) -> Any:
    """Return a record with copies of its tensors on a device.

    Args:
        value: Nested containers of tensors.
        device: Device to copy to.
    """
    if isinstance(value, dict):
        return {key: copy_record(inner, device) for key, inner in value.items()}
    return value.to(device, copy=True) if isinstance(value, Tensor) else value


def as_array(tensor: Tensor) -> tuple[Any, torch.dtype, bool]:
    """Return the values as a NumPy array in memory order, so that channels-last tensors remain channels-last."""
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
    plain = (tensor.detach().permute(0, 2, 3, 1) if last else tensor.detach()).contiguous().cpu()
    if plain.dtype == torch.bfloat16:
        plain = plain.view(torch.int16)
    return plain.numpy(), tensor.dtype, last


def as_tensor(value: tuple[Any, torch.dtype, bool]) -> Tensor:
    """Invert ``as_array``, on the same memory."""
    array, dtype, last = value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the array is read-only, and sent tensors are never written to
        tensor = torch.from_numpy(array)
    if tensor.dtype != dtype:
        tensor = tensor.view(dtype)
    return tensor.permute(0, 3, 1, 2) if last else tensor
