"""Virtual inputs: noise with one cluster per class, which does not depend on any client's data.

Both sources return values with mean 0 and standard deviation 1 per channel (or feature) over the whole set. All random
numbers are functions of a key.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from unskew.seeding import fold, normal

COARSE = 8
"""Side of the grid on which noise images are drawn. Pooling would average out independent noise per pixel."""


def samples_around_centers(key: Tensor, y: Tensor, shape: tuple[int, ...], spread: float) -> Tensor:
    """Draw float64 samples ``[n, *shape]``, each near the center of its class.

    Centers are standard normal; the noise around them is normal with standard deviation ``spread``.

    Args:
        key: Random key.
        y: Class of each sample, ``[n]``.
        shape: Shape of a sample.
        spread: Standard deviation around the center.
    """
    centers = normal(fold(key, 1), (int(y.max()) + 1, *shape))
    return centers[y] + spread * normal(fold(key, 2), (len(y), *shape))


def standardize(x: Tensor) -> Tensor:
    """Standardize ``x [n, c, ...]`` to mean 0 and standard deviation 1 for each entry of its second axis."""
    axes = [0, *range(2, x.dim())]
    return (x - x.mean(axes, keepdim=True)) / x.std(axes, keepdim=True, correction=0).clamp_min(1e-6)


def gaussian_clusters(key: Tensor, y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Draw Gaussian noise with one cluster per class, float32 ``[n, *shape]``.

    The standard deviation within a class is half of that between centers. Images are drawn on a coarse grid and upsampled.
    Both choices are those of the VHL authors' code (arXiv:2206.02465).

    Args:
        key: Random key.
        y: Class of each sample, ``[n]``.
        shape: Shape of a sample.
    """
    if len(shape) != 3:
        return standardize(samples_around_centers(key, y, shape, 0.5)).float()
    channels, height, width = shape
    coarse = samples_around_centers(key, y, (channels, min(COARSE, height), min(COARSE, width)), 0.5).float()
    return standardize(F.interpolate(coarse, size=(height, width), mode="bilinear"))
