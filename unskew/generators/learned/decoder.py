"""Network that generates images, trained together with its input: the learnable generator of FedCOG.

Its parameters and its input are one flat vector, so the code that learns pixels can also train it. Everything is a pure
function of tensors that ``torch.func.vmap`` can map over clients.

The network, for images ``C x H x W``, with ``h = H / 4`` and ``w = W / 4`` rounded up::

    z [n, 256] -> linear to 128 x h x w -> norm -> upsample 2 -> conv 3x3 128 -> norm -> leaky 0.2
               -> upsample 2 -> conv 3x3 64 -> norm -> leaky 0.2 -> conv 3x3 C -> sigmoid

If a side is not a multiple of 4, the excess is removed at the bottom and on the right. ``norm`` is batch normalization by the
batch's own mean and biased variance, with a learned scale and offset; convolutions before it have no bias.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.data.pixel_scaling import PixelScaling
from unskew.generators.learned.inversion import Maker, channels_last
from unskew.seeding import normal

LATENT = 256
WIDE = 128
NARROW = 64
BETAS = (0.5, 0.999)
"""Adam's decay rates for this network."""

Shape = tuple[int, int, int]


def decoder_layout(n: int, shape: Shape) -> dict[str, tuple[tuple[int, ...], float, float]]:
    """Return shape, initial mean and initial standard deviation of each tensor in the flat vector, in order.

    Args:
        n: Number of images.
        shape: Shape of an image, ``(C, H, W)``.
    """
    channels, height, width = shape
    pixels = WIDE * math.ceil(height / 4) * math.ceil(width / 4)
    return {
        "z": ((n, LATENT), 0, 1),
        "linear.weight": ((pixels, LATENT), 0, 0.02),
        "linear.bias": ((pixels,), 0, 0),
        "norm0.scale": ((WIDE,), 1, 0.02),
        "norm0.offset": ((WIDE,), 0, 0),
        "conv1.weight": ((WIDE, WIDE, 3, 3), 0, 0.02),
        "norm1.scale": ((WIDE,), 1, 0.02),
        "norm1.offset": ((WIDE,), 0, 0),
        "conv2.weight": ((NARROW, WIDE, 3, 3), 0, 0.02),
        "norm2.scale": ((NARROW,), 1, 0.02),
        "norm2.offset": ((NARROW,), 0, 0),
        "conv3.weight": ((channels, NARROW, 3, 3), 0, 0.02),
        "conv3.bias": ((channels,), 0, 0),
    }


def initial_decoder(key: Tensor, n: int, shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
    """Initialize network and input as one flat vector, a pure function of ``key``.

    Args:
        key: Random 64-bit key.
        n: Number of images.
        shape: Shape of an image, ``(C, H, W)``.
        dtype: Data type of the vector.
    """
    tensors = decoder_layout(n, shape).values()
    sizes = torch.tensor([math.prod(dims) for dims, _, _ in tensors], device=key.device)
    total = sum(math.prod(dims) for dims, _, _ in tensors)

    def spread(values: list[float]) -> Tensor:
        each = torch.tensor(values, dtype=torch.float64, device=key.device)
        return torch.repeat_interleave(each, sizes, output_size=total)

    draws = normal(key, (total,)) * spread([std for _, _, std in tensors]) + spread([mean for _, mean, _ in tensors])
    return draws.to(dtype)


def make_decoder(key: Tensor, n: int, shape: tuple[int, ...], dtype: torch.dtype, pixels: PixelScaling) -> Maker:
    """Return an initial network (see ``initial_decoder``), its mapping to inputs ``[n, C, H, W]``, and Adam's decay rates.

    Args:
        key: Random key.
        n: Number of images.
        shape: Shape of an image, ``(C, H, W)``.
        dtype: Data type of the images.
        pixels: Range and normalization of the model's inputs.
    """
    image = (shape[0], shape[1], shape[2])
    return initial_decoder(key, n, image, dtype), lambda vector: pixels.inputs(decode(vector, n, image)), BETAS


def unflatten(vector: Tensor, n: int, shape: Shape) -> dict[str, Tensor]:
    """Return the tensors by name, as differentiable views of the flat vector.

    Args:
        vector: Network and input, as returned by ``initial_decoder``.
        n: Number of images.
        shape: Shape of an image, ``(C, H, W)``.
    """
    tensors = decoder_layout(n, shape)
    cuts = torch.split(vector, [math.prod(dims) for dims, _, _ in tensors.values()])
    return {name: cut.view(dims) for (name, (dims, _, _)), cut in zip(tensors.items(), cuts, strict=True)}


def decode(vector: Tensor, n: int, shape: Shape) -> Tensor:
    """Generate images ``[n, C, H, W]`` with values from 0 to 1.

    Args:
        vector: Network and input, as returned by ``initial_decoder``.
        n: Number of images.
        shape: Shape of an image, ``(C, H, W)``.
    """
    _, height, width = shape
    p = unflatten(vector, n, shape)
    x = F.linear(p["z"], p["linear.weight"], p["linear.bias"])
    x = channels_last(x.view(n, WIDE, math.ceil(height / 4), math.ceil(width / 4)))
    x = upsample(batch_norm(x, p["norm0.scale"], p["norm0.offset"]))
    x = F.conv2d(x, p["conv1.weight"], padding=1)
    x = upsample(F.leaky_relu(batch_norm(x, p["norm1.scale"], p["norm1.offset"]), 0.2))
    x = F.conv2d(x, p["conv2.weight"], padding=1)
    x = F.leaky_relu(batch_norm(x, p["norm2.scale"], p["norm2.offset"]), 0.2)
    x = F.conv2d(x, p["conv3.weight"], p["conv3.bias"], padding=1)
    return torch.sigmoid(x[:, :, :height, :width])


def batch_norm(x: Tensor, scale: Tensor, offset: Tensor, eps: float = 1e-5) -> Tensor:
    """Normalize activations by the mean and variance of their batch.

    Args:
        x: Activations, ``[n, c, h, w]``.
        scale: Factor per channel, ``[c]``.
        offset: Offset per channel, ``[c]``.
        eps: Constant added to the variance.
    """
    # F.batch_norm does not support a single value per channel, such as one image of at most 4 x 4 pixels.
    return torch.batch_norm(x, scale, offset, None, None, True, 0.0, eps, torch.backends.cudnn.enabled)


def upsample(x: Tensor) -> Tensor:
    """Double height and width by repeating each pixel."""
    return F.interpolate(x, scale_factor=2, mode="nearest")
