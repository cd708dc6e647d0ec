"""dSprites: 737,280 images of one white shape on black, generated from the data set's factors or read from its file.

Matthey, Higgins, Hassabis, Lerchner, "dSprites: Disentanglement testing Sprites dataset", 2017. It contains each
combination of 3 shapes (square, ellipse, heart), 6 scales from 0.5 to 1, 40 orientations from 0 to 2 pi, and 32 x 32
positions once, as 64 x 64 pixels. The generated images use the same factors, but are not pixel-identical to the
original: a position is a shift by one pixel, and a pixel is white if its center is inside the shape.

The task, to classify the shape, is that of Fedssyn's appendix A.4 (Li et al. 2023, arXiv:2306.13263). The column
``client`` divides the images into 12 groups, one shape in one quadrant of the positions each. A tenth of each group is
the test part, so each group has exactly 55,296 training images.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from unskew.data.readers.tables import SampleTable, Source
from unskew.errors import DataError

SHAPES = ("square", "ellipse", "heart")
SIZES = (3, 6, 40, 32, 32)
"""Values of shape, scale, orientation, horizontal and vertical position; the last changes fastest."""
TOTAL = 737_280
SIDE, REACH = 64, 16
RADIUS = 15.5  # radius of the circle around the largest shape, in pixels
GROUPS = 12
COLUMNS = ("shape", "scale", "orientation", "x", "y")


def stencils() -> np.ndarray:
    """Return masks of all shapes, scales and orientations, centered in 33 x 33 pixels: booleans ``[720, 33, 33]``."""
    axis = np.arange(-REACH, REACH + 1)
    y, x = (grid.astype(float)[None] for grid in np.meshgrid(axis, axis, indexing="ij"))
    angle = np.linspace(0, 2 * np.pi, SIZES[2])[:, None, None]
    u, v = x * np.cos(angle) + y * np.sin(angle), -x * np.sin(angle) + y * np.cos(angle)
    masks = []
    for shape in SHAPES:
        for scale in np.linspace(0.5, 1, SIZES[1]):
            a, b = u / (RADIUS * scale), v / (RADIUS * scale)
            if shape == "square":
                inside = np.maximum(abs(a), abs(b)) <= np.sqrt(0.5)
            elif shape == "ellipse":
                inside = a**2 + 4 * b**2 <= 1
            else:
                p, q = 1.42 * a, -1.42 * b  # the curve is within 1.42 of its center
                inside = (p**2 + q**2 - 1) ** 3 <= p**2 * q**3
            masks.append(inside)
    return np.concatenate(masks)


def factors(rows: np.ndarray) -> np.ndarray:
    """Return shape, scale, orientation, horizontal and vertical position of images by their index: ``[n, 5]``."""
    return np.stack(np.unravel_index(rows, SIZES), 1)


def draw_images(values: np.ndarray) -> np.ndarray:
    """Generate images ``[n, 64, 64]``, uint8 with values 0 and 255, from their factors ``[n, 5]``."""
    shapes = stencils().astype(np.uint8) * 255
    which = np.ravel_multi_index(tuple(values[:, :3].T), SIZES[:3])
    images = np.zeros((len(values), SIDE, SIDE), np.uint8)
    position = values[:, 3] * SIZES[4] + values[:, 4]
    order = np.argsort(position, kind="stable")
    edges = np.searchsorted(position[order], np.arange(SIZES[3] * SIZES[4] + 1))
    width = 2 * REACH + 1
    for number, (first, last) in enumerate(pairwise(edges)):
        rows, (x, y) = order[first:last], divmod(number, SIZES[4])
        images[rows, y : y + width, x : x + width] = shapes[which[rows]]
    return images


def client_groups(values: np.ndarray) -> np.ndarray:
    """Return the client of each image: ``4 shape + 2 (lower half) + (right half)``, 0 to 11."""
    return np.asarray(4 * values[:, 0] + 2 * (values[:, 4] >= SIZES[4] // 2) + (values[:, 3] >= SIZES[3] // 2))


def dsprites(path: Path | None = None, count: int | None = None) -> Source:
    """Load the data set, with a tenth of each client's images as the test part and a fixed seed.

    Args:
        path: The original ``.npz`` file, or a folder that contains it; None generates the images.
        count: Number of images, divided equally among the clients (rounded down); None means all.

    Raises:
        DataError: If the file is not dSprites, or the number of images is not valid.
    """
    if count is not None and not 2 * GROUPS <= count <= TOTAL:
        raise DataError(f"dsprites:{count} is not valid. Use a number from {2 * GROUPS} to {TOTAL:,}.")
    draws = np.random.default_rng(0)
    group = client_groups(factors(np.arange(TOTAL)))
    parts = [draws.permutation(np.flatnonzero(group == k))[: (count or TOTAL) // GROUPS] for k in range(GROUPS)]
    num_test = max(1, round(0.1 * len(parts[0])))
    test, train = (np.sort(np.concatenate([p[cut] for p in parts])) for cut in (slice(num_test), slice(num_test, None)))
    images = None if path is None else read_original(path)

    def table(rows: np.ndarray) -> SampleTable:
        values = factors(rows)
        x = draw_images(values) if images is None else images[rows] * np.uint8(255)
        columns = {"client": client_groups(values), **{name: values[:, i] for i, name in enumerate(COLUMNS)}}
        return SampleTable(torch.from_numpy(x)[:, None], torch.from_numpy(values[:, 0].astype(np.int64)), columns)

    return Source("dsprites", table(train), table(test), SHAPES, len(SHAPES))


def read_original(path: Path) -> np.ndarray:
    """Read the images ``[737280, 64, 64]`` with values 0 and 1 from the original file.

    Args:
        path: Original ``npz`` file.

    Raises:
        DataError: If the file is not the original dSprites file.
    """
    files = [path] if path.is_file() else sorted(path.glob("*.npz"))
    if not files:
        raise DataError(f"{path} contains no .npz file of dSprites.")
    try:
        # The file also contains pickled metadata, which are not read.
        with np.load(files[0], allow_pickle=False) as file:
            images, classes = file["imgs"], file["latents_classes"]
    except Exception as error:  # corrupted bytes raise many types in zipfile, zlib and NumPy
        raise DataError(f"{files[0]} cannot be read as dSprites: {error}.") from error
    expected = factors(np.arange(TOTAL))
    if (
        images.shape != (TOTAL, SIDE, SIDE)
        or classes.shape != (TOTAL, 6)
        or not np.array_equal(classes[:, 1:], expected)
    ):
        raise DataError(f"{files[0]} is not dSprites: its images have shape {images.shape}, or its factors differ.")
    return np.asarray(images, np.uint8)
