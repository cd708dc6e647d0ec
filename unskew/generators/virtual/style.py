"""Images of an untrained style-based generator, with structure at every scale and without training data.

This is a small variant of StyleGAN2 (Karras et al., "Analyzing and Improving the Image Quality of StyleGAN", 2019,
arXiv:1912.04958) with random weights, as pure functions:

- a mapping network of two layers maps a latent ``z`` to a style ``w``;
- a constant of 4 x 4 pixels is upsampled to the size of the image. At each size, a 3 x 3 convolution with input channels
  scaled by the style and demodulated output is followed by noise and a leaky ReLU;
- a final modulated 1 x 1 convolution outputs the channels of the image.

There is one convolution per size instead of two, and no sum of the images of all sizes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.generators.virtual.gaussian import samples_around_centers, standardize
from unskew.seeding import fold, normal

LATENT = 64
WIDTH = 32
START = 4
CHUNK = 256
NOISE = 0.1
"""Strength of the noise after each convolution, relative to its output."""

SPREAD = 0.25
"""Standard deviation of the latents of a class, relative to that between classes; with twice this, classes overlap."""

Weights = dict[str, Tensor]


def style_images(key: Tensor, y: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Generate an image for each label, with one cluster of latents per class.

    Args:
        key: Random 64-bit key of weights, latents and noise.
        y: Labels, ``[n]``.
        shape: Shape of an image, ``(C, H, W)``.

    Returns:
        Images, float32 ``[n, C, H, W]``, with mean 0 and standard deviation 1 per channel.
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
    """Draw the weights of a generator, scaled so that layers preserve the standard deviation of activations.

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
    """Generate images ``[n, *shape]`` from latents ``z [n, LATENT]``.

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
    """Apply a convolution with a kernel that each sample's style scales.

    Demodulation divides each output channel by the norm of its scaled kernel. Scaling the input and dividing the output is
    equivalent to a separate kernel per sample, and much faster.

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
