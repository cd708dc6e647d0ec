"""Parallel execution of independent runs, each in its own process with its share of the cores, here or on a cluster.

Callbacks are called in the parent process. The results are the same as without parallel runs. At the first Ctrl-C, all
runs finish their round and save it.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unskew.config.experiment import Experiment
from unskew.config.sections import ADDRESS
from unskew.engines.cpu import check_may_start_processes, default_torch_modes, may_start_processes, num_cores
from unskew.engines.device import DeviceMemory, device_modes
from unskew.engines.mmap_pickle import dump_mmap
from unskew.engines.registry import pick_device
from unskew.engines.run_threads import run_together
from unskew.engines.stacked import JointTraining
from unskew.errors import ConfigError, short_repr
from unskew.runs.process_pool import Job, ProcessPool, next_job, raise_if_unpicklable
from unskew.runs.ray_pool import RayJobPool
from unskew.simulation.round_loop import RunInterrupted, interruptible

RUN_MEMORY = 4 << 30
"""Bytes of a CUDA device that ``auto`` reserves for each run of a small model: its context, data and cohort."""
SMALL = 1_000_000
"""Number of model parameters up to which ``auto`` uses one core per run: small models gain little from more threads."""
MOST = 256
"""Maximum number of parallel runs."""
STACKED = "stacked"
MOST_STACKED = 8
"""Maximum number of runs that are trained together, which all are in memory."""
ON_CLUSTER = re.compile(rf"([0-9]{{1,3}}|auto)@{ADDRESS}")


class ParallelOn(int):
    """Number of parallel runs on a Ray cluster.

    Attributes:
        address: Address of the cluster.
        auto: Whether the number is only an upper limit, to be fitted to the cluster.
        small: Whether one core per run is enough.
        deadline: Seconds without a message from any run after which all runs are aborted; None waits indefinitely.
    """

    address: str
    auto: bool
    small: bool
    deadline: float | None


def check_parallel(parallel: object) -> None:
    """Validate a value of ``parallel`` (raises ``ConfigError`` if it is not valid)."""
    if parallel is None or parallel == STACKED:
        return
    number = isinstance(parallel, int) and not isinstance(parallel, bool) and 1 <= parallel <= MOST
    cluster_match = ON_CLUSTER.fullmatch(parallel) if isinstance(parallel, str) else None
    if cluster_match is not None:
        number = cluster_match[2] != "local" and (cluster_match[1] == "auto" or 1 <= int(cluster_match[1]) <= MOST)
    if not number and parallel != "auto":
        raise ConfigError(
            f"parallel={short_repr(parallel)} is not a number of parallel runs. Use 1 to {MOST}, auto or stacked, or, on "
            "a Ray cluster, 8@HOST:PORT or auto@auto."
        )


def read_parallel(text: str | None) -> int | str | None:
    """Parse ``parallel`` from the command line.

    Args:
        text: Number of runs, ``auto`` or ``stacked``; ``@`` and the address of a cluster may follow. None for the default.

    Raises:
        ConfigError: If the text is not a number, ``auto`` or ``stacked``, optionally with the address of a cluster.
    """
    parallel = int(text) if text is not None and text.isdecimal() and len(text) < 10 else text
    check_parallel(parallel)
    return parallel


def stacks_runs(parallel: int | str | None, configs: Sequence[Experiment]) -> bool:
    """Return whether runs that differ only in the seed are trained together.

    Args:
        parallel: ``stacked``; with None, runs are trained together on a GPU.
        configs: Configurations of the runs.

    Raises:
        ConfigError: If ``parallel`` is ``stacked`` and an engine is not ``vectorized``.
    """
    if parallel not in (None, STACKED):
        return False
    available = torch.cuda.is_available()
    possible = []
    on_cuda = True
    for config in configs:
        cuda = available and (config.device == "auto" or config.device.startswith("cuda"))
        on_cuda = on_cuda and cuda
        possible.append(config.engine == "vectorized" or (cuda and config.engine == "auto" and not config.ray.address))
    if parallel == STACKED and not all(possible):
        raise ConfigError("parallel=stacked trains several runs with the engine vectorized. Set engine=vectorized.")
    return all(possible) and (parallel == STACKED or on_cuda)


def num_parallel_runs(parallel: int | str | None, configs: Sequence[Experiment], size: int) -> int:
    """Return the number of parallel runs.

    Args:
        parallel: Requested number, ``auto`` or ``stacked``; on a cluster with ``@`` and its address. None for the default.
        configs: Configurations of the runs.
        size: Number of parameters of the largest model.

    Raises:
        ConfigError: If each run would start its own Ray cluster, or would compete with its clients for the same cores.
    """
    check_parallel(parallel)
    if isinstance(parallel, str) and "@" in parallel:
        if any(config.engine == "ray" or config.ray.address is not None for config in configs):
            raise ConfigError(
                f"With parallel={parallel}, each run is one task of the cluster and trains its clients on its own node. "
                "Remove engine=ray and ray.address."
            )
        deadline = min((config.ray.deadline for config in configs if config.ray.deadline is not None), default=None)
        return run_on_cluster(parallel, len(configs), size <= SMALL, deadline)
    if parallel in (None, 1) or len(configs) < 2 or stacks_runs(parallel, configs):
        return 1
    clusters = [config for config in configs if config.engine == "ray" and config.ray.address in (None, "local")]
    if isinstance(parallel, int):
        if clusters:
            raise ConfigError(
                "Parallel runs would each start their own Ray cluster on this machine. Connect to a running cluster "
                "(ray.address=auto, after ray start --head), or use engine=inline."
            )
        return min(parallel, len(configs))
    devices = {pick_device(config.device) for config in configs}
    divided = len(devices) > 1 or any(config.workers is not None for config in configs)
    if divided or clusters or size > SMALL or not may_start_processes():
        return 1
    (device,) = devices
    if device.type == "cuda":
        return min(num_runs_per_card(DeviceMemory(device)), len(configs))
    alone = device.type != "cpu" or any(config.engine == "vectorized" for config in configs)
    return 1 if alone else min(num_cores(), len(configs))


def num_runs_per_card(memory: DeviceMemory) -> int:
    """Return how many runs of a small model are executed at once on a CUDA device.

    Their kernels are short, so that the device waits for the process that launches them: one process per core, as long as
    each has ``RUN_MEMORY`` of the free memory.

    Args:
        memory: Memory of the device.
    """
    return max(1, min(num_cores(), memory.free() // RUN_MEMORY))


def num_parallel_jobs(parallel: int | str | None, jobs: int) -> int:
    """Return the number of small jobs that run at the same time.

    Args:
        parallel: Requested number, ``auto`` for one per core, or ``N@HOST:PORT`` on a Ray cluster; None for one.
        jobs: Number of jobs.

    Raises:
        ConfigError: If ``parallel`` is not valid.
    """
    check_parallel(parallel)
    if isinstance(parallel, str) and "@" in parallel:
        return run_on_cluster(parallel, jobs, small=True)
    if parallel == STACKED:
        raise ConfigError(
            "parallel=stacked is not possible here: parallel is a number of jobs that each train several runs."
        )
    return min(num_cores() if isinstance(parallel, str) else parallel or 1, jobs)


def run_on_cluster(parallel: str, works: int, small: bool, deadline: float | None = None) -> ParallelOn:
    """Return the number of parallel runs on a cluster.

    Args:
        parallel: Number and address, ``N@ADDRESS``.
        works: Number of jobs.
        small: Whether one core is enough for a job.
        deadline: Seconds without any message after which the jobs are aborted; None waits indefinitely.
    """
    number, _, address = parallel.partition("@")
    at = ParallelOn(works if number == "auto" else min(int(number), works))
    at.address = address
    at.auto = number == "auto"
    at.small = small
    at.deadline = deadline
    return at


def run_in_pool(at_once: int) -> bool:
    """Return whether runs are executed in other processes."""
    return at_once > 1 or (isinstance(at_once, ParallelOn) and at_once > 0)


def run_jobs(works: Sequence[Job], num_workers: int, given: Any = None) -> Iterator[tuple[Hashable, Any]]:
    """Run jobs in parallel.

    If a job fails, the other jobs finish their round and end, and the error is raised.

    Args:
        works: Jobs; each is listed after the jobs that its ``after`` names.
        num_workers: Number of processes, or a ``ParallelOn``.
        given: Object that all jobs receive, such as data; all processes of a machine share its memory.

    Yields:
        Name and result of each finished job.

    Raises:
        ConfigError: If a job cannot be sent to another process.
        EngineError: If a process died.
        RunInterrupted: If Ctrl-C was pressed, after all runs have finished their round.
    """
    with tempfile.TemporaryDirectory(prefix="unskew-") as folder, interruptible() as stopped:
        path = Path(folder) / "given"
        with raise_if_unpicklable():
            dump_mmap(given, path)
        crew: ProcessPool | RayJobPool
        if isinstance(num_workers, ParallelOn):
            number = int(num_workers)
            crew = RayJobPool(
                num_workers.address,
                number,
                num_workers.auto,
                num_workers.small,
                num_workers.deadline,
                path,
                paths_to_share(given),
            )
        else:
            check_may_start_processes()
            crew = ProcessPool(max(1, min(num_workers, len(works))), path, len(works))
        try:
            yield from crew.carry_out(works, stopped)
            if stopped:
                raise RunInterrupted(stopped[0])
        except BaseException:
            crew.wind_up()
            raise
        finally:
            crew.close()


def run_jobs_here(works: Sequence[Job], given: Any = None) -> Iterator[tuple[Hashable, Any]]:
    """Run jobs one after another in this process, see ``run_jobs``.

    Args:
        works: Jobs; each is listed after the jobs that its ``after`` names.
        given: Object that all jobs receive.

    Yields:
        Name and result of each finished job.
    """
    waiting, done = list(works), set[Hashable]()
    while (work := next_job(waiting, done)) is not None:
        result = _run_here(work, given)
        done.add(work.name)
        yield work.name, result


def run_stacked(groups: Sequence[tuple[Experiment, Sequence[Job]]], given: Any) -> Iterator[tuple[Hashable, Any]]:
    """Run jobs in this process; the jobs of a group train their clients together.

    Args:
        groups: Jobs that execute runs which differ in the seed, with the configuration of one of them. Jobs that a job comes
            after are in an earlier group.
        given: Object that all jobs receive, such as data.

    Yields:
        Name and result of each finished job.

    Raises:
        RunInterrupted: If Ctrl-C was pressed, after all runs have finished their round.
    """
    with interruptible() as stopped:
        for config, jobs in groups:
            for some in (jobs[first : first + MOST_STACKED] for first in range(0, len(jobs), MOST_STACKED)):
                # Around the modes that each run sets and restores, because the runs do not end in order.
                with default_torch_modes(), device_modes(pick_device(config.device), config.precision):
                    results = run_together([partial(_run_here, job, given) for job in some], stopped, JointTraining())
                yield from ((job.name, result) for job, result in zip(some, results, strict=True))


def _run_here(job: Job, given: Any) -> Any:
    return job.function(given, *job.arguments, callbacks=list(job.follow()))


def paths_to_share(given: Any) -> list[Path]:
    """Return the paths in the object that all jobs receive."""
    parts = given if isinstance(given, tuple) else vars(given).values() if hasattr(given, "__dict__") else ()
    return [part for part in parts if isinstance(part, Path)]
