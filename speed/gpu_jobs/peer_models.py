"""Models of the peers' settings in job 9: ``unskew compare --config speed/gpu_jobs/fl-simulator.yaml --trust-code``."""

from __future__ import annotations

import itertools

from torch import nn

from speed.peers.workloads import BasicBlock

GROUPS = 2


def resnet18(classes: int) -> nn.Module:
    """Return FL-Simulator's ResNet-18: the stem for ImageNet (7x7, stride 2, and a pooling), two groups in each norm.

    Args:
        classes: Number of classes.
    """
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.GroupNorm(GROUPS, 64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [BasicBlock(inputs, outputs, GROUPS) for inputs, outputs in itertools.pairwise(widths)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


def pfllib_cnn(classes: int) -> nn.Module:
    """Return PFLlib's CNN for MNIST: two 5x5 convolutions without padding, each with a pooling, and two linear layers.

    Args:
        classes: Number of classes.
    """
    first = [nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, classes))
