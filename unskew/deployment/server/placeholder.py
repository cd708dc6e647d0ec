"""Placeholder client of the server: the layout of uploads follows from what it sends, and not from the sites' replies."""

from __future__ import annotations

from dataclasses import replace

import torch

from unskew.data.federation import ClientData, take_rows
from unskew.deployment.site.data import SingleClientView
from unskew.engines.base import EngineConfig
from unskew.engines.device import device_modes
from unskew.engines.local_trainer import LocalTrainer
from unskew.errors import UnskewError
from unskew.models.spec import ModelSpec
from unskew.protocol.messages import Broadcast, Tensors
from unskew.protocol.rules import ClientRule

SAMPLES = 8
"""Number of test samples that the placeholder client trains on."""


def sends_uploads(rule: ClientRule) -> bool:
    """Return whether a rule may send something in addition to the model."""
    own = type(rule)
    changed = own.end is not ClientRule.end or own.transform_update is not ClientRule.transform_update
    return changed or rule.encodes


def placeholder_upload(setup: EngineConfig, broadcast: Broadcast) -> dict[str, Tensors]:
    """Return what the rules of a placeholder client send after one local step on test samples, by rule and name.

    Args:
        setup: Engine configuration as the server sees it.
        broadcast: Message to any client of the round.
    """
    if not any(map(sends_uploads, setup.rules)):
        return {}
    x, y = setup.federation.test
    rows = torch.arange(SAMPLES, device=y.device) % len(y)
    data = ClientData(broadcast.client, take_rows(x, rows), y[rows], x[:0], y[:0])
    clients = SingleClientView(data, len(setup.federation.clients))
    alone = replace(
        setup,
        federation=replace(setup.federation, clients=clients),
        training=replace(setup.training, local_steps=1, local_epochs=None, counted=None),
    )
    with device_modes(setup.device, setup.training.precision):
        return LocalTrainer(alone).train(broadcast).upload


def check_uploads(
    rules: tuple[ClientRule, ...], upload: dict[str, Tensors], like: dict[str, Tensors], spec: ModelSpec
) -> None:
    """Validate what the rules of one client have sent.

    Args:
        rules: Client rules of the method.
        upload: Uploads of the client by rule and name.
        like: Uploads of the placeholder client by rule and name.
        spec: Layout of the model.

    Raises:
        UnskewError: If an upload is missing, unexpected, or of another layout, or a value is out of range.
    """
    if upload.keys() - {rule.name for rule in rules}:
        raise UnskewError("There are uploads of rules that send none.")
    for rule in rules:
        rule.check_upload(upload.get(rule.name, {}), like.get(rule.name, {}), spec)
