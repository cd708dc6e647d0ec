"""How inputs are standardised, batch by batch, on the device that trains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Normalisation:
    """``(x * scale - mean) / std``, per channel (images) or per feature (tables); ``None`` leaves inputs alone."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 1.0

    @staticmethod
    def fit(x: Tensor) -> Normalisation:
        """Per-channel statistics of ``x``: uint8 images ``[n, C, H, W]`` (scaled to [0, 1]) or floats ``[n, f]``."""
        scale = 1 / 255 if x.dtype == torch.uint8 else 1.0
        total = x.numel() // x.shape[1]
        sums = torch.zeros(2, x.shape[1], dtype=torch.float64)
        for channel in range(x.shape[1]):
            values = x[:, channel]
            if x.dtype == torch.uint8:
                # A histogram says all about bytes and is several times faster than arithmetic on a float copy.
                counts = torch.bincount(values.flatten(), minlength=256).to(torch.float64)
                levels = torch.arange(256, dtype=torch.float64)
                sums[:, channel] = torch.stack([counts @ levels, counts @ levels.square()])
            else:
                values = values.to(torch.float64)
                sums[:, channel] = torch.stack([values.sum(), values.square().sum()])
        mean = sums[0] / total
        std = (sums[1] / total - mean.square()).clamp_min(0).sqrt()
        std = torch.where(std * scale < 1e-6, torch.ones_like(std) / scale, std)
        return Normalisation(tuple((mean * scale).tolist()), tuple((std * scale).tolist()), scale)
