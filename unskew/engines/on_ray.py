"""Clients on a Ray cluster, for where one machine is too small; the numbers are those of every other engine.

Training a client is a stateless task, so a worker or a node that dies costs no more than its clients of this round: Ray
trains them again elsewhere, and they give the same bits. What all clients of a run need is put into the object store once a
run, what all clients of a round receive once a round; only what is a client's own travels with its task. Tensors travel as
NumPy arrays, which workers of a node read from the store without a copy of their own.

Moritz et al. 2018, "Ray: A Distributed Framework for Emerging AI Applications", arXiv:1712.05889.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from unskew import __version__
from unskew.engines.base import Setup
from unskew.engines.inputs import as_dict, from_dict
from unskew.engines.local import LocalTrainer
from unskew.engines.machine import cores, keep_freed_memory
from unskew.engines.ray_messages import apart, as_array, as_tensor, together
from unskew.errors import ConfigError, EngineError, UnskewError
from unskew.protocol.messages import Broadcast, Update

TOKEN = Path.home() / ".ray" / "auth_token"
AHEAD = 2
"""Tasks in flight for each worker: one that it does, and the next."""


@dataclass(frozen=True)
class OnCluster:
    """Where the cluster is, and what a client may use of it.

    Attributes:
        address: ``local`` starts one on this machine that ends with this process; ``auto`` is one that runs here already;
            else ``HOST:PORT`` of its head.
        cpus_per_worker: Cores, and threads, of a task.
        gpus_per_worker: Accelerators of a task.
        retries: How often a client is trained again after its worker or its node died.
        deadline: Seconds without any answer after which the run ends; None waits on.
    """

    address: str = "local"
    cpus_per_worker: int = 1
    gpus_per_worker: float = 0.0
    retries: int = 5
    deadline: float | None = None


class RayEngine:
    """Trains the clients of a cohort as tasks of a cluster.

    Args:
        setup: The run.
        workers: Tasks at a time; by default as many as the cluster has cores for.
        where: The cluster.

    Raises:
        EngineError: There is no such cluster, it has no room for a single task, another version of unskew, or the run cannot
            be sent there.
    """

    name = "ray"

    def __init__(self, setup: Setup, workers: int | None = None, where: OnCluster | None = None):
        self.setup, self.where, self.ray = setup, where or OnCluster(), load_ray()
        ray = self.ray
        connect(self.where.address, workers)
        self.most = workers
        self.places()
        self.task = ray.remote(_train).options(
            num_cpus=self.where.cpus_per_worker,
            num_gpus=self.where.gpus_per_worker,
            max_retries=self.where.retries,
            retry_exceptions=False,
        )
        self.run = f"{os.getpid()}-{uuid4().hex}"
        federation = setup.federation
        light = replace(federation, test=(federation.test[0][:1], federation.test[1][:1]), server=None)
        try:
            self.everything = ray.put(replace(setup, federation=light, tell=warnings.warn))
        except Exception as error:
            raise EngineError(
                f"This run cannot be sent to the cluster, as a part of it cannot be pickled: {error}. Give data and rules "
                "that need no open file or lock, or take another engine."
            ) from error
        self._check_versions()

    def places(self) -> int:
        """Tasks at a time; it grows and shrinks with the cluster.

        Raises:
            EngineError: There is no room for a single one.
        """
        room = self.ray.cluster_resources()
        places = int(room.get("CPU", 0) // self.where.cpus_per_worker)
        if self.where.gpus_per_worker:
            places = min(places, int(room.get("GPU", 0) / self.where.gpus_per_worker))
        if places < 1:
            asked = f"{self.where.cpus_per_worker} cores and {self.where.gpus_per_worker:g} accelerators"
            raise EngineError(
                f"The cluster has {room.get('CPU', 0):g} cores and {room.get('GPU', 0):g} accelerators, too few for one "
                f"worker of {asked}: start more nodes, or ask for less."
            )
        return min(self.most or places, places)

    def _check_versions(self) -> None:
        there = self._wait([self.ray.remote(_versions).options(num_cpus=0).remote()])
        mine = _versions()
        theirs = self.ray.get(there[0])
        if theirs != mine:
            raise EngineError(
                f"The cluster has {_told(theirs)}, this machine {_told(mine)}: numbers would not be comparable. "
                "Install the same."
            )

    def train(self, casts: Sequence[Broadcast]) -> Iterator[Update]:
        """See ``unskew.engines.base.Engine``."""
        clients, steps = self.setup.federation.clients, self.setup.training.steps
        counts = [steps(clients[cast.client].examples, cast.client) for cast in casts]
        waiting = deque(sorted(range(len(casts)), key=lambda place: -counts[place]))
        shared, packed = apart([as_dict(cast) for cast in casts])
        common = self.ray.put(shared) if casts else None
        flying: dict[Any, int] = {}
        ahead = AHEAD * self.places()
        done: dict[int, Update] = {}
        for place in range(len(casts)):
            while place not in done:
                while waiting and len(flying) < ahead:
                    number = waiting.popleft()
                    # In lists: Ray resolves arguments that are references themselves for every single task.
                    flying[self.task.remote(self.run, [self.everything], [common], packed[number])] = number
                for ready in self._wait(list(flying)):
                    done[flying.pop(ready)] = self._receive(ready)
            yield done.pop(place)

    def _wait(self, flying: list[Any]) -> list[Any]:
        """Those of the tasks that have ended; the user is told if there is none for too long."""
        began = time.monotonic()
        while True:
            limit = self.setup.patience
            if self.where.deadline is not None:
                limit = max(0.0, min(limit, began + self.where.deadline - time.monotonic()))
            ready, _ = self.ray.wait(flying, num_returns=len(flying), timeout=0)
            if not ready:
                ready, _ = self.ray.wait(flying, num_returns=1, timeout=limit)
            if ready:
                return list(ready)
            waited = time.monotonic() - began
            free = self.ray.available_resources().get("CPU", 0)
            text = (
                f"No worker of the cluster has answered for {waited:.0f} s; "
                f"it has {len(self.ray.nodes())} nodes and {free:g} free cores."
            )
            if self.where.deadline is not None and waited >= self.where.deadline:
                raise EngineError(f"{text} That is ray.deadline; the run can be resumed, here or on another cluster.")
            self.setup.tell(f"{text} It goes on waiting; the run can be stopped and resumed elsewhere.")

    def _receive(self, ready: Any) -> Update:
        try:
            ok, answer = self.ray.get(ready)
        except self.ray.exceptions.RayError as error:
            raise EngineError(
                f"A client could not be trained on the cluster, also not in {self.where.retries + 1} attempts: "
                f"{str(error).splitlines()[0]} The run can be resumed, here or on another cluster."
            ) from error
        if not ok:
            raise answer
        update: Update = from_dict(Update, answer)
        return update

    def close(self) -> None:
        """Forget the run. The cluster goes on: it is not ours, or serves the next run of this process."""
        self.everything = None


def load_ray() -> Any:
    """The package; clusters ask for a token by default, and a process that has one shows it if told so before this.

    Raises:
        ConfigError: It is not installed.
    """
    if TOKEN.exists() or {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(os.environ):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        import ray
    except ImportError as error:
        raise ConfigError("engine=ray needs Ray: pip install 'unskew[ray]'.") from error
    return ray


def connect(address: str, workers: int | None) -> None:
    """Connect this process to a cluster, unless it is connected already; tensors travel as NumPy arrays from then on."""
    ray = load_ray()
    if not ray.is_initialized():
        options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
        if address == "local":
            options |= {"num_cpus": workers or cores(), "include_dashboard": False}
        host = address.rpartition(":")[0]
        if _is_loopback(host):
            options["_node_ip_address"] = host  # nodes of one machine, each with its address
        if address not in ("local", "auto"):
            check_reachable(address)
        try:
            ray.init(address=address, **options)
        except (ConnectionError, RuntimeError, ValueError, AssertionError, ray.exceptions.RayError) as error:
            raise EngineError(
                f"There is no Ray cluster at {address!r} that lets this process in: {str(error).splitlines()[0]} Start one "
                f"with ray start --head, give this machine the cluster's token ({TOKEN} or RAY_AUTH_TOKEN), or take "
                "ray.address=local."
            ) from error
    ray.util.register_serializer(Tensor, serializer=as_array, deserializer=as_tensor)


def check_reachable(address: str) -> None:
    """Refuse an address where nothing listens: Ray would end this whole process a minute after it failed to connect.

    Raises:
        EngineError: Nothing answers there.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise EngineError(
            f"There is no Ray cluster at {address!r}: {error}. Start one with ray start --head, or take ray.address=local."
        ) from error


