"""Partitions that others make: a user's function, or a partitioner of ``flwr_datasets``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator

from unskew.errors import ConfigError, DataError


class CustomPartition(NamedTuple):
    """The owner of each sample (-1: nobody), the number of clients and the name of what made them."""

    owner: np.ndarray
    clients: int
    name: str


def call_partition_function(
    function: Callable[..., Sequence[np.ndarray]], labels: np.ndarray, clients: int | None, rng: Generator
) -> CustomPartition:
    """Call a user's partition function and check that it uses every sample exactly once.

    Args:
        function: Function of labels, clients and a random number generator.
        labels: Label of each sample, ``[n]``.
        clients: Number of clients; None: as many as the function returns.
        rng: Random number generator.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if clients is None:
        raise ConfigError(f"The partition function {name} needs the number of clients.")
    try:
        returned: Any = function(labels, clients, rng)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # it is an error within the function
        raise ConfigError(f"The partition {name} cannot be called with (labels, clients, rng): {error}.") from error
    if not isinstance(returned, Iterable) or isinstance(returned, str | Mapping):
        raise DataError(
            f"The partition {name} must return a list with the sample ids of each client, not {type(returned).__name__}."
        )
    try:
        parts = [np.asarray(part).reshape(-1) for part in returned]
    except ValueError as error:
        raise DataError(f"The partition {name} must give each client a flat list of sample ids ({error}).") from error
    owner = owners_from_ids(parts, len(labels), clients, name)
    if (owner < 0).any():
        out = int((owner < 0).sum())
        raise DataError(f"The partition {name} leaves out {out} of {len(owner)} samples; each must have one client.")
    return CustomPartition(owner, clients, name)


def call_flower_partitioner(
    partitioner: Any, labels: np.ndarray, clients: int | None, columns: Mapping[str, np.ndarray]
) -> CustomPartition:
    """Let a partitioner of ``flwr_datasets`` divide the labels (it may leave samples out).

    Args:
        partitioner: Partitioner of ``flwr_datasets``.
        labels: Label of each sample, ``[n]``.
        clients: Number of clients; None: as many as the partitioner has.
        columns: Further columns of the data by name.
    """
    try:
        from datasets import Dataset
    except ImportError as error:
        raise DataError(
            "Partitioners of flwr_datasets need the package datasets: pip install 'unskew[hub]'."
        ) from error
    name = type(partitioner).__name__
    partitioner = copy.deepcopy(partitioner)  # its data set may be set only once; the caller's stays fresh
    by = getattr(partitioner, "_partition_by", None)
    label = by if isinstance(by, str) and by not in columns else "label"
    partitioner.dataset = Dataset.from_dict({**columns, label: labels, "__index": np.arange(len(labels))})
    own: int | None = getattr(partitioner, "num_partitions", None)
    count = clients if own is None else own
    if count is None:
        raise ConfigError(f"{name} does not say how many partitions it makes; give the number of clients.")
    if clients is not None and clients != count:
        raise ConfigError(f"{name} makes {count} partitions, but {clients} clients are asked for; make both equal.")
    parts = [np.asarray(partitioner.load_partition(k)["__index"][:], dtype=np.int64) for k in range(count)]
    return CustomPartition(owners_from_ids(parts, len(labels), count, name), count, name)


def owners_from_ids(parts: Sequence[np.ndarray], n: int, clients: int, name: str) -> np.ndarray:
    """The owner of each sample from each client's ids; refused when a sample has two owners.

    Args:
        parts: Sample numbers of each client.
        n: Number of samples.
        clients: Number of clients.
        name: Name of the partition, for errors.
    """
    if len(parts) != clients:
        raise DataError(f"The partition {name} made {len(parts)} parts for {clients} clients.")
    filled = [part for part in parts if len(part)]  # an empty list has no integer type; it is refused later
    if not all(part.dtype.kind in "iu" and part.min() >= 0 and part.max() < n for part in filled):
        raise DataError(f"The partition {name} must give sample ids: integers from 0 to {n - 1}.")
    ids = np.concatenate([np.zeros(0, np.int64), *(part.astype(np.int64) for part in filled)])
    twice = np.flatnonzero(np.bincount(ids, minlength=n) > 1)
    if len(twice):
        raise DataError(f"The partition {name} gives sample {int(twice[0])} to more than one client, or twice to one.")
    owner = np.full(n, -1, np.int64)
    owner[ids] = np.repeat(np.arange(clients), [len(part) for part in parts])
    return owner
