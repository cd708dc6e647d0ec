"""Comparison of methods with the same data, partition, cohorts and initial model for each seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unskew.comparison.comparison_plan import CallbackFactory, ComparisonPlan, plan_comparison, report_estimate
from unskew.comparison.comparison_result import Comparison, default_target
from unskew.comparison.references import records_of_clients
from unskew.comparison.single_run import RunRecords
from unskew.data.federation import Federation
from unskew.filesystem import write_atomic
from unskew.folder_locks import output_folder
from unskew.methods.registry import MethodLike
from unskew.plots.curves import plot_clients_by_class
from unskew.runs.build_model import ModelLike
from unskew.runs.parallel import num_parallel_runs


def compare(
    federation: Federation | None = None,
    *,
    methods: Sequence[MethodLike],
    seeds: int | str | Sequence[int] = 3,
    model: ModelLike | Mapping[str, Any] | None = None,
    target: float | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    callback_factory: CallbackFactory | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    parallel: int | str | None = None,
    references: bool | None = None,
    budget_minutes: float | None = None,
    on_estimate: Callable[[str], None] | None = None,
    **options: Any,
) -> Comparison:
    """Run several methods on the same data, cohorts and initial models.

    Args:
        federation: Data for all seeds; if None, data are loaded and partitioned for each seed.
        methods: Methods as ``unskew.method`` accepts them.
        seeds: Seeds as a list or a string (``"0..4"``, ``"0,1,7"``); an integer n means the seeds 0 to n - 1.
        model: Model, see ``unskew.run``.
        target: Value of the objective for which rounds are counted; 90% of the best mean if None.
        out: Folder for all runs, plots and ``comparison.json``.
        resume: Continue in an existing ``out``: finished runs are reused, interrupted ones are resumed.
        callback_factory: Returns the callbacks of a run for its method, seed and configuration.
        overrides: Fields that differ for single methods, by method expression: ``{"fedavg": {"lr": 0.1}}``; no data
            fields.
        parallel: Number of concurrent runs, each in its own process; ``auto`` chooses it from cores and model size. On
            a Ray cluster ``"8@HOST:PORT"``, with an ``out`` that all nodes can access. ``"stacked"`` trains the clients of
            a method's seeds together, with the engine ``vectorized``; None does so on a GPU.
        references: Whether to add the unranked rows ``pooled`` (centralized training on the data of all clients) and
            ``local`` (each client alone); those that do not fit are omitted with a note. None means True.
        budget_minutes: Maximum estimated time; a longer comparison raises ``ConfigError``.
        on_estimate: Called with the estimated time as text, unless it is short or unknown.
        **options: Fields of ``unskew.Experiment``.

    Raises:
        ConfigError: If an option is not valid, a method is named twice, ``out`` already exists or has runs with other
            settings, or the estimate is above ``budget_minutes``.
    """
    plan = plan_comparison(
        federation,
        methods=methods,
        seeds=seeds,
        model=model,
        target=target,
        out=out,
        callback_factory=callback_factory,
        overrides=overrides,
        parallel=parallel,
        budget_minutes=budget_minutes,
        **options,
    )
    folder = plan.folder
    with output_folder(folder, resume, plan.has_begun):
        plan, data, size, left_out = plan.prepare(references)
        plan.check_data_unchanged(list(plan.configs))
        if folder is not None:
            _plot_clients(data, plan.seeds[0], folder)
        at_once = num_parallel_runs(parallel, list(plan.configs.values()), size)
        if budget_minutes is not None or on_estimate is not None:
            on_cluster = isinstance(parallel, str) and "@" in parallel
            simultaneous = None if on_cluster else max(1, at_once)
            report_estimate(plan, list(plan.configs), data, simultaneous, budget_minutes, on_estimate)
        runs = plan.execute(list(plan.configs), at_once, callback_factory)
        result = _collect(plan, runs, tuple(left_out))
        result = replace(result, target=default_target(result.summaries) if target is None else target)
        if folder is not None:
            result.plot(folder / "convergence.png")
            write_atomic(folder / "comparison.json", (json.dumps(result.rows(), indent=2) + "\n").encode())
    return result


def _plot_clients(data: Federation, seed: int, folder: Path) -> None:
    """Draw the labels of each client."""
    counts, class_names = data.label_distribution()
    plot_clients_by_class(
        counts,
        class_names,
        folder / "clients.png",
        title=f"{data.name}, {data.partition}, seed {seed}",
        client_names=data.client_names,
        exclusive=data.objective.exclusive,
    )


def _collect(
    plan: ComparisonPlan, runs: Iterable[tuple[str, int, RunRecords]], left_out: tuple[str, ...]
) -> Comparison:
    """Collect the records of all runs, and whether methods with different weightings have clients of unequal size."""
    names, unequal = list(plan.methods), False
    result = Comparison({name: [] for name in names}, {name: [] for name in names}, 0.0, plan.folder)
    trains_global = {name: all(rule.trains_global_model for rule in m.rules) for name, m in plan.methods.items()}
    for name, seed, records in runs:
        history, summary, rows = records if trains_global[name] else records_of_clients(*records)
        result.histories[name].append(history)
        result.summaries[name].append(summary)
        result.clients.setdefault(name, []).append(rows)
        if name == names[-1] and len({own[0]["client_weighting"] for own in result.ranked.values()}) > 1:
            unequal = unequal or len(set(plan.data_of(seed).sizes.tolist())) > 1
    return replace(result, unequal=unequal, left_out=left_out)
