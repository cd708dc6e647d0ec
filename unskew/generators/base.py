"""Interface of image generators, and the configuration of one client's generator.

A generator is trained on one client's labeled images and then generates images for requested labels::

    generator = factory(job)
    generator.fit(images, labels)     # uint8 [n, C, H, W] and int64 [n]
    images = generator.sample(labels) # uint8 [m, C, H, W] for int64 [m]

Any object with this interface can be used. All random numbers must be derived from ``job.seed``, so that an interrupted
preparation results in the same images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from unskew.generators.trained.dp_sgd import PrivacyOptions

Progress = dict[str, Any]


class ImageGenerator(Protocol):
    """Generator of labeled images that resemble its training images."""

    def fit(self, images: Tensor, labels: Tensor) -> None:
        """Train the generator.

        Args:
            images: Images, uint8 ``[n, C, H, W]``.
            labels: Class of each image, ``[n]``.
        """

    def sample(self, labels: Tensor) -> Tensor:
        """Generate one image for each of the classes ``[m]``: ``[m, C, H, W]``, uint8."""


def _nothing(_: Any) -> None:
    return None


@dataclass(frozen=True)
class GeneratorJob:
    """Configuration of one client's generator.

    Attributes:
        shape: Shape of an image, ``(C, H, W)``.
        classes: Number of classes in the federation; a client may have only some of them.
        seed: Random seed of this client's generator.
        device: Device for training and sampling.
        folder: Existing folder for checkpoints of the generator, or None.
        privacy: Privacy options, or None. They are only passed to generators with ``private = True``.
        secret: Secret key of private training, int64 ``[2]``, see ``unskew.secret_draws``; then ``seed`` is secret, too. None
            draws noise from the seed.
        report: Called after each epoch with ``epoch``, ``epochs``, and ``loss`` or, for private training, ``epsilon``.
        sampled: Called during ``sample`` with the finished share, from 0 to 1.
        warn: Called with warnings for the user.
    """

    shape: tuple[int, int, int]
    classes: int
    seed: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    folder: Path | None = None
    privacy: PrivacyOptions | None = None
    secret: Tensor | None = None
    report: Callable[[Progress], None] = _nothing
    sampled: Callable[[float], None] = _nothing
    warn: Callable[[str], None] = _nothing


def to_uint8(x: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Convert intensities from 0 to 1 to 8-bit pixels, on the CPU with channels-last memory.

    Intensities outside this range are clipped, and padding from ``pad_to_halvings`` beyond ``shape`` is removed.

    Args:
        x: Images with intensities from 0 to 1, ``[n, C, H, W]``.
        shape: Shape of an image, ``(C, H, W)``.

    >>> to_uint8(torch.tensor([-0.1, 0.5, 1.2]).view(1, 1, 1, 3), (1, 1, 2)).flatten().tolist()
    [0, 128]
    """
    pixels = (x[:, :, : shape[1], : shape[2]].detach() * 255).round().clamp(0, 255).to(torch.uint8).cpu()
    return pixels.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def padded_size(side: int, halvings: int) -> int:
    """Return the smallest side, at least ``side``, that can be halved ``halvings`` times.

    Args:
        side: Side of an image in pixels.
        halvings: Number of halvings.

    >>> padded_size(28, 3), padded_size(8, 1)
    (32, 8)
    """
    step = 1 << halvings
    return -(-side // step) * step


def num_halvings(sides: tuple[int, int], most: int) -> int:
    """Return how often an image can be halved until its smaller (padded) side is below 4, up to ``most`` times.

    Args:
        sides: Height and width in pixels.
        most: Maximum number of halvings.

    >>> num_halvings((32, 32), 3), num_halvings((8, 8), 3), num_halvings((28, 28), 3), num_halvings((3, 9), 3)
    (3, 1, 3, 0)
    """
    count = 0
    while count < most and padded_size(min(sides), count + 1) >> (count + 1) >= 4:
        count += 1
    return count


def pad_to_halvings(x: Tensor, times: int) -> Tensor:
    """Pad images by repeating the last row and column until both sides can be halved ``times`` times.

    Args:
        x: Images, ``[n, C, H, W]``.
        times: Number of halvings.
    """
    height, width = x.shape[2:]
    extra = (0, padded_size(width, times) - width, 0, padded_size(height, times) - height)
    return torch.nn.functional.pad(x, extra, mode="replicate") if any(extra) else x
