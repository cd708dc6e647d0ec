"""Models of the settings in PyTorch, and what is drawn before a measurement: initial parameters, cohorts and batches."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speed.baselines import CnnA
from speed.gpu_jobs.settings import SEED, Prepared, Setting
from unskew.engines.batches import BatchPlan
from unskew.protocol.training_config import Training
from unskew.simulation.sampler import Sampler


def pfl_cnn(shape: tuple[int, int, int], dropout: bool) -> nn.Module:
    """Return the CNN of pfl-research's CIFAR-10 benchmark (``simple_cnn``), with its Glorot initialization.

    Args:
        shape: Shape of an image, channels first.
        dropout: Whether to have its dropout layers.
    """
    side = (shape[1] - 4) // 2
    layers = [nn.Conv2d(shape[0], 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Dropout(0.25)] if dropout else []
    layers += [nn.Flatten(), nn.Linear(64 * side * side, 128), nn.ReLU()]
    layers += [nn.Dropout(0.5)] if dropout else []
    model = nn.Sequential(*layers, nn.Linear(128, 10))
    for layer in model:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.xavier_uniform_(layer.weight)
    return model


def pfllib_cnn() -> nn.Module:
    """Return PFLlib's CNN for MNIST (``FedAvgCNN``)."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with group norm of two groups; a block with another width has a 1x1 convolution as shortcut.

    Args:
        inputs: Input channels.
        outputs: Output channels.
    """

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(2, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(2, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.GroupNorm(2, outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


WIDTHS = (64, 64, 64, 128, 128, 256, 256, 512, 512)


def resnet18() -> nn.Module:
    """Return FL-Simulator's ResNet-18: the stem for ImageNet, and group norm of two groups instead of batch norm."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.GroupNorm(2, 64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks = [BasicBlock(inputs, outputs) for inputs, outputs in pairwise(WIDTHS)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def build(setting: Setting) -> nn.Module:
    """Return the model of a setting with its initial parameters."""
    torch.manual_seed(SEED + 1)
    if setting.model == "cnn":
        model: nn.Module = CnnA()
    elif setting.model == "pfl":
        model = pfl_cnn(setting.shape, setting.dropout)
    else:
        model = pfllib_cnn() if setting.model == "pfllib" else resnet18()
    return model.double() if setting.precision == "fp64" else model


def training_of(setting: Setting) -> Training:
    """Return the local budget of a setting, as unskew's runs have it."""
    return Training(local_steps=setting.steps, local_epochs=None, batch_size=setting.batch, lr=setting.lr)


def prepare(setting: Setting, rounds: int) -> Prepared:
    """Draw what all loops share, in the way in which a run of unskew draws it.

    Args:
        setting: The setting.
        rounds: Number of rounds.
    """
    sampler, training = Sampler(setting.clients, setting.cohort / setting.clients, SEED), training_of(setting)
    cohorts = np.array([sampler.draw(t) for t in range(rounds)])
    shape = (rounds, setting.cohort, setting.steps, setting.batch)
    rows, weights = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    for t in range(rounds):
        for place, client in enumerate(cohorts[t].tolist()):
            first = client * setting.per_client
            rows[t, place] = first
            for step, batch in enumerate(BatchPlan(training, setting.per_client, SEED, t, client).batches):
                rows[t, place, step, : len(batch)] = first + batch.numpy()
                weights[t, place, step, : len(batch)] = 1
    start = [parameter.detach().numpy() for parameter in build(setting).parameters()]
    return Prepared(setting, start, cohorts, rows, weights)
