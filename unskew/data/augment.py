"""Random crops and flips of a whole batch at once, from draws made beforehand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from unskew.seeding import fold, uniform


def draw_crop_and_flip(n: int, padding: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Draw what ``crop_and_flip`` needs for ``n`` images.

    Args:
        n: Number of images.
        padding: Pixels by which a crop may move in each direction.
        generator: Source of the draws; they are made on its device.

    Returns:
        Offsets ``[n, 2]`` (rows, columns) from 0 to ``2 * padding``, and flips ``[n]``.
    """
    device = generator.device
    offsets = torch.randint(0, 2 * padding + 1, (n, 2), generator=generator, device=device)
    flips = torch.randint(0, 2, (n,), generator=generator, device=device).bool()
    return offsets, flips


def keyed_crop_and_flip(key: Tensor, n: int, padding: int) -> tuple[Tensor, Tensor]:
    """Draws like those of ``draw_crop_and_flip`` as a pure function of the 64-bit integer tensor ``key``.

    Args:
        key: Random key, int64.
        n: Number of images.
        padding: Pixels by which a crop may be moved.
    """
    offsets = (uniform(fold(key, 1), (n, 2)) * (2 * padding + 1)).to(torch.int64)
    return offsets, uniform(fold(key, 2), (n,)) < 0.5


def crop_and_flip(x: Tensor, offsets: Tensor, flips: Tensor, padding: int = 4) -> Tensor:
    """Pad with zeros, crop back to the size at each image's own offset, then mirror where asked.

    Apply it before normalization, where zero is black.

    Args:
        x: Images ``[B, C, H, W]`` of any type.
        offsets: Top-left corner of each crop in the padded image, ``[B, 2]`` from 0 to ``2 * padding``; ``padding``
            leaves the image where it is.
        flips: Which images to mirror left to right, ``[B]``.
        padding: Zero pixels added on each side.

    Returns:
        Images ``[B, C, H, W]`` over channels-last memory.

    >>> x = torch.arange(3.0).view(1, 1, 1, 3)
    >>> crop_and_flip(x, torch.tensor([[1, 2]]), torch.tensor([False]), padding=1)
    tensor([[[[1., 2., 0.]]]])
    """
    batch, channels, height, width = x.shape
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, padding, padding, padding, padding))
    tall, wide = height + 2 * padding, width + 2 * padding
    column = torch.arange(width, device=x.device)
    rows = offsets[:, :1] + torch.arange(height, device=x.device)
    columns = offsets[:, 1:] + torch.where(flips[:, None], width - 1 - column, column)
    # One gather of whole pixels from the flattened batch.
    image = torch.arange(batch, device=x.device)
    pixels = ((image[:, None] * tall + rows)[:, :, None] * wide + columns[:, None, :]).reshape(-1)
    out = padded.reshape(-1, channels).index_select(0, pixels)
    return out.view(batch, height, width, channels).permute(0, 3, 1, 2)
