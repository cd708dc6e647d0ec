"""Ray engine: trains clients on a Ray cluster if one machine is too small, with the same results as other engines.

Training a client is a stateless task, so if a worker or a node dies, Ray trains only its clients of this round again
elsewhere, with bit-identical results. Data that all clients of a run need are put into the object store once per run,
and data for all clients of a round once per round. Only a client's own data are sent with its task. Tensors are sent as
NumPy arrays, which workers of a node read from the store without copying.
Moritz et al. 2018, "Ray: A Distributed Framework for Emerging AI Applications", arXiv:1712.05889.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from threading import Event, Thread
from typing import Any
from uuid import uuid4

from unskew.data.federation import Federation
from unskew.engines.base import EngineConfig
from unskew.engines.client_inputs import update_from_dict, update_to_dict
from unskew.engines.in_order import in_order
from unskew.engines.mmap_pickle import dumps_mmap
from unskew.engines.ray.cluster import ClusterConfig, connect, head_address, list_nodes, load_ray, watch_head
from unskew.engines.ray.messages import copy_record, extract_shared
from unskew.engines.ray.worker import DescribedClients, MappedClients, check_versions, train_group, versions
from unskew.engines.vmap_trainer import schedule_groups, steps_per_client
from unskew.errors import EngineError
from unskew.protocol.messages import Broadcast, Update

AHEAD = 2
"""Tasks in flight per worker: the current and the next one."""
HELD = 2 << 30
"""Approximate bytes of updates that may wait in the stores of the cluster for their turn."""
TURNS = 32
"""Rounds of all workers after which the next clients of a cohort are sorted, largest first."""
TASKS = 4
"""Minimum number of tasks per worker and round; with fewer, some workers would be idle at the end of the round."""
SMALL = 16 << 20
"""Bytes of updates that a task may return if it trains several clients one after another."""
ATTEMPTS = 3
"""Number of times that a client may fail for a reason other than a dead worker."""


@dataclass
class _TaskGroup:
    """Clients that are trained together.

    Attributes:
        positions: Indices of the clients in the cohort.
        failed: Number of failed attempts.
        answer: Reference to the updates, or to the error.
    """

    positions: list[int]
    failed: int = 0
    answer: Any = None


class RayEngine:
    """Trains the clients of a cohort as tasks of a cluster.

    Args:
        setup: Configuration of the engine.
        workers: Number of concurrent tasks; None for as many as the cluster has cores for.
        where: Address and resources of the cluster.
        clients_per_group: Number of clients that a task trains at once.

    Raises:
        EngineError: If there is no such cluster, it has no room for a task or another version of unskew, or the run
            cannot be sent to it.

    Attributes:
        name: Name of the engine.
    """

    name = "ray"

    def __init__(
        self,
        setup: EngineConfig,
        workers: int | None = None,
        where: ClusterConfig | None = None,
        clients_per_group: int = 1,
    ):
        self.setup, self.where, self.ray, self.clients_per_group = (
            setup,
            where or ClusterConfig(),
            load_ray(),
            clients_per_group,
        )
        ray = self.ray
        connect(self.where.address, workers)
        self.most, self.ended = workers, Event()
        if self.where.address != "local":
            Thread(target=watch_head, args=(head_address(ray), setup.warn, self.ended), daemon=True).start()
        self.num_workers()
        self.task = ray.remote(train_group).options(
            num_cpus=self.where.cpus_per_worker,
            num_gpus=self.where.gpus_per_worker,
            max_retries=self.where.retries,
            retry_exceptions=False,
            num_returns=2,
        )
        self.run = f"{os.getpid()}-{uuid4().hex}"
        try:
            sent = replace(setup.without_callbacks(), federation=self._sent())
            self.everything = self._put((sent, clients_per_group))
            self._check_versions()
        except EngineError:
            self.ended.set()
            raise
        except Exception as error:
            self.ended.set()
            raise EngineError(
                f"This run cannot be sent to the cluster, because a part of it cannot be pickled: {error}. Use data and "
                "rules without open files or locks, or another engine."
            ) from error

    def _sent(self) -> Federation:
        """Return the data for workers: the clients' data, or the location from which nodes open them."""
        federation = self.setup.federation
        source = getattr(federation.clients, "source", None)
        by_url = source is not None and any("://" in str(path) for path in (source[0].data, source[0].data_path))
        in_files = source is None and getattr(federation.clients, "mapped", False)
        if self.where.data == "nodes" and source is None and not in_files:
            raise EngineError(
                "ray.data=nodes lets nodes open the data from their path or URL, but these data were given in Python, "
                "changed by the method, or moved to another device. Use ray.data=store, or map them from files "
                '(np.load(..., mmap_mode="r")).'
            )
        if self.where.data == "nodes" and in_files:
            federation = replace(
                federation, clients=MappedClients(len(federation.clients), dumps_mmap(federation.clients))
            )
        elif source is not None and (self.where.data == "nodes" or (self.where.data == "auto" and by_url)):
            federation = replace(federation, clients=DescribedClients(len(federation.clients), source[0], source[1]))
        return replace(federation, test=(federation.test[0][:1], federation.test[1][:1]), server=None)

    def num_workers(self) -> int:
        """Number of concurrent tasks; it changes with the size of the cluster.

        Raises:
            EngineError: If no node has room for a task.
        """
        cores, gpus = self.where.cpus_per_worker, self.where.gpus_per_worker
        nodes = list_nodes(self.ray)
        slots = sum(int(min(c // cores, g / gpus if gpus else c)) for c, g in nodes)
        if slots < 1:
            largest = ", ".join(f"{c} cores and {g:g} accelerators" for c, g in sorted(set(nodes), reverse=True)[:3])
            raise EngineError(
                f"No node of the cluster has room for a worker of {cores} cores and {gpus:g} accelerators. The nodes have "
                f"{largest or 'nothing'}. Start other nodes, or set smaller ray.cpus_per_worker or ray.gpus_per_worker."
            )
        return min(self.most or slots, slots)

    def _check_versions(self) -> None:
        there = self._wait([self.ray.remote(versions).options(num_cpus=0).remote()])
        check_versions(self.ray.get(there[0]))

    def train(self, broadcasts: Sequence[Broadcast]) -> Iterator[Update]:
        """Train a cohort and yield its updates in order.

        Updates stay on the nodes that computed them until their turn, and only few are computed ahead, so the memory of
        this process does not depend on the size of the cohort.
        """
        self.setup.retried(0)
        if not broadcasts:
            return
        shared, packed = extract_shared([update_to_dict(broadcast) for broadcast in broadcasts])
        common = self._put(shared)
        window = self._window()
        waiting = deque(self._parts(broadcasts, window))
        flying: dict[Any, _TaskGroup] = {}
        fetched: dict[int, Update] = {}
        begun, ahead = 0, AHEAD * self.num_workers()

        def begin(part: _TaskGroup) -> None:
            # In lists, because Ray resolves references that are arguments themselves for every single task.
            own = [packed[index] for index in part.positions]
            ok, part.answer = self.task.remote(self.run, [self.everything], [common], own)
            flying[ok] = part

        def receive(needed: int) -> Iterator[tuple[int, _TaskGroup]]:
            nonlocal begun
            while waiting and len(flying) < ahead and begun - needed < 2 * window:
                begun += len(waiting[0].positions)
                begin(waiting.popleft())
            for ready in self._wait(list(flying)):
                part = flying.pop(ready)
                if self._succeeded(ready, part):
                    yield from zip(part.positions, repeat(part))
                else:
                    begin(part)

        for index, part in enumerate(in_order(len(broadcasts), receive)):
            if index not in fetched:
                fetched.update(zip(part.positions, self._receive(part), strict=True))
            yield fetched.pop(index)

    def _window(self) -> int:
        """Return the number of clients of a cohort that are scheduled together, largest first."""
        spec = self.setup.spec
        fewest = AHEAD * self.num_workers() * self.clients_per_group
        return max(fewest, min(TURNS * fewest, HELD // max(1, spec.largest_size * spec.dtype.itemsize)))

    def _of_a_task(self, cohort: int) -> int:
        """Return the number of clients per task: one network, or several small ones to reduce the overhead of tasks."""
        if self.clients_per_group > 1:
            return self.clients_per_group
        spec = self.setup.spec
        room = min(SMALL, HELD) // max(1, spec.largest_size * spec.dtype.itemsize)
        return max(1, min(cohort // (TASKS * self.num_workers()), room))

    def _parts(self, broadcasts: Sequence[Broadcast], window: int) -> list[_TaskGroup]:
        """Return the groups of a cohort in the order in which they are started."""
        steps, most = steps_per_client(self.setup, broadcasts), self._of_a_task(len(broadcasts))
        return [
            _TaskGroup([start + index for index in part])
            for start in range(0, len(broadcasts), window)
            for part in schedule_groups(broadcasts[start : start + window], steps[start : start + window], most)
        ]

    def _wait(self, flying: list[Any]) -> list[Any]:
        """Wait for tasks and return those that ended; warn if none ends for too long."""
        began = time.monotonic()
        while True:
            limit = self.setup.stall_warning_seconds
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
                f"No worker of the cluster has replied for {waited:.0f} s; "
                f"it has {len(self.ray.nodes())} nodes and {free:g} free cores."
            )
            if self.where.deadline is not None and waited >= self.where.deadline:
                raise EngineError(
                    f"{text} The limit is ray.deadline. The run can be resumed, here or on another cluster."
                )
            self.setup.warn(f"{text} The run keeps waiting; it can be stopped and resumed elsewhere.")

    def _succeeded(self, ready: Any, part: _TaskGroup) -> bool:
        """Return whether a task succeeded; a task that fails repeatedly raises its own error."""
        if self._get(ready):
            return True
        part.failed += 1
        if part.failed == ATTEMPTS:
            raise self._get(part.answer)
        return False

    def _receive(self, part: _TaskGroup) -> list[Update]:
        """Return the updates of a group as copies, so that they can be removed from the store."""
        self._wait([part.answer])
        updates, lost = self._get(part.answer)
        self.setup.retried(lost * len(part.positions))
        return [update_from_dict(Update, copy_record(update, self.setup.device)) for update in updates]

    def _put(self, value: Any) -> Any:
        """Put a value into the object store, which spills to disk if it is full."""
        try:
            return self.ray.put(value)
        except self.ray.exceptions.RayError as error:
            raise EngineError(
                f"The cluster's object store cannot store the clients' data: {type(error).__name__}, "
                f"{str(error).splitlines()[0]} Free disk space of this node, start it with a larger --object-store-memory, "
                "or let nodes open the data (ray.data=nodes)."
            ) from error

    def _get(self, reference: Any) -> Any:
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            raise EngineError(
                f"A client could not be trained on the cluster in {self.where.retries + 1} attempts: "
                f"{str(error).splitlines()[0]} The run can be resumed, here or on another cluster."
            ) from error

    def close(self) -> None:
        """Release the run's data. The cluster keeps running, for other users or for the next run of this process."""
        self.ended.set()
        self.everything = None


def create_engine(
    setup: EngineConfig, workers: int | None, clients_per_group: int, options: Mapping[str, Any]
) -> RayEngine:
    """Create the engine ``ray``; the entry point of the group ``unskew.engines``.

    Args:
        setup: Configuration of the engine.
        workers: Number of concurrent tasks; None for one per core of the cluster.
        clients_per_group: Number of clients that a task trains at once.
        options: Fields of ``ClusterConfig``.

    Raises:
        EngineError: If there is no such cluster, or it has no room for a task.
    """
    return RayEngine(setup, workers, ClusterConfig(**options), clients_per_group)
