"""Parallel execution of independent runs, each in its own process with its share of the cores, here or on a cluster.

Callbacks are called in the parent process. The results are the same as without parallel runs. At the first Ctrl-C, all
runs finish their round and save it.
"""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unskew.config.experiment import Experiment
from unskew.config.sections import ADDRESS
from unskew.engines.auto_select import planned_runs
from unskew.engines.cpu import check_may_start_processes, default_torch_modes, may_start_processes, num_cores
from unskew.engines.device import DeviceMemory, device_modes
from unskew.engines.mmap_pickle import dump_mmap
from unskew.engines.registry import pick_device
from unskew.engines.run_threads import run_together
from unskew.engines.stacked import JointTraining
from unskew.errors import ConfigError, short_repr
from unskew.runs.process_pool import Job, ProcessPool, next_job, raise_if_unpicklable
from unskew.runs.ray_pool import ParallelOn, RayJobPool
from unskew.simulation.round_loop import IN_LAST_ROUND, RunInterrupted, interruptible

RUN_MEMORY = 4 << 30
"""Bytes of a CUDA device that ``auto`` reserves for each run of a small model: its context, data and cohort."""
SMALL = 1_000_000
"""Number of model parameters up to which ``auto`` uses one core per run: small models gain little from more threads."""
MOST = 256
"""Maximum number of parallel runs."""
STACKED = "stacked"
TOGETHER = -1
"""Number of parallel runs that stands for runs trained together in this process."""
MOST_STACKED = 8
"""Maximum number of runs that are trained together, which all are in memory."""
ON_CLUSTER = re.compile(rf"([0-9]{{1,3}}|auto)@{ADDRESS}")


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
    on_cuda = [available and config.device.startswith(("auto", "cuda")) for config in configs]
    possible = all(
        config.engine == "vectorized" or (cuda and config.engine == "auto" and not config.ray.address)
        for config, cuda in zip(configs, on_cuda, strict=True)
    )
    if parallel == STACKED and not possible:
        raise ConfigError("parallel=stacked trains several runs with the engine vectorized. Set engine=vectorized.")
    return possible and (parallel == STACKED or all(on_cuda))


def num_parallel_runs(parallel: int | str | None, configs: Sequence[Experiment], size: int) -> int:
    """Return the number of parallel runs; ``TOGETHER`` if runs that differ only in the seed are trained together.

    Args:
        parallel: Requested number, ``auto`` or ``stacked``; on a cluster with ``@`` and its address. None for the default.
        configs: Configurations of the runs.
        size: Number of parameters of the largest model.

    Raises:
        ConfigError: If each run would start its own Ray cluster, or would compete with its clients for the same cores, or
            ``parallel`` is ``stacked`` and an engine is not ``vectorized``.
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
    if stacks_runs(parallel, configs):
        return TOGETHER
    if parallel in (None, 1) or len(configs) < 2:
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
            crew = RayJobPool(num_workers, path, paths_to_share(given))
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

    Raises:
        RunInterrupted: If Ctrl-C was pressed in the last round of a run, and others are left.
    """
    waiting, done = list(works), set[Hashable]()
    IN_LAST_ROUND.clear()
    with planned_runs(len(works)):
        while (work := next_job(waiting, done)) is not None:
            if done and IN_LAST_ROUND:
                raise RunInterrupted(IN_LAST_ROUND[0])
            result = _run_here(work, given)
            done.add(work.name)
            yield work.name, result


def run_stacked(works: Sequence[Job], given: Any, configs: Sequence[Experiment]) -> Iterator[tuple[Hashable, Any]]:
    """Run jobs in this process; those whose runs differ only in the seed train their clients together.

    Args:
        works: Jobs, each of one run.
        given: Object that all jobs receive, such as data.
        configs: Configuration of each run. Runs that start from others are listed after them.

    Yields:
        Name and result of each finished job.

    Raises:
        RunInterrupted: If Ctrl-C was pressed, after all runs have finished their round.
    """
    groups: dict[str, list[tuple[Experiment, Job]]] = defaultdict(list)
    for config, work in zip(configs, works, strict=True):
        groups[config.model_dump_json(exclude={"seed", "start_from"})].append((config, work))
    with interruptible() as stopped:
        for group in groups.values():
            config = group[0][0]
            for some in (group[first : first + MOST_STACKED] for first in range(0, len(group), MOST_STACKED)):
                # Around the modes that each run sets and restores, because the runs do not end in order.
                with default_torch_modes(), device_modes(pick_device(config.device), config.precision):
                    functions = [partial(_run_here, work, given) for _, work in some]
                    results = run_together(functions, stopped, JointTraining())
                if stopped:  # in the last round of the runs, which have ended
                    raise RunInterrupted(stopped[0])
                yield from ((work.name, result) for (_, work), result in zip(some, results, strict=True))


def execute_jobs(
    works: Sequence[Job], at_once: int, given: Any, configs: Sequence[Experiment] = ()
) -> Iterator[tuple[Any, Any]]:
    """Run jobs in other processes, together, or one after another.

    Args:
        works: Jobs; each is listed after the jobs that its ``after`` names.
        at_once: Number of parallel jobs, see ``num_parallel_runs``.
        given: Object that all jobs receive, such as data.
        configs: Configuration of each job's run, for runs that are trained together.

    Returns:
        Name and result of each finished job.
    """
    if at_once == TOGETHER:
        return run_stacked(works, given, configs)
    in_pool = at_once > 1 or (isinstance(at_once, ParallelOn) and at_once > 0)
    return run_jobs(works, at_once, given) if in_pool else run_jobs_here(works, given)


def _run_here(job: Job, given: Any) -> Any:
    return job.function(given, *job.arguments, callbacks=list(job.follow()))


def paths_to_share(given: Any) -> list[Path]:
    """Return the paths in the object that all jobs receive."""
    parts = given if isinstance(given, tuple) else vars(given).values() if hasattr(given, "__dict__") else ()
    return [part for part in parts if isinstance(part, Path)]