def _is_loopback(host: str) -> bool:
    """Whether this is an address of a machine to itself, but for the usual one."""
    try:
        return ip_address(host).is_loopback and host != "127.0.0.1"
    except ValueError:
        return False


# ---- in the workers ---------------------------------------------------------------------------------------------------

_trainers: dict[str, LocalTrainer] = {}
"""The trainer of the run that this worker serves; the one before it is forgotten."""


def _train(run: str, everything: list[Any], common: list[Any], packed: dict[str, Any]) -> tuple[bool, Any]:
    """One client's training, and its update or what went wrong."""
    import ray

    try:
        if run not in _trainers:
            _trainers.clear()
            resources: dict[str, float] = ray.get_runtime_context().get_assigned_resources()  # type: ignore[no-untyped-call]
            torch.set_num_threads(max(1, int(resources.get("CPU", 1))))
            keep_freed_memory()
            ray.util.register_serializer(Tensor, serializer=as_array, deserializer=as_tensor)
            _trainers[run] = LocalTrainer(ray.get(everything[0]))
        cast = from_dict(Broadcast, together(packed, ray.get(common[0])))
        return True, as_dict(_trainers[run].train(cast))
    except UnskewError as error:
        return False, error
    except Exception:  # a bug in a rule must reach the user
        return False, EngineError(f"Training failed in a worker:\n{traceback.format_exc()}")


def _versions() -> dict[str, str]:
    return {"unskew": __version__, "torch": torch.__version__}


def _told(versions: dict[str, str]) -> str:
    return " and ".join(f"{name} {version}" for name, version in versions.items())
