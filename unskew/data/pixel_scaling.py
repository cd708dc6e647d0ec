"""Between intensities from 0 to 1, which can be looked at, and the inputs that a model is given."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unskew.data.federation import Federation


@dataclass(frozen=True)
class PixelScaling:
    """Scaling of intensities to model inputs: ``(intensity - mean) / std`` per channel; by default the identity.

    Attributes:
        mean, std: One number per channel, or one for all.
    """

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    @staticmethod
    def of(federation: Federation) -> PixelScaling:
        """Return the scaling of a federation's images. Floats without normalization are taken as intensities."""
        normalization = federation.normalization
        if normalization is not None:
            return PixelScaling(normalization.mean, normalization.std)
        return PixelScaling(std=(1 / 255,)) if federation.test[0].dtype == torch.uint8 else PixelScaling()

    def inputs(self, x: Tensor) -> Tensor:
        """Inputs from intensities, ``[..., C, H, W]``."""
        return (x - _column(self.mean, x)) / _column(self.std, x)

    def intensities(self, x: Tensor) -> Tensor:
        """Intensities from inputs, ``[..., C, H, W]``; inputs outside the range of images stay outside."""
        return x * _column(self.std, x) + _column(self.mean, x)


AS_THEY_ARE = PixelScaling()


def _column(values: tuple[float, ...], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None, None]
