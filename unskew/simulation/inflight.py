"""Updates on their way, as tensors and plain values, so that a checkpoint can hold them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load

from unskew.methods.rules import Tensors, Update
from unskew.simulation.store import flat, nested

PLAIN = ("client", "born", "examples", "weight", "metrics", "arrived")
"""What an update has beside tensors."""


def packed(pending: Sequence[Update]) -> Tensors:
    """The tensors of updates on their way, by number."""
    packed: Tensors = {}
    for number, update in enumerate(pending):
        packed |= {f"{number}/delta": update.delta, f"{number}/buffers": update.buffers}
        for part, nested_ in (("upload", update.upload), ("state", update.state)):
            packed |= {f"{number}/{part}/{key}": tensor for key, tensor in flat(nested_).items()}
    return packed


def unpacked(path: Path, plain: list[dict[str, Any]], device: torch.device) -> list[Update]:
    """Inverse of ``packed``, with what the manifest says of each update."""
    if not plain:
        return []
    tensors = {n: t.to(device) for n, t in load((path / "in-flight.safetensors").read_bytes()).items()}
    found = []
    for number, fields in enumerate(plain):
        mine = {n.removeprefix(f"{number}/"): t for n, t in tensors.items() if n.startswith(f"{number}/")}
        upload, state = (
            nested({n.removeprefix(f"{part}/"): t for n, t in mine.items() if n.startswith(f"{part}/")})
            for part in ("upload", "state")
        )
        found.append(Update(delta=mine["delta"], buffers=mine["buffers"], upload=upload, state=state, **fields))
    return found
