"""Models whose BatchNorm cannot normalize a batch of one sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from unskew.models.spec import ModelSpec
from unskew.seeding import seeded_globals


def rejects_single_samples(spec: ModelSpec, device: torch.device) -> bool:
    """Return whether training on a batch of one sample fails, because a BatchNorm has one value per channel.

    Convolutional layers usually have several values per channel and sample, linear layers have one.

    Args:
        spec: Layout of the model.
        device: Device of the model.
    """
    single: list[bool] = []

    def inspect(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        single.append(layer.training and inputs[0].numel() == 2 * inputs[0].shape[1])

    layers = [m for m in spec.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not layers:
        return False
    hooks = [layer.register_forward_pre_hook(inspect) for layer in layers]
    try:
        x = torch.zeros(2, *spec.shape, dtype=spec.input_dtype, device=device)
        with torch.no_grad(), seeded_globals(spec.draws_globally, 0, device):
            spec.forward(spec.flatten(), spec.flatten_buffers(), x, train=True)
    finally:
        for hook in hooks:
            hook.remove()
    return any(single)
