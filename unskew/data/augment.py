"""Random crops and flips of image batches, with random numbers drawn in advance."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from unskew.seeding import fold, uniform
from unskew.tasks.base import OUTSIDE


def draw_crop_and_flip(n: int, padding: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Draw random offsets and flips for ``crop_and_flip``.

    Args:
        n: Number of images.
        padding: Maximum shift of a crop in each direction, in pixels.
        generator: Random number generator; the results are on its device.

    Returns:
        Offsets ``[n, 2]`` (rows, columns) from 0 to ``2 * padding``, and flips ``[n]``.
    """
    device = generator.device
    offsets = torch.randint(0, 2 * padding + 1, (n, 2), generator=generator, device=device)
    flips = torch.randint(0, 2, (n,), generator=generator, device=device).bool()
    return offsets, flips


def keyed_crop_and_flip(key: Tensor, n: int, padding: int) -> tuple[Tensor, Tensor]:
    """Draw offsets and flips as ``draw_crop_and_flip`` does, as a pure function of a random key.

    Args:
        key: Random key, an int64 tensor.
        n: Number of images.
        padding: Maximum shift of a crop in each direction, in pixels.
    """
    offsets = (uniform(fold(key, 1), (n, 2)) * (2 * padding + 1)).to(torch.int64)
    return offsets, uniform(fold(key, 2), (n,)) < 0.5


def crop_and_flip(x: Tensor, offsets: Tensor, flips: Tensor, padding: int = 4, fill: int = 0) -> Tensor:
    """Pad images, crop each to its original size at its own offset, and flip the selected ones horizontally.

    Apply this before normalization, while zero is black.

    Args:
        x: Images ``[B, C, H, W]`` of any dtype.
        offsets: Top-left corner of each crop in the padded image, ``[B, 2]``, from 0 to ``2 * padding``; the value
            ``padding`` does not shift the image.
        flips: Mask of the images to flip left to right, ``[B]``.
        padding: Number of pixels added on each side.
        fill: Value of these pixels.

    Returns:
        Images ``[B, C, H, W]`` in channels-last memory format.

    >>> x = torch.arange(3.0).view(1, 1, 1, 3)
    >>> crop_and_flip(x, torch.tensor([[1, 2]]), torch.tensor([False]), padding=1)
    tensor([[[[1., 2., 0.]]]])
    """
    batch, channels, height, width = x.shape
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, padding, padding, padding, padding), value=fill)
    tall, wide = height + 2 * padding, width + 2 * padding
    column = torch.arange(width, device=x.device)
    rows = offsets[:, :1] + torch.arange(height, device=x.device)
    columns = offsets[:, 1:] + torch.where(flips[:, None], width - 1 - column, column)
    # One gather of complete pixels (all channels) from the flattened batch.
    image = torch.arange(batch, device=x.device)
    pixels = ((image[:, None] * tall + rows)[:, :, None] * wide + columns[:, None, :]).reshape(-1)
    out = padded.reshape(-1, channels).index_select(0, pixels)
    return out.view(batch, height, width, channels).permute(0, 3, 1, 2)


def crop_and_flip_samples(
    x: Tensor, y: Tensor, offsets: Tensor, flips: Tensor, padding: int, pixels: bool
) -> tuple[Tensor, Tensor]:
    """Crop and flip images as ``crop_and_flip`` does, and their targets if these are masks.

    Args:
        x: Images, ``[B, C, H, W]``.
        y: Targets; masks ``[B, H, W]``, whose added pixels have no truth, if ``pixels``.
        offsets: Offsets of the crops, ``[B, 2]``.
        flips: Images to flip, ``[B]``.
        padding: Number of pixels added on each side.
        pixels: Whether targets are one class per pixel.
    """
    x = crop_and_flip(x, offsets.to(x.device), flips.to(x.device), padding)
    if pixels:
        y = crop_and_flip(y[:, None], offsets.to(y.device), flips.to(y.device), padding, OUTSIDE)[:, 0]
    return x, y
