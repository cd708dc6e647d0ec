"""Whether numbers are finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unskew.protocol.rules import Update


def finite(tensor: Tensor) -> bool:
    """Whether every element is finite. A sum shows any NaN or infinity, many times faster than a look at each."""
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


def usable(update: Update) -> bool:
    """Whether every number is finite, of what is sent and of what would stay at the client."""
    kept = [t for rules in (update.upload, update.state) for tensors in rules.values() for t in tensors.values()]
    return all(map(finite, [update.delta, update.buffers, *kept]))
