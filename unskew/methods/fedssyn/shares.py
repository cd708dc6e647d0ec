"""Synthetic images dealt out to the clients of a federation, or gathered in one place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from unskew.data.federation import ArrayClients, Federation, cat_inputs, take
from unskew.errors import ConfigError
from unskew.generators.synthetic_set import SyntheticSet


def mean_size(federation: Federation) -> int:
    """Samples per client, held-out ones included: the paper's 50000/N."""
    clients = federation.clients
    total = len(clients.y) if isinstance(clients, ArrayClients) else sum(len(c.y) + len(c.y_test) for c in clients)
    return max(1, total // len(clients))


def check_fits(made: SyntheticSet, federation: Federation) -> None:
    """Refuse a given set that was made for other data.

    Raises:
        ConfigError: Classes, shape or clients differ.
    """
    about = made.about
    here = {"classes": federation.classes, "shape": list(federation.shape), "clients": len(federation.clients)}
    for name, value in here.items():
        if about.get(name) != value:
            raise ConfigError(f"The synthetic set has {name} {about.get(name)}, but the data here {value}.")


def with_shares(federation: Federation, made: SyntheticSet, order: Tensor, counts: np.ndarray) -> Federation:
    """Every client with its part of ``made[order]``, between what it trains on and what it holds out."""
    edges = np.concatenate([[0], np.cumsum(counts)])
    xs, ys, offsets, splits = [], [], [0], []
    for k, client in enumerate(federation.clients):
        part = order[edges[k] : edges[k + 1]]
        xs += [client.x, take(made.x, part), client.x_test]
        ys += [client.y, made.y[part], client.y_test]
        splits.append(offsets[-1] + client.examples + len(part))
        offsets.append(splits[-1] + len(client.y_test))
    clients = ArrayClients(cat_inputs(xs), torch.cat(ys), np.array(offsets), np.array(splits))
    return replace(federation, clients=clients, made=made.digest, real_sizes=federation.sizes)


def one_client(federation: Federation, made: SyntheticSet | None) -> Federation:
    """A single client with all real, or all synthetic, samples."""
    if made is None:
        x, y = cat_inputs([c.x for c in federation.clients]), torch.cat([c.y for c in federation.clients])
    else:
        x, y = made.x, made.y
    clients = ArrayClients(x, y, np.array([0, len(y)]), np.array([len(y)]))
    return replace(federation, clients=clients, made="" if made is None else made.digest)
