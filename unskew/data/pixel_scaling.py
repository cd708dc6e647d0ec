"""Conversion between image intensities in [0, 1], for display, and normalized model inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unskew.data.federation import Federation
from unskew.functorch_api import constant


@dataclass(frozen=True)
class PixelScaling:
    """Scaling of intensities to model inputs: ``(intensity - mean) / std`` per channel; the default is the identity.

    Attributes:
        mean: Intensity subtracted from each channel; one number applies to all channels.
        std: Divisor of each channel; one number applies to all channels.
    """

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    @staticmethod
    def of(federation: Federation) -> PixelScaling:
        """Return the scaling of a federation's images. Float images without normalization count as intensities."""
        normalization = federation.normalization
        if normalization is not None:
            return PixelScaling(normalization.mean, normalization.std)
        return PixelScaling(std=(1 / 255,)) if federation.test[0].dtype == torch.uint8 else PixelScaling()

    def inputs(self, x: Tensor) -> Tensor:
        """Convert intensities ``[..., C, H, W]`` to model inputs."""
        return (x - _column(self.mean, x)) / _column(self.std, x)

    def intensities(self, x: Tensor) -> Tensor:
        """Convert model inputs ``[..., C, H, W]`` to intensities, without clipping to [0, 1]."""
        return x * _column(self.std, x) + _column(self.mean, x)


AS_THEY_ARE = PixelScaling()


def _column(values: tuple[float, ...], like: Tensor) -> Tensor:
    return constant(values, like)[:, None, None]
