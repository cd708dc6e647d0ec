"""Models of the settings in PyTorch, and what is drawn before a measurement: initial parameters, cohorts and batches."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from speed.baselines import CnnA
from speed.gpu_jobs.peer_models import pfllib_cnn, resnet18
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


def build(setting: Setting) -> nn.Module:
    """Return the model of a setting with its initial parameters."""
    torch.manual_seed(SEED + 1)
    if setting.model == "cnn":
        model: nn.Module = CnnA()
    elif setting.model == "pfl":
        model = pfl_cnn(setting.shape, setting.dropout)
    else:
        model = pfllib_cnn(10) if setting.model == "pfllib" else resnet18(10)
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
