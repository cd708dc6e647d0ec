"""Independent runs side by side: each in a process of its own, with its share of the cores, here or on a cluster.

A run tells its followers
here what happens; what it gives back is what it gives alone. The first Ctrl-C lets all of them finish their round and save.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

from unskew.config.experiment import Experiment
from unskew.config.sections import ADDRESS
from unskew.engines.cpu import num_cores
from unskew.engines.mmap_pickle import dump_mmap
from unskew.engines.registry import pick_device
from unskew.errors import ConfigError, short_repr
from unskew.runs.process_pool import Job, ProcessPool, raise_if_unpicklable
from unskew.runs.ray_pool import RayJobPool
from unskew.simulation.round_loop import RunInterrupted, interruptible

SMALL = 1_000_000
"""Parameters of a model up to which ``auto`` takes a core for each run: so small ones gain little from a second thread."""
MOST = 256
"""Runs at a time."""
ON_CLUSTER = re.compile(rf"([0-9]{{1,3}}|auto)@{ADDRESS}")


class ParallelOn(int):
    """A number of runs at a time on a cluster.

    Attributes:
        address: Of the cluster.
        auto: Whether the number is only the largest that makes sense.
        small: Whether a core is enough for each.
        deadline: Seconds without a word of any run after which they are given up; None waits on.
    """

    address: str
    auto: bool
    small: bool
    deadline: float | None


def check_parallel(parallel: object) -> None:
    """Refuse what is not a number of runs.

    Raises:
        ConfigError: The value is not a number of processes.
    """
    number = isinstance(parallel, int) and not isinstance(parallel, bool) and 1 <= parallel <= MOST
    there = ON_CLUSTER.fullmatch(parallel) if isinstance(parallel, str) else None
    if there is not None:
        number = there[2] != "local" and (there[1] == "auto" or 1 <= int(there[1]) <= MOST)
    if not number and parallel != "auto":
        raise ConfigError(
            f"parallel={short_repr(parallel)} is not a number of runs at a time; write 1 to {MOST}, or auto, or on a Ray "
            "cluster 8@HOST:PORT, or auto@auto."
        )


def read_parallel(text: str) -> int | str:
    """``parallel`` as it is written on a command line.

    Raises:
        ConfigError: The text is neither a number nor ``auto``, nor one of them with a cluster.
    """
    parallel = int(text) if text.isdecimal() and len(text) < 10 else text
    check_parallel(parallel)
    return parallel


def num_parallel_runs(parallel: int | str, configs: Sequence[Experiment], size: int) -> int:
    """Return the number of runs at a time.

    Args:
        parallel: What was asked for: a number, or ``auto``; with ``@`` and its address, on a cluster.
        configs: The runs.
        size: Parameters of the largest model among them.

    Raises:
        ConfigError: Each run would start a cluster of its own, or its clients would wait for the cores that it has.
    """
    check_parallel(parallel)
    if isinstance(parallel, str) and "@" in parallel:
        if any(config.engine == "ray" or config.ray.address is not None for config in configs):
            raise ConfigError(
                f"With parallel={parallel} whole runs are tasks of the cluster, and clients are trained where their run is: "
                "leave out engine=ray and ray.address."
            )
        deadline = min((config.ray.deadline for config in configs if config.ray.deadline is not None), default=None)
        return run_on_cluster(parallel, len(configs), size <= SMALL, deadline)
    if parallel == 1 or len(configs) < 2:
        return 1
    clusters = [config for config in configs if config.engine == "ray" and config.ray.address in (None, "local")]
    if isinstance(parallel, int):
        if clusters:
            raise ConfigError(
                "Runs side by side would each start a Ray cluster of their own on this machine: name one that runs already "
                "(ray.address=auto, after ray start --head), or use engine=inline."
            )
        return min(parallel, len(configs))
    divided = any(
        config.engine == "vectorized" or config.workers is not None or pick_device(config.device).type != "cpu"
        for config in configs
    )
    return 1 if divided or clusters or size > SMALL else min(num_cores(), len(configs))


def run_on_cluster(parallel: str, works: int, small: bool, deadline: float | None = None) -> ParallelOn:
    """``N@ADDRESS`` for so many works.

    Args:
        parallel: ``N@ADDRESS``.
        works: Number of jobs.
        small: Whether one core is enough for a job.
        deadline: Seconds without any reply after which the jobs end.
    """
    number, _, address = parallel.partition("@")
    at = ParallelOn(works if number == "auto" else min(int(number), works))
    at.address, at.auto, at.small, at.deadline = address, number == "auto", small, deadline
    return at


def run_in_pool(at_once: int) -> bool:
    """Return whether runs are executed by other processes than this one."""
    return at_once > 1 or (isinstance(at_once, ParallelOn) and at_once > 0)


def run_jobs(works: Sequence[Job], places: int, given: Any = None) -> Iterator[tuple[Hashable, Any]]:
    """Carry out works, ``num_parallel_runs`` at a time; gives the name and the result of each when it is done.

    The first that fails ends the others after their round, and its error is raised.

    Args:
        works: What is to be done; those that others come ``after`` stand before them.
        places: Processes, or an ``ParallelOn``.
        given: What all of them need, such as data. It lies in memory once for all processes.

    Raises:
        ConfigError: A job cannot be sent to another process.
        EngineError: A process died.
        RunInterrupted: Ctrl-C was pressed; all have finished their round.
    """
    with tempfile.TemporaryDirectory(prefix="unskew-") as folder, interruptible() as stopped:
        path = Path(folder) / "given"
        with raise_if_unpicklable():
            dump_mmap(given, path)
        crew: ProcessPool | RayJobPool
        if isinstance(places, ParallelOn):
            number = int(places)
            crew = RayJobPool(
                places.address, number, places.auto, places.small, places.deadline, path, paths_to_share(given)
            )
        else:
            crew = ProcessPool(max(1, min(places, len(works))), path)
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
    """Folders that works are given."""
    parts = given if isinstance(given, tuple) else vars(given).values() if hasattr(given, "__dict__") else ()
    return [part for part in parts if isinstance(part, Path)]
