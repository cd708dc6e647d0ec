"""Ablations of the Fedssyn paper: each client keeps its own images, or one client has all data."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from unskew.data.federation import ArrayClients, concatenate_inputs
from unskew.protocol.data_preparation import ClientPayloads, PreparedData, ServerPayload
from unskew.protocol.messages import num_bytes
from unskew.protocol.rules import DataRule


def only_own_images(
    prepared: PreparedData, payloads: ClientPayloads, rule: DataRule, match_steps: bool | Literal["epochs"]
) -> PreparedData:
    """Let each client train on its own images; nothing is sent.

    Args:
        prepared: Data before the exchange.
        payloads: Generated images of all clients.
        rule: Data rule of the method.
        match_steps: Local budget, see ``ServerPayload``.
    """
    nothing = {"x": prepared.federation.clients[0].x[:0], "y": prepared.federation.clients[0].y[:0]}
    shares = {k: payloads.sent.get(k, nothing) for k in range(len(prepared.federation.clients))}
    dealt = ServerPayload(shares, match_steps=match_steps)
    after = prepared.received(rule.name, replace(payloads, sent={}), dealt, rule.apply_payload)
    return replace(after, traffic=prepared.traffic)


def single_client_images(prepared: PreparedData, payloads: ClientPayloads) -> PreparedData:
    """Replace the clients by a single one with all sent samples (all real, or all synthetic).

    Args:
        prepared: Data before the exchange.
        payloads: Samples that each client sends.
    """
    x = concatenate_inputs([sent["x"] for sent in payloads.sent.values()])
    y = torch.cat([sent["y"] for sent in payloads.sent.values()]).to(torch.int64)
    clients = ArrayClients(x, y, np.array([0, len(y)]), np.array([len(y)]))
    cost = ((k, (num_bytes(payloads.sent.get(k, {}).values()), 0)) for k in range(len(prepared.federation.clients)))
    return replace(
        prepared,
        federation=replace(prepared.federation, clients=clients),
        summary={**prepared.summary, **payloads.summary},
        digest=payloads.digest or prepared.digest,
        traffic=(*prepared.traffic, *cost),
    )
