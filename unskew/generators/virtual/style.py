"""Images of an untrained style-based generator: structure at every scale, and no data behind it.

A small relative of StyleGAN2 (Karras et al., "Analyzing and Improving the Image Quality of StyleGAN", 2019,
arXiv:1912.04958) with random weights, as plain functions:

- a mapping network of two layers turns a latent ``z`` into a style ``w``;
- a constant of 4 x 4 pixels is enlarged to the size of the image; at each size a 3 x 3 convolution, whose input channels the
  style scales and whose output is demodulated, is followed by noise and a leaky ReLU;
- the last convolution, 1 x 1 and modulated too, gives the channels of the image.

There is one convolution per size where the original has two, and no sum of the images of all sizes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.generators.virtual.gaussian import samples_around_centers, standardize
from unskew.seeding import fold, normal

LATENT, WIDTH, START, CHUNK = 64, 32, 4, 256
NOISE = 0.1
"""Strength of the noise after each convolution, relative to its output."""

SPREAD = 0.25
"""Deviation of the latents of a class, relative to that between classes; twice as large, classes would overlap."""

Weights = dict[str, Tensor]


def style_images(key: Tensor, y: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """An image for each label, with one cluster of latents per class.

    Args:
        key: A 64-bit key; decides weights, latents and noise.
        y: Labels, ``[n]``.
        shape: Channels, height and width.

    Returns:
        Float32 ``[n, C, H, W]`` of mean 0 and deviation 1 per channel.
    """
    sizes = 1 + max(0, math.ceil(math.log2(max(shape[1:]) / START)))
    weights = random_weights(fold(key, 1), sizes, shape[0])
    latents = samples_around_centers(fold(key, 2), y, (LATENT,), SPREAD).float()
    parts = [
        synthesize(weights, z, fold(fold(key, 3), number), shape, sizes)
        for number, z in enumerate(torch.split(latents, CHUNK))
    ]
    return standardize(torch.cat(parts))


def random_weights(key: Tensor, sizes: int, channels: int) -> Weights:
    """Weights of a generator with so many sizes of image; scaled to keep the deviation of what passes through.

    Args:
        key: Random key.
        sizes: Number of image sizes.
        channels: Number of channels of an image.
    """

    def draw(number: int, *shape: int) -> Tensor:
        return (normal(fold(key, number), shape) / math.sqrt(math.prod(shape[1:]))).float()

    weights = {"map0": draw(0, LATENT, LATENT), "map1": draw(1, LATENT, LATENT)}
    weights["start"] = normal(fold(key, 2), (WIDTH, START, START)).float()
    weights |= {f"style{i}": draw(10 + i, WIDTH, LATENT) for i in range(sizes + 1)}
    weights |= {f"kernel{i}": draw(50 + i, WIDTH, WIDTH, 3, 3) for i in range(sizes)}
    return weights | {"color": draw(3, channels, WIDTH, 1, 1)}


def synthesize(weights: Weights, z: Tensor, key: Tensor, shape: tuple[int, int, int], sizes: int) -> Tensor:
    """Images ``[n, *shape]`` for latents ``z [n, LATENT]``.

    Args:
        weights: Weights of the generator.
        z: Latents, ``[n, LATENT]``.
        key: Random key of the noise.
        shape: Shape of an image, ``(C, H, W)``.
        sizes: Number of image sizes.
    """
    w = z / z.square().mean(1, keepdim=True).sqrt()
    for name in ("map0", "map1"):
        w = F.leaky_relu(w @ weights[name].T, 0.2) * math.sqrt(2)
    x = weights["start"].expand(len(z), -1, -1, -1)
    for i in range(sizes):
        x = x if i == 0 else F.interpolate(x, scale_factor=2, mode="bilinear")
        x = modulated_conv(x, 1 + w @ weights[f"style{i}"].T, weights[f"kernel{i}"])
        noise = normal(fold(key, i), (len(z), 1, *x.shape[2:])).float()
        x = F.leaky_relu(x + NOISE * noise, 0.2) * math.sqrt(2)
    image = modulated_conv(x, 1 + w @ weights[f"style{sizes}"].T, weights["color"], demodulate=False)
    return F.interpolate(image, size=shape[1:], mode="bilinear") if image.shape[2:] != shape[1:] else image


def modulated_conv(x: Tensor, style: Tensor, kernel: Tensor, demodulate: bool = True) -> Tensor:
    """A convolution of ``x [n, in, H, W]`` whose kernel ``[out, in, k, k]`` each sample's ``style [n, in]`` scales.

    Demodulation divides each output channel by the norm of its scaled kernel. Scaling the input and dividing the output is
    the same as a kernel per sample, and much faster.

    Args:
        x: Activations, ``[n, in, H, W]``.
        style: Factor of each input channel, ``[n, in]``.
        kernel: Kernel, ``[out, in, k, k]``.
        demodulate: Whether to divide each output channel by the norm of its scaled kernel.
    """
    out = F.conv2d(x * style[:, :, None, None], kernel, padding=kernel.shape[-1] // 2)
    if not demodulate:
        return out
    norms = style.square() @ kernel.square().sum((2, 3)).T
    return out * torch.rsqrt(norms + 1e-8)[:, :, None, None]
