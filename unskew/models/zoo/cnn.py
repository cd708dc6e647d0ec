"""Small convolutional networks of the papers.

References:
    CNN-A and CNN-B: Ye et al. 2023 (FedCOG), arXiv:2312.05966.
    CNN-C: Zhu et al. 2025 (Feddle), arXiv:2503.20138.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from unskew.errors import ConfigError
from unskew.models.zoo.basic import NORMS, Classifier, check_choice, hidden_layers, image_shape, norm_layers

SIDE = 4  # side of CNN-C's pooled feature map


class CNNA(Classifier):
    """CNN-A of FedCOG: two 5x5 convolutions and three linear layers (a LeNet-5).

    The convolutions have no padding. For images with a side below 16 pixels they are padded by 2. The minimum is 4 pixels
    per side.

    Args:
        shape: Channels, height and width of an image.
        classes: Number of logits.
        norm: Normalization after each convolution and hidden linear layer: `"none"`, as in the paper, `"batch"` or
            `"group"`.

    >>> sum(p.numel() for p in CNNA((3, 32, 32), 10).parameters())
    62006
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, norm: str = "none") -> None:
        channels, height, width = image_shape("CNN-A", shape)
        check_choice("CNN-A", "norm", norm, NORMS)
        padding, flat = _fit("CNN-A", (height, width), kernel=5, stages=2)
        body = nn.Sequential(
            *_stage(channels, 6, 5, padding, norm),
            *_stage(6, 16, 5, padding, norm),
            nn.Flatten(),
            *hidden_layers(16 * flat, (120, 84), norm)[0],
        )
        super().__init__(body, 84, classes)


class CNNB(Classifier):
    """CNN-B of FedCOG: three 3x3 convolutions and two linear layers.

    The convolutions have no padding. For images with a side below 22 pixels they are padded by 1. The minimum is 8 pixels
    per side.

    Args:
        shape: Channels, height and width of an image.
        classes: Number of logits.

    >>> sum(p.numel() for p in CNNB((3, 32, 32), 100).parameters())
    69380
    """

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        channels, height, width = image_shape("CNN-B", shape)
        padding, flat = _fit("CNN-B", (height, width), kernel=3, stages=3)
        body = nn.Sequential(
            *_stage(channels, 16, 3, padding),
            *_stage(16, 32, 3, padding),
            *_stage(32, 64, 3, padding),
            nn.Flatten(),
            nn.Linear(64 * flat, 128),
            nn.ReLU(inplace=True),
        )
        super().__init__(body, 128, classes)


class CNNC(Classifier):
    """CNN-C of Feddle (Zhu et al. 2025, arXiv:2503.20138): three 3x3 convolutions, one pooling, two linear layers.

    The paper does not state their widths. This model uses 32, 64 and 64 channels with padding 1, pooling to 4 x 4, and 256
    hidden units.

    Args:
        shape: Channels, height and width of an image.
        classes: Number of logits.
        stride: Stride of the first two convolutions; 2 reduces the number of operations to a fifteenth.

    >>> sum(p.numel() for p in CNNC((3, 32, 32), 10).parameters())
    321290
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, stride: Literal[1, 2] = 1) -> None:
        channels, _, _ = image_shape("CNN-C", shape)
        check_choice("CNN-C", "stride", stride, (1, 2))
        body = nn.Sequential(
            nn.Conv2d(channels, 32, 3, stride, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(32, 64, 3, stride, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.AdaptiveMaxPool2d(SIDE),
            nn.Flatten(),
            nn.Linear(64 * SIDE * SIDE, 256),
            nn.ReLU(inplace=True),
        )
        super().__init__(body, 256, classes)


def _stage(inputs: int, outputs: int, kernel: int, padding: int, norm: str = "none") -> list[nn.Module]:
    """Return convolution, pooling and ReLU; ReLU after max pooling is equivalent and processes a quarter of the values."""
    conv = nn.Conv2d(inputs, outputs, kernel, padding=padding)
    return [conv, *norm_layers(norm, outputs), nn.MaxPool2d(2), nn.ReLU(inplace=True)]


def _fit(name: str, sides: tuple[int, int], kernel: int, stages: int) -> tuple[int, int]:
    """Return the padding with which the image is large enough for all stages, and the number of remaining pixels."""
    for padding in (0, kernel // 2):
        height, width = sides
        for _ in range(stages):
            height, width = ((side + 2 * padding - kernel + 1) // 2 for side in (height, width))
        if min(height, width) >= 1:
            return padding, height * width
    least = 2**stages
    raise ConfigError(f"{name} needs images of at least {least}x{least} pixels, but got {sides[0]}x{sides[1]}.")
