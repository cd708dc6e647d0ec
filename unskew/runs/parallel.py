"""Parallel execution of independent runs, each in its own process with its share of the cores, here or on a cluster.

Callbacks are called in the parent process. The results are the same as without parallel runs. At the first Ctrl-C, all
runs finish their round and save it.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

from unskew.config.experiment import Experiment
from unskew.config.sections import ADDRESS
from unskew.engines.cpu import check_may_start_processes, may_start_processes, num_cores
from unskew.engines.mmap_pickle import dump_mmap
from unskew.engines.registry import pick_device
from unskew.errors import ConfigError, short_repr
from unskew.runs.process_pool import Job, ProcessPool, raise_if_unpicklable
from unskew.runs.ray_pool import RayJobPool
from unskew.simulation.round_loop import RunInterrupted, interruptible

SMALL = 1_000_000
"""Number of model parameters up to which ``auto`` uses one core per run: small models gain little from more threads."""
MOST = 256
"""Maximum number of parallel runs."""
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
    number = isinstance(parallel, int) and not isinstance(parallel, bool) and 1 <= parallel <= MOST
    cluster_match = ON_CLUSTER.fullmatch(parallel) if isinstance(parallel, str) else None
    if cluster_match is not None:
        number = cluster_match[2] != "local" and (cluster_match[1] == "auto" or 1 <= int(cluster_match[1]) <= MOST)
    if not number and parallel != "auto":
        raise ConfigError(
            f"parallel={short_repr(parallel)} is not a number of parallel runs. Use 1 to {MOST} or auto, or, on a Ray "
            "cluster, 8@HOST:PORT or auto@auto."
        )


def read_parallel(text: str) -> int | str:
    """Parse ``parallel`` from the command line.

    Args:
        text: Number of runs, or ``auto``; ``@`` and the address of a cluster may follow.

    Raises:
        ConfigError: If the text is not a number or ``auto``, optionally with the address of a cluster.
    """
    parallel = int(text) if text.isdecimal() and len(text) < 10 else text
    check_parallel(parallel)
    return parallel


def num_parallel_runs(parallel: int | str, configs: Sequence[Experiment], size: int) -> int:
    """Return the number of parallel runs.

    Args:
        parallel: Requested number, or ``auto``; on a cluster with ``@`` and its address.
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
    if parallel == 1 or len(configs) < 2:
        return 1
    clusters = [config for config in configs if config.engine == "ray" and config.ray.address in (None, "local")]
    if isinstance(parallel, int):
        if clusters:
            raise ConfigError(
                "Parallel runs would each start their own Ray cluster on this machine. Connect to a running cluster "
                "(ray.address=auto, after ray start --head), or use engine=inline."
            )
        return min(parallel, len(configs))
    divided = any(
        config.engine == "vectorized" or config.workers is not None or pick_device(config.device).type != "cpu"
        for config in configs
    )
    alone = divided or clusters or size > SMALL or not may_start_processes()
    return 1 if alone else min(num_cores(), len(configs))


def num_parallel_jobs(parallel: int | str, jobs: int) -> int:
    """Return the number of small jobs that run at the same time.

    Args:
        parallel: Requested number, ``auto`` for one per core, or ``N@HOST:PORT`` on a Ray cluster.
        jobs: Number of jobs.

    Raises:
        ConfigError: If ``parallel`` is not valid.
    """
    check_parallel(parallel)
    if isinstance(parallel, str) and "@" in parallel:
        return run_on_cluster(parallel, jobs, small=True)
    return min(num_cores() if isinstance(parallel, str) else parallel, jobs)


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


def paths_to_share(given: Any) -> list[Path]:
    """Return the paths in the object that all jobs receive."""
    parts = given if isinstance(given, tuple) else vars(given).values() if hasattr(given, "__dict__") else ()
    return [part for part in parts if isinstance(part, Path)]
