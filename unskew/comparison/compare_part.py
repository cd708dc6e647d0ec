"""Part of a comparison's runs, which several independent commands execute in one folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unskew.comparison.comparison_plan import CallbackFactory, is_finished, plan_comparison, report_estimate
from unskew.data.federation import Federation
from unskew.filesystem import check_plain
from unskew.runs.parallel import num_parallel_runs
from unskew.runs.parts import Part


@dataclass(frozen=True)
class FinishedPart:
    """Runs of a part, all of them finished.

    Attributes:
        runs: Method and seed of each run.
        finished: Number of finished runs of the whole comparison.
        total: Number of runs of the whole comparison.
    """

    runs: list[tuple[str, int]]
    finished: int
    total: int


def compare_part(
    part: Part,
    federation: Federation | None = None,
    *,
    out: str | Path,
    callback_factory: CallbackFactory | None = None,
    parallel: int | str | None = None,
    references: bool | None = None,
    budget_minutes: float | None = None,
    on_estimate: Callable[[str], None] | None = None,
    **arguments: Any,
) -> FinishedPart:
    """Execute a part of the runs of ``compare``; finished runs are not repeated, and interrupted ones are resumed.

    Parts may run at the same time, on machines that share ``out``. Each locks only the folders of its runs, and none writes
    the files of the whole comparison: ``compare`` with ``resume=True`` does so when the parts have finished.

    Args:
        part: Part to execute; the seeds of each method are distributed evenly over the parts.
        federation: Data for all seeds, or None.
        out: Folder that all parts share; it may exist.
        callback_factory: Returns the callbacks of a run.
        parallel: Number of concurrent runs of this part.
        references: Whether to add the references to the whole comparison.
        budget_minutes: Maximum estimated time of this part.
        on_estimate: Called with the estimated time of this part.
        **arguments: Other arguments of ``compare``, of the whole comparison.

    Raises:
        ConfigError: As in ``compare``, or if another process executes one of the runs.
    """
    plan = plan_comparison(
        federation,
        out=out,
        callback_factory=callback_factory,
        parallel=parallel,
        budget_minutes=budget_minutes,
        **arguments,
    )
    if plan.folder is not None and plan.folder.is_dir():
        check_plain(plan.folder)
    plan, data, size, _ = plan.prepare(references)
    by_method = [(name, seed) for name in plan.methods for seed in plan.seeds]
    own = set(part.share(by_method))
    keys = [key for key in plan.configs if key in own]  # seed by seed, so that consecutive runs share their data
    if keys:
        plan.check_data_unchanged(keys)
        at_once = num_parallel_runs(parallel, [plan.configs[key] for key in keys], size)
        if budget_minutes is not None or on_estimate is not None:
            report_estimate(plan, keys, data, max(1, at_once), budget_minutes, on_estimate)
        for _ in plan.execute(keys, at_once, callback_factory):
            pass
    finished = sum(is_finished(plan.run_folder(*key), config) for key, config in plan.configs.items())
    return FinishedPart(keys, finished, len(plan.configs))
