"""Convolutions as matrix products, which ``torch.func.vmap`` maps to one batched product instead of a grouped convolution."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn


def unfolded_convolution(layer: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the convolution of images ``[B, C, H, W]`` as one matrix product with the unfolded images.

    Args:
        layer: Layer with the options of the convolution.
        x: Images.
        weight: Filters, ``[O, C, h, w]``.
        bias: Bias, ``[O]``, or None.
    """
    padding = (0, 0) if isinstance(layer.padding, str) else layer.padding
    span = layer.dilation[0] * (layer.kernel_size[0] - 1) + 1
    height = (x.shape[2] + 2 * padding[0] - span) // layer.stride[0] + 1
    patches = F.unfold(x, layer.kernel_size, layer.dilation, padding, layer.stride)
    # All samples in one product: a product per sample would be too small to fill a device.
    out = weight.flatten(1) @ patches.transpose(0, 1).flatten(1)
    out = out.view(len(weight), len(x), height, -1).transpose(0, 1)
    return out if bias is None else out + bias.view(-1, 1, 1)


@contextmanager
def unfolded_convolutions(module: nn.Module, active: bool) -> Iterator[None]:
    """Context manager in which the convolutions of a module are computed as matrix products.

    Args:
        module: Module with the layers; layers with groups or unusual padding are unchanged.
        active: Whether to change anything.
    """
    layers = [layer for layer in module.modules() if active and type(layer) is nn.Conv2d and layer.groups == 1]
    layers = [layer for layer in layers if layer.padding_mode == "zeros" and layer.padding != "same"]
    for layer in layers:
        # An attribute of the object hides the method of its class that ``nn.Conv2d.forward`` calls.
        layer.__dict__["_conv_forward"] = partial(unfolded_convolution, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["_conv_forward"]
