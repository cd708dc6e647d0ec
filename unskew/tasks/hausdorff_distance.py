"""HD95: distance of the borders of predicted and true regions.

Huttenlocher, Klanderman, Rucklidge 1993 (PAMI 15), with the 95th percentile.
"""

from __future__ import annotations

import math

import numpy as np

from unskew.tasks.base import OUTSIDE


def mean_hd95(predicted: np.ndarray, y: np.ndarray, classes: int) -> float:
    """Compute the mean over images of the mean HD95 over foreground classes, in pixels.

    Classes without predicted and true pixels are skipped. If one of both has none, the distance is the diagonal of the image.
    NaN if all classes are skipped.

    Args:
        predicted: Predicted classes, ``[n, *sides]``.
        y: True classes, ``[n, *sides]``; pixels without truth belong to no class.
        classes: Number of classes.
    """
    images = []
    for guess, truth in zip(np.where(y == OUTSIDE, OUTSIDE, predicted), y, strict=True):
        pairs = [(guess == c, truth == c) for c in range(1, classes)]
        distances = [hd95(*pair) for pair in pairs if pair[0].any() or pair[1].any()]
        images += [np.mean(distances)] if distances else []
    return float(np.mean(images)) if images else math.nan


def hd95(one: np.ndarray, other: np.ndarray) -> float:
    """Compute the larger of the two 95th percentiles of the distances between the borders of two regions.

    Args:
        one: Whether each pixel is in the first region.
        other: Whether each pixel is in the second region.
    """
    from scipy.ndimage import binary_erosion, distance_transform_edt

    if not one.any() or not other.any():
        return math.hypot(*one.shape)
    borders = [region & ~binary_erosion(region) for region in (one, other)]
    ways = ((borders[0], borders[1]), (borders[1], borders[0]))
    return max(float(np.percentile(distance_transform_edt(~to)[start], 95)) for start, to in ways)
