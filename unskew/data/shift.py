"""Feature shift: each client's inputs are rotated, or get noise, by an amount that grows with the client's number."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from unskew.data.clients import allocate_inputs
from unskew.data.partitioned import PartitionedSource
from unskew.data.readers.tables import SampleTable
from unskew.data.spec import Shift
from unskew.errors import DataError
from unskew.seeding import numpy_generator
from unskew.tasks.base import OUTSIDE
from unskew.tasks.registry import TASKS


def with_shift(drawn: PartitionedSource, shift: Shift) -> PartitionedSource:
    """Return the data with shifted training and held-out inputs of each client, in a new array.

    Args:
        drawn: Partitioned samples.
        shift: Shift of the clients.

    Raises:
        DataError: If the inputs are token ids, a table with columns to encode or, for rotations, not images.
    """
    x, parts = drawn.train.x, drawn.parts
    if x.dtype == torch.int64 or drawn.source.encoders or (shift.kind == "rotate" and x.dim() != 4):
        required = "images" if shift.kind == "rotate" else "images or numbers"
        raise DataError(
            f"shift={shift.kind} requires inputs that are {required}, which those of {drawn.spec.data} are not."
        )
    shifted, y = allocate_inputs(len(drawn.rows), x), drawn.train.y[drawn.rows]
    for k in range(parts.clients):
        part = slice(int(parts.offsets[k]), int(parts.offsets[k + 1]))
        inputs, amount = x[drawn.rows[part]], shift.amount(k, parts.clients)
        shifted[part] = rotated(inputs, amount) if shift.kind == "rotate" else noisy(inputs, amount, drawn.seed, k)
        if shift.kind == "rotate" and TASKS[drawn.source.task].pixels:
            y[part] = rotated_masks(y[part], amount)
    rows = drawn.rows.numpy()
    train = SampleTable(shifted, y, {name: values[rows] for name, values in drawn.train.columns.items()})
    source = replace(drawn.source, train=train)  # its normalization is that of the shifted inputs
    return replace(drawn, source=source, train=train, rows=torch.arange(len(shifted)))


def rotated_masks(y: Tensor, angle: float) -> Tensor:
    """Rotate masks as ``rotated`` does with their images, with the nearest class; pixels outside have no truth.

    Args:
        y: Class of each pixel, ``[n, H, W]``.
        angle: Angle in degrees.
    """
    turned = rotated(y.to(torch.int16)[:, None] + 1, angle, "nearest")[:, 0] - 1
    return torch.where(turned < 0, OUTSIDE, turned).to(y.dtype)


def rotated(images: Tensor, angle: float, mode: str = "bilinear") -> Tensor:
    """Rotate images counterclockwise around their center, with zeros outside.

    Multiples of 90 degrees are exact for square images.

    Args:
        images: Images, ``[n, C, H, W]``.
        angle: Angle in degrees.
        mode: Interpolation, as in ``torch.nn.functional.grid_sample``.
    """
    height, width = images.shape[2:]
    if angle % 90 == 0 and height == width:
        return torch.rot90(images, round(angle / 90), (2, 3))
    cos, sin = np.cos(np.deg2rad(angle)), np.sin(np.deg2rad(angle))
    # Grid coordinates are relative to half the height and width, and point right and down.
    matrix = torch.tensor([[cos, -sin * height / width, 0], [sin * width / height, cos, 0]], dtype=torch.float32)
    result = torch.empty_like(images)
    for first in range(0, len(images), 1000):  # bounds the memory of the copy in float32
        chunk = images[first : first + 1000].float()
        grid = affine_grid(matrix.expand(len(chunk), 2, 3), list(chunk.shape), align_corners=False)
        turned = grid_sample(chunk, grid, mode, align_corners=False)
        result[first : first + 1000] = turned if images.is_floating_point() else turned.round()
    return result


def noisy(x: Tensor, sigma: float, seed: int, client: int) -> Tensor:
    """Add Gaussian noise; 8-bit inputs are then rounded and limited to 0 to 255.

    Args:
        x: Inputs, ``[n, ...]``.
        sigma: Standard deviation; for 8-bit inputs, relative to 255.
        seed: Seed of the run.
        client: Client number.
    """
    noise = torch.from_numpy(numpy_generator(seed, "shift noise", client).standard_normal(tuple(x.shape), np.float32))
    if x.is_floating_point():
        return x + sigma * noise.to(x.dtype)
    return noise.mul_(255 * sigma).add_(x).round_().clamp_(0, 255).to(x.dtype)
