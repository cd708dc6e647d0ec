"""Workloads that all libraries run: the model, the data and the budget of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from speed.baselines import CnnA
from speed.settings import MEAN, SETTINGS, STD


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with group norm; a block with more output channels has a 1x1 convolution as shortcut.

    Args:
        inputs: Input channels.
        outputs: Output channels.
        groups: Groups of each norm.
    """

    def __init__(self, inputs: int, outputs: int, groups: int = 8) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.GroupNorm(groups, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class ResNet20(nn.Sequential):
    """ResNet-20 with group norm (8 groups) and 1x1 convolutions as shortcuts: 272,474 parameters."""

    WIDTHS = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)

    def __init__(self) -> None:
        blocks = [BasicBlock(inputs, outputs) for inputs, outputs in zip(self.WIDTHS, self.WIDTHS[1:], strict=False)]
        stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.GroupNorm(8, 16), nn.ReLU()]
        super().__init__(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class TableMLP(nn.Sequential):
    """Two hidden layers of 200 units on 30 features: 48,410 parameters."""

    FEATURES = 30

    def __init__(self) -> None:
        super().__init__(nn.Linear(30, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))


@dataclass(frozen=True)
class Workload:
    """Model, data and budget.

    Attributes:
        title: Description for tables.
        model: Creates the model.
        budget: Clients, samples per client, cohort, steps, batch size, learning rate and seed.
        unskew_model: Name of the same model in unskew.
        unskew_options: Options of that model.
        images: True for images of CIFAR-10's shape; False for a table of 30 numbers.
    """

    title: str
    model: Callable[[], nn.Module]
    budget: dict[str, Any]
    unskew_model: str
    unskew_options: dict[str, Any] = field(default_factory=dict)
    images: bool = True


RESNET = {"clients": 100, "per_client": 500, "cohort": 10, "steps": 4, "batch": 32, "lr": 0.05, "seed": 1}
TABLE = {"clients": 1000, "per_client": 160, "cohort": 50, "steps": 10, "batch": 16, "lr": 0.05, "seed": 1}

WORKLOADS = {
    "A": Workload("CNN-A; 100 clients, 10 per round, 8 steps of batch 64", CnnA, SETTINGS["A"], "cnn"),
    "B": Workload("CNN-A; 1,000 clients, 50 per round, 5 steps of batch 10", CnnA, SETTINGS["B"], "cnn"),
    "resnet": Workload(
        "ResNet-20 with group norm; 100 clients, 10 per round, 4 steps of batch 32",
        ResNet20,
        RESNET,
        "resnet20",
        {"norm": "group", "shortcut": "1x1"},
    ),
    "table": Workload(
        "MLP on a table; 1,000 clients, 50 per round, 10 steps of batch 16", TableMLP, TABLE, "mlp", images=False
    ),
}


def table_rows(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of a table: the features of each class are normally distributed around the class mean.

    Args:
        count: Number of rows.
        seed: Seed of the data.

    Returns:
        Features, float32 ``[count, 30]``, and classes, int64 ``[count]``.
    """
    means = np.random.default_rng(0).normal(size=(10, TableMLP.FEATURES)) / 2
    rng = np.random.default_rng([seed, 1])
    y = rng.integers(0, 10, count)
    return (means[y] + rng.normal(size=(count, TableMLP.FEATURES))).astype(np.float32), y


def normalize(x: np.ndarray) -> np.ndarray:
    """Return samples as the models expect them.

    Args:
        x: Images, uint8 ``[n, 32, 32, 3]``, or rows of a table, float32 ``[n, 30]``.

    Returns:
        Normalized images, float32 ``[n, 3, 32, 32]``, or the unchanged rows.
    """
    if x.dtype != np.uint8:
        return np.ascontiguousarray(x)
    images = (x.astype(np.float32) / 255 - np.float32(MEAN)) / np.float32(STD)
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))
