"""CNN-C, the small network of Feddle's experiments."""

from __future__ import annotations

from typing import Literal

from torch import nn

from unskew.models.zoo.vision import Classifier, check_choice, image_shape

SIDE = 4


class CNNC(Classifier):
    """CNN-C of Feddle (Zhu et al. 2025, arXiv:2503.20138): three 3x3 convolutions, one pooling, two linear layers.

    The paper does not say how wide they are: 32, 64 and 64 channels, padded by 1; pooling to 4 x 4; 256 hidden units.

    Args:
        shape: Channels, height and width of an image.
        classes: Number of logits.
        stride: Of the first two convolutions; 2 takes a fifteenth of the arithmetic.

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
