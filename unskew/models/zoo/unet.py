"""U-Net for segmentation of images and volumes.

References:
    Ronneberger, Fischer, Brox 2015, arXiv:1505.04597; in three dimensions Cicek et al. 2016, arXiv:1606.06650.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unskew.errors import ConfigError
from unskew.models.zoo.basic import NORMS, check_choice, norm_layers, positive_widths

LAYERS: dict[int, tuple[Any, Any, Any]] = {
    2: (nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d),
    3: (nn.Conv3d, nn.BatchNorm3d, nn.MaxPool3d),
}
"""Convolution, batch norm and pooling by the number of spatial dimensions."""


class Decoder(nn.Module):
    """Expanding path of a U-Net: at each level upsampling, concatenation with the skip, and two convolutions; then logits.

    Args:
        widths: Channels of each level, from fine to coarse.
        classes: Number of classes.
        dims: Number of spatial dimensions, 2 or 3.
        norm: Normalization, as in `norm_layers`.
    """

    def __init__(self, widths: Sequence[int], classes: int, dims: int, norm: str) -> None:
        super().__init__()
        pairs = [*pairwise(widths)][::-1]
        self.levels = nn.ModuleList(_two_convolutions(fine + coarse, fine, dims, norm) for fine, coarse in pairs)
        self.head = LAYERS[dims][0](widths[0], classes, 1)

    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        """Return the logits of each pixel.

        Args:
            x: Output of the coarsest level, `[batch, channels, *sides]`.
            skips: Outputs of the other levels, from fine to coarse.
        """
        for level, skip in zip(self.levels, reversed(skips), strict=True):
            # Pooling rounds odd sides down, so that doubling them would not give the sides of the skip.
            x = level(torch.cat([skip, F.interpolate(x, size=skip.shape[2:], mode="nearest")], 1))
        logits: Tensor = self.head(x)
        return logits


class UNet(nn.Module):
    """U-Net: two 3x3 convolutions per level, max pooling, nearest upsampling, concatenation, and a 1x1 convolution.

    Convolutions are padded, so that the logits have the sides of the image. `down` is the encoder and `up` the decoder with
    the last convolution.

    Args:
        shape: Channels, height and width of an image, or channels, depth, height and width of a volume.
        classes: Number of classes of a pixel.
        widths: Channels of each level, from fine to coarse.
        norm: Normalization after each 3x3 convolution: `"group"`, `"batch"` or `"none"`.

    >>> sum(p.numel() for p in UNet((3, 64, 64), 4).parameters())
    118964
    """

    def __init__(
        self, shape: Sequence[int], classes: int, widths: Sequence[int] = (16, 32, 64), norm: str = "group"
    ) -> None:
        super().__init__()
        check_choice("The U-Net", "norm", norm, NORMS)
        widths, dims = positive_widths("The U-Net", "widths", widths), len(shape) - 1
        if dims not in LAYERS:
            raise ConfigError(
                "The U-Net needs images (channels, height, width) or volumes (channels, depth, height, width), but the shape "
                f"of a sample is {tuple(shape)}."
            )
        if not widths or min(shape[1:]) < (least := 2 ** (len(widths) - 1)):
            raise ConfigError(
                "The U-Net: 'widths' must not be empty."
                if not widths
                else f"A U-Net of {len(widths)} levels needs at least {least} pixels per side, but the shape of a sample is "
                f"{tuple(shape)}. Use fewer widths or larger images."
            )
        ends = [*pairwise((shape[0], *widths))]
        self.down = nn.ModuleList(_two_convolutions(before, after, dims, norm) for before, after in ends)
        self.pool = LAYERS[dims][2](2)
        self.up = Decoder(widths, classes, dims, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, `[batch, classes, *sides]`."""
        skips: list[Tensor] = []
        for level in self.down:
            x = level(self.pool(skips[-1]) if skips else x)
            skips.append(x)
        logits: Tensor = self.up(x, skips[:-1])
        return logits


def _two_convolutions(inputs: int, outputs: int, dims: int, norm: str) -> nn.Sequential:
    convolution, batch_norm, _ = LAYERS[dims]
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [convolution(channels, outputs, 3, padding=1), *norm_layers(norm, outputs, batch_norm)]
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)
