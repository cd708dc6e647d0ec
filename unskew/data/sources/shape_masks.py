"""Generated segmentation of four sites: circles, squares and triangles in color images of 64 x 64 pixels.

Like scanners of hospitals, the sites differ in gamma, blur, noise and the texture of the background, and in how often each
shape occurs. An image has one to three shapes, of which later ones cover earlier ones. Their colors vary around that of the
shape, so that color and outline together tell them apart.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from unskew.data.readers.tables import SampleTable, Source
from unskew.data.sources.shapes import points_inside, random_fields
from unskew.tasks.segmentation import Segmentation

SIDE = 64
TRAIN, TEST = 100, 25
CLASSES = ("background", "circle", "square", "triangle")
OUTLINES = ("disc", "square", "triangle")
"""Names of the shapes in ``points_inside``, in the order of the classes."""
COLORS = np.array([[0.9, 0.45, 0.45], [0.45, 0.85, 0.45], [0.45, 0.55, 0.95]])
"""Mean color of each shape, around which colors vary."""


class Site(NamedTuple):
    """Properties of the images of a site.

    Attributes:
        gamma: Exponent of the intensities.
        blur: Standard deviation of the blur, in pixels.
        noise: Standard deviation of the noise, relative to the range of intensities.
        fall: Exponent by which the amplitudes of the background's texture fall with frequency: large is smooth.
        mix: Probability of each shape.
    """

    gamma: float
    blur: float
    noise: float
    fall: float
    mix: tuple[float, float, float]


SITES = {
    "north": Site(1.0, 0.0, 0.02, 2.0, (0.70, 0.15, 0.15)),
    "east": Site(0.5, 1.0, 0.02, 1.0, (0.15, 0.70, 0.15)),
    "south": Site(2.0, 0.5, 0.08, 1.5, (0.15, 0.15, 0.70)),
    "west": Site(1.4, 0.0, 0.1, 0.5, (0.34, 0.33, 0.33)),
}


def shape_masks() -> Source:
    """Generate 100 training and 25 test images of each site with a fixed seed, and the column ``site``."""
    draws = np.random.default_rng(0)
    parts: list[list[SampleTable]] = [[], []]
    for name, site in SITES.items():
        for part, n in zip(parts, (TRAIN, TEST), strict=True):
            images, masks = draw_site(site, n, draws)
            columns = {"site": np.full(n, name)}
            part.append(SampleTable(torch.from_numpy(images), torch.from_numpy(masks), columns))
    train, test = (joined_tables(part) for part in parts)
    task = Segmentation(class_names=CLASSES)
    return Source("shape-masks", train, test, CLASSES, len(CLASSES), task.name, trained_for=task)


def joined_tables(parts: list[SampleTable]) -> SampleTable:
    """Return the samples of several tables with the same columns as one table.

    Args:
        parts: Tables.
    """
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns}
    return SampleTable(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]), columns)


def draw_site(site: Site, n: int, draws: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Generate images, uint8 ``[n, 3, 64, 64]``, and their masks, uint8 ``[n, 64, 64]``.

    Args:
        site: Properties of the site.
        n: Number of images.
        draws: Random number generator.
    """
    from scipy.ndimage import gaussian_filter

    axis = np.arange(SIDE) - (SIDE - 1) / 2
    masks = np.zeros((n, SIDE, SIDE), np.uint8)
    images = draws.uniform(0.25, 0.55, (n, 3, 1, 1)) + 0.08 * random_fields(n, 3, site.fall, draws, SIDE)
    for image, mask in zip(images, masks, strict=True):
        for _ in range(draws.integers(1, 4)):
            center, angle, radius = draws.uniform(-22, 22, 2), draws.uniform(0, 2 * np.pi), draws.uniform(9, 16)
            x, y = axis[None, :] - center[0], axis[:, None] - center[1]
            u, v = (x * np.cos(angle) + y * np.sin(angle)) / radius, (y * np.cos(angle) - x * np.sin(angle)) / radius
            shape = int(draws.choice(len(OUTLINES), p=site.mix))
            inside = points_inside(OUTLINES[shape], u, v)
            image[:, inside] = (COLORS[shape] + draws.uniform(-0.1, 0.1, 3))[:, None]
            mask[inside] = shape + 1
    images = gaussian_filter(images, (0, 0, site.blur, site.blur)).clip(0, 1) ** site.gamma
    images += site.noise * draws.normal(size=images.shape)
    return (255 * images).clip(0, 255).round().astype(np.uint8), masks
