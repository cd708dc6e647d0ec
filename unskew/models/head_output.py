"""Comparison of what the head returns with the logits of the model."""

from __future__ import annotations

import torch
from torch import Tensor

from unskew.models.spec import ModelSpec

SHIFT = 0.1
"""Size of the change of the parameters, without which trained factors that are 1 at first would not be seen."""

LARGEST = 100.0
"""Largest number that replaces an output of the head."""


def head_returns_logits(spec: ModelSpec, x: Tensor, up_to_constant: bool) -> bool:
    """Return whether the logits of the model are what its head returns.

    Other numbers replace the output of the head in a forward pass, in which no parameter has its initial value.

    Args:
        spec: Layout of the model.
        x: Model inputs of at least two samples.
        up_to_constant: Whether a constant may be subtracted from all logits of a sample, as log-softmax does.
    """
    returned: list[Tensor] = []

    def replace(_module: object, _args: object, output: object) -> object:
        if not isinstance(output, Tensor):
            return output
        # Large numbers, of which a cap changes some; in full precision, because autocast may have rounded the output.
        numbers = LARGEST * torch.arange(output.numel(), device=output.device).sin()
        returned.append(numbers.view(output.shape).to(spec.dtype))
        return returned[-1]

    v = spec.flatten()
    moved = v + SHIFT * (v + torch.copysign(torch.ones_like(v), v))
    hook = spec.module.get_submodule(spec.head_name).register_forward_hook(replace)
    try:
        with torch.no_grad():
            logits = spec.forward(moved, spec.flatten_buffers(), x.to(v.device)).logits
    finally:
        hook.remove()
    if not returned or returned[-1].shape != logits.shape:
        return False
    gap = logits.double() - returned[-1].double()
    if up_to_constant:
        gap -= gap.mean(-1, keepdim=True)
    return float(gap.abs().max()) <= 10 * LARGEST * torch.finfo(spec.dtype).eps


def parameter_outside_head(spec: ModelSpec) -> str | None:
    """Return the name of a trained parameter of the head that another part of the model has, too; None without one.

    Args:
        spec: Layout of the model.
    """
    prefix = f"{spec.head_name}." if spec.head_name else ""
    for name, first in spec.tied.items():
        if first in spec.names and name.startswith(prefix) != first.startswith(prefix):
            return name if name.startswith(prefix) else first
    return None
