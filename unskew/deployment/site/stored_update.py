"""Update of a round with private noise as tensors for a file, so that every masked sum of the round contains the same one."""

from __future__ import annotations

import torch
from torch import Tensor

from unskew.protocol.messages import ClientState, Tensors, Update, flatten_records, unflatten_records

OWN = "own"
"""Kind of the records that are not uploads of rules."""


def update_to_tensors(update: Update, delta: Tensor | None) -> Tensors:
    """Return what a site sends of an update, as tensors by name.

    Args:
        update: Update of the site.
        delta: Slices of the model update that are sent, or None.
    """
    numbers = {"num_samples": update.num_samples, "weight": update.weight, "usable": update.is_finite()}
    records = {
        "numbers": {name: torch.tensor(float(value)).double() for name, value in numbers.items()},
        "metrics": {name: torch.tensor(value).double() for name, value in update.metrics.items()},
        "buffers": {"b": update.buffers},
        "report": update.report,
        "model": {} if delta is None else {"delta": delta},
    }
    return flatten_records("upload", update.upload) | flatten_records(OWN, records)


def update_from_tensors(tensors: Tensors, client: int, round: int) -> tuple[Update, Tensor | None]:
    """Return the arguments of ``update_to_tensors``; of the model update, the update only contains whether it is finite.

    Args:
        tensors: Tensors by name.
        client: Client number of the site.
        round: Number of the round, from 0.
    """
    records = unflatten_records(OWN, tensors)
    numbers = {name: float(value) for name, value in records["numbers"].items()}
    update = Update(
        client,
        round,
        int(numbers["num_samples"]),
        numbers["weight"],
        torch.zeros(1) if numbers["usable"] else torch.full((1,), torch.nan),
        records["buffers"]["b"],
        unflatten_records("upload", tensors),
        ClientState(),
        {name: float(value) for name, value in records.get("metrics", {}).items()},
        report=records.get("report", {}),
    )
    return update, records.get("model", {}).get("delta")
