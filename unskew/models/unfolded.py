"""Convolutions as matrix products, which ``torch.func.vmap`` maps to one batched product.

``vmap`` maps a convolution over clients' weights to a grouped convolution, which cuDNN runs slowly for many groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn


def can_unfold(layer: nn.Module) -> bool:
    """Return whether a layer can be computed by ``unfolded_convolution``."""
    return type(layer) is nn.Conv2d and layer.groups == 1 and layer.padding_mode == "zeros" and layer.padding != "same"


def unfolded_convolution(layer: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a convolution as one matrix product with the unfolded inputs.

    Args:
        layer: Layer with the options of the convolution.
        x: Images, ``[B, C, H, W]``.
        weight: Filters, ``[O, C, h, w]``.
        bias: Bias, ``[O]``, or None.

    Returns:
        Images, ``[B, O, H', W']``.
    """
    padding = (0, 0) if isinstance(layer.padding, str) else layer.padding
    sizes = [
        (x.shape[2 + i] + 2 * padding[i] - layer.dilation[i] * (layer.kernel_size[i] - 1) - 1) // layer.stride[i] + 1
        for i in range(2)
    ]
    patches = F.unfold(x, layer.kernel_size, layer.dilation, padding, layer.stride)
    # All samples in one product: a product per sample would be too small to fill a device.
    out = weight.flatten(1) @ patches.transpose(0, 1).flatten(1)
    out = out.view(len(weight), len(x), *sizes).transpose(0, 1)
    return out if bias is None else out + bias.view(-1, 1, 1)


@contextmanager
def unfolded_convolutions(module: nn.Module, active: bool) -> Iterator[None]:
    """Context manager in which the convolutions of a module are computed as matrix products.

    Args:
        module: Module with the layers; layers with groups or unusual padding are unchanged.
        active: Whether to change anything.

    Yields:
        Nothing.
    """
    layers = [layer for layer in module.modules() if active and can_unfold(layer)]
    for layer in layers:
        # An attribute of the object hides the method of its class that ``nn.Conv2d.forward`` calls.
        layer.__dict__["_conv_forward"] = partial(unfolded_convolution, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["_conv_forward"]
