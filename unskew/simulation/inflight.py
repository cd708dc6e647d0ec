"""An update on its way: plain values in memory, and tensors that a store can put away."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from unskew.protocol.rules import Update
from unskew.simulation.store import State, flat, nested

PLAIN = ("client", "born", "examples", "weight", "metrics", "arrived")
"""What an update has beside tensors."""


def plain(update: Update) -> dict[str, Any]:
    """What a manifest says of it."""
    return {name: getattr(update, name) for name in PLAIN}


def light(values: dict[str, Any]) -> Update:
    """An update without its tensors, from its plain values."""
    return Update(delta=torch.empty(0), buffers=torch.empty(0), upload={}, state={}, **values)


def packed(update: Update) -> State:
    """Its tensors, in the memory of the CPU."""
    state = {
        "update": {"delta": update.delta, "buffers": update.buffers},
        "upload": flat(update.upload),
        "state": flat(update.state),
    }
    return {part: {name: t.cpu() for name, t in tensors.items()} for part, tensors in state.items()}


def whole(update: Update, tensors: State, device: torch.device) -> Update:
    """A light update with its tensors again, on ``device``."""
    parts = {part: {name: t.to(device) for name, t in held.items()} for part, held in tensors.items()}
    upload, state = (nested(parts.get(part, {})) for part in ("upload", "state"))
    return replace(
        update, delta=parts["update"]["delta"], buffers=parts["update"]["buffers"], upload=upload, state=state
    )
