"""Placeholder client of the server: the layout of uploads follows from what it sends, and not from the sites' replies."""

from __future__ import annotations

from dataclasses import replace

import torch

from unskew.data.federation import ClientData, take_rows
from unskew.deployment.common.client_view import SingleClientView
from unskew.engines.base import EngineConfig
from unskew.engines.device import device_modes
from unskew.engines.local_trainer import LocalTrainer
from unskew.protocol.messages import Broadcast, Tensors
from unskew.protocol.rules import ClientRule

SAMPLES = 8
"""Number of test samples that the placeholder client trains on."""


WRITING = ("end", "transform_update", "encode")
"""Hooks of client rules that may send something in addition to the model."""


def placeholder_upload(setup: EngineConfig, broadcast: Broadcast) -> dict[str, Tensors]:
    """Return what the rules of a placeholder client send after one local step on test samples, by rule and name.

    Args:
        setup: Engine configuration as the server sees it.
        broadcast: Message to any client of the round.
    """
    if all(getattr(type(rule), hook) is getattr(ClientRule, hook) for rule in setup.rules for hook in WRITING):
        return {}
    x, y = setup.federation.test
    rows = torch.arange(SAMPLES, device=y.device) % len(y)
    data = ClientData(broadcast.client, take_rows(x, rows), y[rows], x[:0], y[:0])
    federation = replace(setup.federation, clients=SingleClientView(data, len(setup.federation.clients)))
    training = replace(setup.training, local_steps=1, local_epochs=None, counted=None)
    alone = replace(setup, federation=federation, training=training)
    with device_modes(setup.device, setup.training.precision):
        return LocalTrainer(alone).train(broadcast).upload
