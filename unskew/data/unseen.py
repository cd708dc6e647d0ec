"""Unseen clients, which take no part in a run and are evaluated after it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from unskew.data.clients import ArrayClients, ClientData, DrawnClients, concatenate_inputs
from unskew.data.federation import Federation
from unskew.data.harmonized_source import harmonized
from unskew.data.packing import unpack_rows
from unskew.data.partitioned import PartitionedSource
from unskew.data.spec import Unseen
from unskew.errors import ConfigError, unknown_name
from unskew.seeding import numpy_generator

GROUPS_UNKNOWN = (
    "Unseen clients are evaluated on their held-out samples only, because a federation that is passed does not say which of "
    "its samples have the same {group}. To evaluate them on all samples of new groups, set data instead of passing one."
)


def unseen_mask(unseen: Unseen, names: Sequence[str], clients: int, seed: int) -> np.ndarray:
    """Return a mask of the unseen clients, ``[K]``, chosen by name or drawn by the seed.

    Args:
        unseen: Share of unseen clients, or their names.
        names: Names of the clients; if empty, their numbers are their names.
        clients: Number ``K`` of clients.
        seed: Seed of the run.

    Raises:
        ConfigError: If a client does not exist, no client is unseen, or fewer than two clients train.
    """
    mask = np.zeros(clients, bool)
    if not isinstance(unseen, float):
        known = list(names or map(str, range(clients)))
        for name in unseen:
            if name not in known:
                raise ConfigError(f"unseen: {unknown_name('client', name, known)}")
            mask[known.index(name)] = True
        if clients - mask.sum() < 2:
            raise ConfigError(
                f"Without {', '.join(unseen)}, {clients - mask.sum()} clients train, but at least two must."
            )
        return mask
    count = round(unseen * clients)
    if not 1 <= count <= clients - 2:
        what, remedy = ("no client unseen", "larger") if count < 1 else ("fewer than two clients to train", "smaller")
        raise ConfigError(
            f"unseen={unseen:g} of {clients} clients leaves {what}. Use a {remedy} share or more clients."
        )
    mask[numpy_generator(seed, "unseen clients").choice(clients, count, replace=False)] = True
    return mask


def split_partitioned(drawn: PartitionedSource, unseen: Unseen) -> Federation:
    """Build the federation of the training clients of a partition, with the other clients as its unseen clients.

    All statistics come from the training clients.

    Args:
        drawn: Partitioned samples.
        unseen: Share of unseen clients, or their names.
    """
    mask = unseen_mask(unseen, drawn.parts.names, drawn.parts.clients, drawn.seed)
    drawn = harmonized(drawn, drawn.only(np.flatnonzero(~mask)))
    training = drawn.only(np.flatnonzero(~mask))
    known = training.known()
    unseen_source = drawn.only(np.flatnonzero(mask))
    others = unseen_source.federation(known)
    complete = unseen_source.held_out(training).federation(known).clients
    return replace(
        training.federation(known), unseen=others.clients, unseen_complete=complete, unseen_names=others.client_names
    )


def split_federation(federation: Federation, unseen: Unseen, seed: int) -> Federation:
    """Split a federation that was passed as an object; its normalization does not change.

    Args:
        federation: Data of all clients.
        unseen: Share of unseen clients, or their names.
        seed: Seed of the run.

    Raises:
        ConfigError: If the clients cannot be chosen, or the clients are not stored in arrays.
    """
    clients, names = federation.clients, federation.client_names
    if not isinstance(clients, ArrayClients):
        raise ConfigError("unseen requires clients that are stored in arrays. Build the federation with from_arrays.")
    mask = unseen_mask(unseen, names, len(clients), seed)
    sides = [np.flatnonzero(~mask), np.flatnonzero(mask)]
    traffic, missing = federation.stats_traffic, federation.missing
    groups = federation.text_groups
    others = select_clients(clients, sides[1])
    texts = federation.warnings
    if federation.split_group is not None:
        texts = (*texts, GROUPS_UNKNOWN.format(group=federation.split_group))
        warnings.warn(texts[-1], stacklevel=3)
    return replace(
        federation,
        clients=select_clients(clients, sides[0]),
        unseen=others,
        unseen_complete=AllSamples(others) if federation.split_group is None else (),
        client_names=tuple(names[k] for k in sides[0]) if names else (),
        unseen_names=tuple(names[k] for k in sides[1]) if names else (),
        stats_traffic=None if traffic is None else traffic[sides[0]],
        missing=None if missing is None else missing[sides[0]],
        text_groups=None if groups is None else (groups[0][sides[0]], groups[1]),
        warnings=texts,
    )


def select_clients(clients: ArrayClients, ids: np.ndarray) -> DrawnClients:
    """Return some of the clients, numbered from 0, without a copy of their inputs.

    Args:
        clients: All clients.
        ids: Clients to select, in order.
    """
    sizes = np.diff(clients.offsets)[ids]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    splits = offsets[:-1] + (clients.splits - clients.offsets[:-1])[ids]
    y = torch.cat([clients.y[clients.offsets[k] : clients.offsets[k + 1]] for k in ids])
    like = clients.like if isinstance(clients, DrawnClients) else clients.x[:1]
    return DrawnClients(SelectedRows(clients, ids), like, y, offsets, splits, clients.mapped)


@dataclass(frozen=True)
class SelectedRows:
    """Inputs of some clients.

    Attributes:
        clients: All clients.
        ids: Number of each selected client among them.
    """

    clients: ArrayClients
    ids: np.ndarray

    def __call__(self, k: int, start: int, stop: int) -> Tensor:
        """Return the inputs ``start:stop`` of the selected client ``k``.

        Args:
            k: Index of the client among the selected ones.
            start: First sample of the client to return.
            stop: End of the range, exclusive.
        """
        number = int(self.ids[k])
        if isinstance(self.clients, DrawnClients):
            return self.clients.rows(number, start, stop)
        first = int(self.clients.offsets[number])
        return self.clients.x[first + start : first + stop]

    def several(self, first: int, last: int) -> Tensor:
        """Return all inputs of the selected clients ``first:last``, client by client.

        Args:
            first: First client.
            last: End of the range, exclusive.
        """
        sizes = np.diff(self.clients.offsets)[self.ids[first:last]].tolist()
        return concatenate_inputs([self(first + i, 0, size) for i, size in enumerate(sizes)])


class AllClients(Sequence[ClientData]):
    """Training clients, followed by the unseen clients.

    Args:
        federation: Training clients with unseen clients.
    """

    def __init__(self, federation: Federation):
        self.federation = federation

    def __len__(self) -> int:
        return len(self.federation.clients) + len(self.federation.unseen)

    def __getitem__(self, k: int) -> ClientData:  # type: ignore[override]
        known = len(self.federation.clients)
        return self.federation.clients[k] if k < known else replace(self.federation.unseen[k - known], id=k)


class AllSamples(Sequence[ClientData]):
    """Clients whose evaluation uses all of their samples, because they train on none.

    Args:
        clients: Clients with training and held-out samples.
    """

    def __init__(self, clients: Sequence[ClientData]):
        self.clients = clients

    def __len__(self) -> int:
        return len(self.clients)

    def __getitem__(self, k: int) -> ClientData:  # type: ignore[override]
        c = self.clients[k]
        x, y = unpack_rows(c.x, c.y) if c.x.dtype == torch.int64 else (c.x, c.y)  # packed texts are for training
        x, y = torch.cat([x, c.x_test]), torch.cat([y, c.y_test])
        return ClientData(c.id, x[:0], y[:0], x, y)
