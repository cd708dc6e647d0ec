"""Normalization of inputs, applied batch by batch on the training device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unskew.errors import DataError

ROWS = 4096  # rows per chunk, to bound the memory of temporary copies
CONSTANT = 1e-6
"""A column counts as constant if its standard deviation is smaller than this, and than this share of its mean."""


def is_constant(mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Return which columns are constant up to rounding, so that they are not divided by their standard deviation.

    Args:
        mean: Mean of each column, ``[f]``.
        std: Standard deviation of each column, ``[f]``.

    >>> is_constant(np.array([0.1, 0.0, 3e-9, 0.0]), np.array([1e-9, 0.0, 1e-9, 2e-7]))
    array([ True,  True, False, False])
    """
    return np.asarray(((std < CONSTANT) & (std <= CONSTANT * np.abs(mean))) | (std < np.finfo(np.float32).tiny))


@dataclass(frozen=True)
class Normalization:
    """Normalization ``(x * scale - mean) / std``, per channel (images) or per feature (tables)."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 1.0

    def __post_init__(self) -> None:
        try:
            mean, std, scale = (np.atleast_1d(np.asarray(v, float)) for v in (self.mean, self.std, self.scale))
        except (TypeError, ValueError) as error:
            raise DataError("The mean, std and scale of a normalization must be numbers.") from error
        if mean.ndim > 1 or mean.shape != std.shape or not mean.size:
            raise DataError(f"A normalization needs one std per mean, not {mean.size} means and {std.size} stds.")
        if not (np.isfinite(std).all() and (std > 0).all()):
            raise DataError(f"The std of a normalization must be above 0 and finite, not {self.std}.")
        if not (np.isfinite(mean).all() and np.isfinite(scale).all()):
            raise DataError(f"The mean and scale of a normalization must be finite, not {self.mean} and {self.scale}.")

    @staticmethod
    def fit(x: Tensor, further: Iterable[Tensor] = ()) -> Normalization:
        """Compute mean and standard deviation per channel (images) or per feature (tables).

        Args:
            x: Images, uint8 ``[n, C, H, W]`` (scaled to [0, 1]), or float features, ``[n, f]``.
            further: More uint8 images, so that they need not be in one array; ignored for floats.
        """
        scale = 1 / 255 if x.dtype == torch.uint8 else 1.0
        channels, total = x.shape[1], 0
        sums = torch.zeros(2, channels, dtype=torch.float64)
        if x.dtype == torch.uint8:
            # A histogram determines both sums and is several times faster than arithmetic on a float copy.
            counts = torch.zeros(channels, 256, dtype=torch.int64)
            for part in (chunk for array in (x, *further) for chunk in torch.split(array, ROWS)):
                total += part.numel() // channels
                for channel in range(channels):
                    counts[channel] += torch.bincount(part[:, channel].flatten(), minlength=256)
            levels = torch.arange(256, dtype=torch.float64)
            for channel, count in enumerate(counts.to(torch.float64)):
                sums[:, channel] = torch.stack([count @ levels, count @ levels.square()])
        else:
            total = x.numel() // channels
            for channel in range(channels):
                values = x[:, channel].to(torch.float64)
                sums[:, channel] = torch.stack([values.sum(), values.square().sum()])
        mean = sums[0] / total
        std = (sums[1] / total - mean.square()).clamp_min(0).sqrt()
        constant = torch.from_numpy(is_constant((mean * scale).numpy(), (std * scale).numpy()))
        std = torch.where(constant, torch.ones_like(std) / scale, std)
        return Normalization(tuple((mean * scale).tolist()), tuple((std * scale).tolist()), scale)
