"""Custom partitions: a user's function, or a partitioner of ``flwr_datasets``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator

from unskew.errors import ConfigError, DataError, explain_missing


class CustomPartition(NamedTuple):
    """Client of each sample (-1: no client), number of clients, and name of the function or partitioner."""

    owner: np.ndarray
    clients: int
    name: str


def call_partition_function(
    function: Callable[..., Sequence[np.ndarray]], labels: np.ndarray, clients: int | None, rng: Generator
) -> CustomPartition:
    """Call a user's partition function and validate that it uses every sample exactly once.

    Args:
        function: Function ``(labels, clients, rng)`` that returns the sample ids of each client.
        labels: Label of each sample, ``[n]``.
        clients: Number of clients; must not be None.
        rng: Random number generator.

    Raises:
        ConfigError: If the number of clients is missing, or the function does not take these arguments.
        DataError: If the returned value is not a valid partition.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if clients is None:
        raise ConfigError(f"The partition function {name} requires the number of clients.")
    try:
        returned: Any = function(labels, clients, rng)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # the error is inside the function, not in its signature
        raise ConfigError(f"The partition {name} cannot be called with (labels, clients, rng): {error}.") from error
    if not isinstance(returned, Iterable) or isinstance(returned, str | Mapping):
        raise DataError(
            f"The partition {name} must return a list with the sample ids of each client, not "
            f"{type(returned).__name__}."
        )
    try:
        parts = [np.asarray(part).reshape(-1) for part in returned]
    except ValueError as error:
        raise DataError(f"The partition {name} must return a flat list of sample ids per client ({error}).") from error
    owner = owners_from_ids(parts, len(labels), clients, name)
    if (owner < 0).any():
        out = int((owner < 0).sum())
        raise DataError(f"The partition {name} omits {out} of {len(owner)} samples. Each sample must have one client.")
    return CustomPartition(owner, clients, name)


def call_flower_partitioner(
    partitioner: Any, labels: np.ndarray, clients: int | None, columns: Mapping[str, np.ndarray]
) -> CustomPartition:
    """Partition samples with a partitioner of ``flwr_datasets``, which may omit samples.

    Args:
        partitioner: Partitioner of ``flwr_datasets``.
        labels: Label of each sample, ``[n]``.
        clients: Number of clients; None means the partitioner's number of partitions.
        columns: Other columns of the data by name.
    """
    with explain_missing(
        "Partitioners of flwr_datasets require the package datasets: pip install 'unskew[hub]'.", DataError
    ):
        from datasets import Dataset
    name = type(partitioner).__name__
    partitioner = copy.deepcopy(partitioner)  # a partitioner's data set can be set only once
    by = getattr(partitioner, "_partition_by", None)
    label = by if isinstance(by, str) and by not in columns else "label"
    partitioner.dataset = Dataset.from_dict({**columns, label: labels, "__index": np.arange(len(labels))})
    own: int | None = getattr(partitioner, "num_partitions", None)
    count = clients if own is None else own
    if count is None:
        raise ConfigError(f"{name} has no num_partitions. Set the number of clients.")
    if clients is not None and clients != count:
        raise ConfigError(f"{name} makes {count} partitions, but clients={clients}. Make both numbers equal.")
    parts = [np.asarray(partitioner.load_partition(k)["__index"][:], dtype=np.int64) for k in range(count)]
    return CustomPartition(owners_from_ids(parts, len(labels), count, name), count, name)


def owners_from_ids(parts: Sequence[np.ndarray], n: int, clients: int, name: str) -> np.ndarray:
    """Convert the sample ids of each client to the client of each sample, ``[n]``; -1 for samples without a client.

    Args:
        parts: Sample ids of each client.
        n: Number of samples.
        clients: Number of clients.
        name: Name of the partition, for errors.

    Raises:
        DataError: If ids are not valid, a sample occurs twice, or the number of parts is not that of clients.
    """
    if len(parts) != clients:
        raise DataError(f"The partition {name} made {len(parts)} parts for {clients} clients.")
    filled = [part for part in parts if len(part)]  # an empty list has a float dtype; it is rejected later
    if not all(part.dtype.kind in "iu" and part.min() >= 0 and part.max() < n for part in filled):
        raise DataError(f"The partition {name} must return sample ids: integers from 0 to {n - 1}.")
    ids = np.concatenate([np.zeros(0, np.int64), *(part.astype(np.int64) for part in filled)])
    twice = np.flatnonzero(np.bincount(ids, minlength=n) > 1)
    if len(twice):
        raise DataError(f"The partition {name} assigns sample {int(twice[0])} more than once.")
    owner = np.full(n, -1, np.int64)
    owner[ids] = np.repeat(np.arange(clients), [len(part) for part in parts])
    return owner
