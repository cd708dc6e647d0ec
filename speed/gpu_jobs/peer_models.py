"""Models of the peers' settings in job 9: ``unskew compare --config speed/gpu_jobs/fl-simulator.yaml --trust-code``."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

GROUPS = 2


class Block(nn.Module):
    """Two 3x3 convolutions with group norm, and a 1x1 convolution as shortcut if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(GROUPS, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(GROUPS, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.GroupNorm(GROUPS, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


def resnet18(classes: int) -> nn.Module:
    """Return FL-Simulator's ResNet-18: the stem for ImageNet (7x7, stride 2, and a pooling), two groups in each norm.

    Args:
        classes: Number of classes.
    """
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.GroupNorm(GROUPS, 64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
    blocks = [block for a, b, stride in widths for block in (Block(a, b, stride), Block(b, b, 1))]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


def pfllib_cnn(classes: int) -> nn.Module:
    """Return PFLlib's CNN for MNIST: two 5x5 convolutions without padding, each with a pooling, and two linear layers.

    Args:
        classes: Number of classes.
    """
    first = [nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, classes))
