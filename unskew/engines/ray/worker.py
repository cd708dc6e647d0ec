"""Worker of a Ray cluster: trains clients on data that were sent or that the node opens itself."""

from __future__ import annotations

import math
import os
import pickle
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unskew.data.federation import ClientData, Federation
from unskew.data.load import federation_of
from unskew.data.spec import DataSpec
from unskew.engines.base import EngineConfig
from unskew.engines.client_inputs import update_from_dict, update_to_dict
from unskew.engines.cpu import keep_freed_memory
from unskew.engines.device import device_modes
from unskew.engines.local_trainer import LocalTrainer
from unskew.engines.mmap_pickle import dump_mmap, load_mmap
from unskew.engines.ray.messages import as_array, as_tensor, restore_shared
from unskew.engines.ray.private_api import previous_attempts
from unskew.engines.vmap_trainer import GroupTrainer
from unskew.errors import DataError, EngineError, UnskewError
from unskew.filesystem import private_folder
from unskew.folder_locks import file_lock
from unskew.protocol.client_state_files import load_client_state, store_client_state
from unskew.protocol.messages import Broadcast
from unskew.version import __version__

KEPT = 24 * 3600
"""Seconds after which a node removes the data of a run that ended without notice."""


@dataclass(frozen=True)
class RemoteClients(Sequence[ClientData]):
    """Clients whose data a node opens itself.

    Attributes:
        total: Number of clients.
    """

    total: int

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, k: Any) -> ClientData:  # type: ignore[override]
        raise IndexError(f"Client {k} is not here: its data are opened on the node that trains it.")


@dataclass(frozen=True)
class DescribedClients(RemoteClients):
    """Clients of data that are described by name.

    Attributes:
        spec: Data specification, which determines the partition together with the seed.
        seed: Seed of the run.
    """

    spec: DataSpec
    seed: int


@dataclass(frozen=True)
class MappedClients(RemoteClients):
    """Clients whose arrays are mapped from files.

    Attributes:
        packed: Pickled clients, with references to the files instead of arrays.
    """

    packed: bytes


_trainers: dict[str, GroupTrainer] = {}
"""Trainer of the run that this worker serves, by the name of the run; trainers of earlier runs are removed."""


def train_group(run: str, everything: list[Any], common: list[Any], packed: list[Any]) -> tuple[bool, Any]:
    """Train a group of clients.

    Args:
        run: Name of the run.
        everything: Reference to the engine configuration and the number of clients trained as one network.
        common: Reference to the tensors that all clients of the round receive.
        packed: Remaining broadcast of each client.

    Returns:
        Whether training succeeded, and either the error or the updates with the number of earlier attempts that died.
    """
    import ray

    try:
        if run not in _trainers:
            _begin(run, *ray.get(everything[0]))
        shared = ray.get(common[0])
        broadcasts = [load_client_state(update_from_dict(Broadcast, restore_shared(entry, shared))) for entry in packed]
        trainer = _trainers[run]
        with device_modes(trainer.setup.device, trainer.setup.training.precision):
            updates = trainer.train(broadcasts)
        return True, (
            [update_to_dict(store_client_state(*entry)) for entry in zip(broadcasts, updates, strict=True)],
            previous_attempts(ray),
        )
    except UnskewError as error:
        return False, error
    except Exception:  # report bugs in rules to the user
        return False, EngineError(f"Training failed in a worker:\n{traceback.format_exc()}")


def device_for(accelerators: float) -> torch.device:
    """Return the device of a task: the accelerator assigned by Ray, independent of the server's devices.

    Args:
        accelerators: Number of accelerators of the task, possibly fractional; 0 for none.

    Raises:
        EngineError: If PyTorch cannot use the accelerator.
    """
    if accelerators <= 0:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise EngineError(
            f"Ray assigned a worker of {os.uname().nodename} an accelerator that its PyTorch {torch.__version__} cannot use. "
            "Install a build for it, or remove ray.gpus_per_worker."
        )
    return torch.device("cuda")


def _begin(run: str, setup: EngineConfig, at_once: int) -> None:
    import ray

    for other in _trainers:
        _place(other).unlink(missing_ok=True)  # processes that have mapped the file keep it
    _trainers.clear()
    resources: dict[str, float] = ray.get_runtime_context().get_assigned_resources()  # type: ignore[no-untyped-call]
    torch.set_num_threads(max(1, int(resources.get("CPU", 1))))
    keep_freed_memory()
    ray.util.register_serializer(Tensor, serializer=as_array, deserializer=as_tensor)
    setup = replace(setup, device=device_for(resources.get("GPU", 0.0)))
    if isinstance(setup.federation.clients, DescribedClients):
        setup = replace(setup, federation=_opened(run, setup.federation, setup.federation.clients))
    elif isinstance(setup.federation.clients, MappedClients):
        clients = pickle.loads(setup.federation.clients.packed)  # nosec B301
        setup = replace(setup, federation=replace(setup.federation, clients=clients))
    on_cpu = setup.device.type == "cpu"
    if not on_cpu:
        setup = replace(setup, federation=setup.federation.to(setup.device))
    setup = replace(setup, spec=setup.spec.to(setup.device))
    form = setup.group_form() if at_once > 1 and on_cpu else None
    _trainers[run] = GroupTrainer(setup, LocalTrainer(setup), form)


def _opened(run: str, federation: Federation, described: DescribedClients) -> Federation:
    """Return the federation with its clients: the first worker of a node loads them, other workers map its file."""
    opened = _place(run)
    with file_lock(opened.with_suffix(".lock"), math.inf):
        for old in opened.parent.glob("*.data"):
            if time.time() - old.stat().st_mtime > KEPT:
                old.unlink(missing_ok=True)
        if not opened.exists():
            there = federation_of(described.spec, described.seed)
            opened.with_suffix(".new").unlink(missing_ok=True)
            dump_mmap((there.clients, there.fingerprint), opened.with_suffix(".new"))
            os.replace(opened.with_suffix(".new"), opened)
        clients, fingerprint = load_mmap(opened)
    if fingerprint != federation.fingerprint:
        raise DataError(
            f"The data that {os.uname().nodename} opens differ from the server's (partition {fingerprint} instead of "
            f"{federation.fingerprint}). Use the same files on all nodes, or ray.data=store."
        )
    return replace(federation, clients=clients)


def _place(run: str) -> Path:
    return private_folder() / f"{run}.data"


def versions() -> dict[str, str]:
    """Return the versions that must match on all nodes."""
    return {"unskew": __version__, "torch": torch.__version__}


def check_versions(cluster_versions: dict[str, str]) -> None:
    """Validate that the cluster has the versions of this machine (raises ``EngineError`` otherwise)."""
    installed = versions()
    if cluster_versions != installed:
        there, here = (
            " and ".join(f"{name} {version}" for name, version in of.items()) for of in (cluster_versions, installed)
        )
        raise EngineError(
            f"The cluster has {there}, this machine has {here}, so results would differ. Install the same versions."
        )
