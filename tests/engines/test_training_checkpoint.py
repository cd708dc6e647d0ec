"""Interrupted local training, continued by another trainer from its checkpoint, gives the bits of an uninterrupted one."""

import random

import numpy as np
import pytest
import torch
from safetensors.torch import load
from support.engine_methods import ALL_METHODS, EARLY, SUMS
from support.federations import SmallBatchNorm, blobs, small_model
from support.slow import slow_but

import unskew
from unskew.engines import inline
from unskew.engines.local_trainer import LocalTrainer
from unskew.protocol.client_state_files import encode_tensors


class Interrupted(Exception):
    """The process ends."""


class Interruption:
    """Stores a checkpoint after ``at`` steps, as a file would, and ends the training one step later."""

    def __init__(self, at):
        self.at, self.steps, self.file = at, 0, b""

    def load(self):
        return load(self.file) if self.file else {}

    def is_due(self):
        if self.file:
            raise Interrupted
        self.steps += 1
        return self.steps == self.at

    def save(self, tensors):
        self.file = encode_tensors(tensors)


class Continuation(Interruption):
    """Has the file, and needs no other."""

    def is_due(self):
        return False


class InterruptedTrainer(LocalTrainer):
    """Trains every client in two processes, as it were."""

    interruptions = 0

    def train(self, broadcast, store=None):
        first, second = Interruption(at=2), Continuation(0)
        try:
            return LocalTrainer(self.setup).train(broadcast, first)
        except Interrupted:
            InterruptedTrainer.interruptions += 1
        if self.setup.spec.draws_globally:  # whatever others draw meanwhile
            torch.rand(3), np.random.rand(3), random.random()  # noqa: NPY002
        second.file = first.file
        return LocalTrainer(self.setup).train(broadcast, second)


def train(method="fedavg", model=None, **options):
    torch.manual_seed(0)
    method = EARLY.get(method, method)
    given = {"rounds": 3, "lr": 0.05, "batch_size": 8, "participation": 0.5, "local_epochs": 2, **options}
    model = small_model(method) if model is None else model()
    return unskew.run(blobs([5, 19, 8, 13, 21, 11]), model=model, method=method, engine="inline", seed=1, **given)


def assert_same_bits(monkeypatch, *args, **options):
    expected = train(*args, **options)
    monkeypatch.setattr(inline, "LocalTrainer", InterruptedTrainer)
    monkeypatch.setattr(InterruptedTrainer, "interruptions", 0)
    continued = train(*args, **options)
    assert InterruptedTrainer.interruptions >= 3
    assert torch.equal(continued.vector, expected.vector)
    for name, tensor in expected.model.state_dict().items():
        assert torch.equal(continued.model.state_dict()[name], tensor)
    losses = [
        [row[name] for row in result.history] for result in (continued, expected) for name in ("train_loss", "loss")
    ]
    assert losses[:2] == losses[2:]


# State and download, a personal model that steps replace, rates that steps fill in, generated samples,
# an order of samples, parameters that are frozen in some steps.
METHODS = ["scaffold", "ditto", "apfl", "pfedme", "fedals:auto,longest=2,budget=0.9"]


@pytest.mark.parametrize("method", slow_but(METHODS, [name for name in [*ALL_METHODS, *SUMS] if name != "center"]))
def test_a_method_continues(method, monkeypatch):
    assert_same_bits(monkeypatch, method)


class Drawing(SmallBatchNorm):
    """Draws from all global generators, and averages the statistics of BatchNorm over all steps."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm2d(4, momentum=None)

    def forward(self, x):
        scale = 1 + 0.1 * random.random() + 0.1 * float(np.random.rand())  # noqa: NPY002
        return super().forward(x * scale + 0.1 * torch.rand_like(x))


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9, "nesterov": True, "augment": True},
        {"optimizer": "adam", "augment": True},
        {"optimizer": "adamw", "weight_decay": 0.1, "method": "fedrep"},
        {"model": Drawing, "lr_schedule": "cosine"},
        {"buffers": "local", "local_epochs": None, "local_steps": 5},
    ],
    ids=["momentum", "adam", "frozen", "global-draws", "local-buffers"],
)
def test_optimizer_augmentation_and_random_numbers_continue(options, monkeypatch):
    assert_same_bits(monkeypatch, **options)
