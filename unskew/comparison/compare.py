"""Comparison of methods with the same data, partition, cohorts and initial model for each seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

from unskew.comparison import references as reference_rows
from unskew.comparison.comparison_result import Comparison, default_target
from unskew.comparison.folder_name import folder_name
from unskew.comparison.overrides import check_same_data, check_same_objective, overrides_by_method
from unskew.comparison.references import (
    applicable_references,
    is_local,
    is_reference,
    local_records,
    reference_config,
)
from unskew.comparison.same_settings import check_same_settings
from unskew.comparison.single_run import Given, last, run_or_resume
from unskew.config.experiment import Experiment
from unskew.config.loader import experiment
from unskew.data.federation import Federation
from unskew.errors import ConfigError, list_items, short_repr
from unskew.expressions import MOST_SEEDS, parse_seed_list
from unskew.filesystem import parse_path, write_atomic
from unskew.folder_locks import output_folder
from unskew.generators.synthetic_dataset import SYNTHETIC
from unskew.methods.registry import MethodLike, method
from unskew.plots.curves import plot_clients_by_class
from unskew.records.notebook import notebook_progress
from unskew.records.recorder import Callback
from unskew.runs.api_arguments import config_from_arguments, method_expression, model_object
from unskew.runs.build_model import ModelLike
from unskew.runs.cost import WORTH, check_budget, check_within, estimate
from unskew.runs.parallel import check_parallel, num_parallel_runs, run_in_pool, run_jobs
from unskew.runs.preparation import check_given_set
from unskew.runs.process_pool import Job
from unskew.runs.run import finished_rounds
from unskew.runs.validation import check_method


def compare(
    federation: Federation | None = None,
    *,
    methods: Sequence[MethodLike],
    seeds: int | str | Sequence[int] = 3,
    model: ModelLike | Mapping[str, Any] | None = None,
    target: float | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    callback_factory: Callable[[str, int, Experiment], Sequence[Callback]] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    parallel: int | str = 1,
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
            a Ray cluster ``"8@HOST:PORT"``, with an ``out`` that all nodes can access.
        references: Whether to add the unranked rows ``pooled`` (centralized training on the data of all clients) and
            ``local`` (each client alone); those that do not fit are omitted with a note. None means True.
        budget_minutes: Maximum estimated time; a longer comparison raises ``ConfigError``.
        on_estimate: Called with the estimated time as text, unless it is short or unknown.
        **options: Fields of ``unskew.Experiment``.

    Raises:
        ConfigError: If an option is not valid, a method is named twice, ``out`` already exists or has runs with other
            settings, or the estimate is above ``budget_minutes``.
    """
    if budget_minutes is not None:
        check_budget(budget_minutes)
    if isinstance(methods, str):
        methods = [methods]
    if not isinstance(methods, Sequence):
        raise ConfigError(f"methods must be a list such as ['fedavg', 'scaffold'], not {short_repr(methods)}.")
    if callback_factory is not None and not callable(callback_factory):
        raise ConfigError(
            "callback_factory must be a function of a method, a seed and a configuration, not "
            f"{short_repr(callback_factory)}."
        )
    check_parallel(parallel)
    names = [method_expression(m) for m in methods]
    if all(map(is_reference, names)):
        raise ConfigError("Name at least one method. pooled and local are only references to compare it with.")
    folders = [folder_name(name).casefold() for name in names]  # some file systems do not distinguish case
    twice = ", ".join(sorted({name for name, own in zip(names, folders, strict=True) if folders.count(own) > 1}))
    if twice:
        raise ConfigError(f"Name each method only once: {twice} is listed twice.")
    by_name = dict(zip(names, map(method, methods), strict=True))
    names.sort(key=is_reference)  # stable: references come last
    which = seed_list(seeds)
    folder = None if out is None else parse_path(out).absolute()
    if not {"method", "seed"}.isdisjoint(options):
        raise ConfigError("A comparison takes methods=[...] and seeds=... instead of method and seed.")
    experiment({**options, "target": target})  # validate the options, including the target
    values, own_model = config_from_arguments(options, federation, model), model_object(model)
    # Given synthetic images are used only by methods that would otherwise generate some.
    makers = {name for name, m in by_name.items() if any(rule.generates_data for rule in m.data)}
    others = {name: {"synthetic": None} for name in names if makers and name not in makers}
    own = overrides_by_method(overrides, names)

    def config_of(name: str, seed: int) -> Experiment:
        fields = {**values, **others.get(name, {}), **own[name], "seed": seed, "method": name}
        return experiment(reference_config(fields, name) if is_reference(name) else fields, by_name[name])

    configs = {(name, seed): config_of(name, seed) for seed in which for name in names}
    check_same_data(configs[name, which[0]] for name in names)
    check_same_objective(configs[name, which[0]] for name in names)
    result, unequal = Comparison({name: [] for name in names}, {name: [] for name in names}, 0.0, folder), False

    def begun() -> bool:
        """Return whether a run was started or shared data were generated."""
        return folder is not None and (any(folder.glob("*/*/config.yaml")) or (folder / SYNTHETIC).exists())

    shared_inputs: Given = (federation, own_model, by_name)

    def data_of(seed: int) -> Federation:
        return federation or last.of(configs[names[0], seed])

    def arguments(name: str, seed: int) -> tuple[str, Experiment, Path | None, Path | None]:
        folder_path = None if folder is None else folder / folder_name(name) / f"seed-{seed}"
        return name, configs[name, seed], folder_path, None if folder is None else folder / SYNTHETIC

    def run_callbacks(name: str, seed: int) -> Sequence[Callback]:
        return list(callback_factory(name, seed, configs[name, seed])) if callback_factory else []

    def pool_callbacks(name: str, seed: int) -> Sequence[Callback]:
        return [*run_callbacks(name, seed), *notebook_progress()]

    with output_folder(folder, resume, begun):
        if folder is not None:
            check_same_settings(folder, configs, by_name)
        size, data = 0, data_of(which[0])
        for name, m in by_name.items():  # validate all methods before training the first
            spec, _ = check_method(configs[name, which[0]], data, own_model, m)
            check_given_set(configs[name, which[0]], m)
            size = max(size, spec.size)
        if reference_rows.BY_DEFAULT if references is None else references:
            base = "fedavg" if "fedavg" in names else names[0]
            more, left_out = applicable_references(configs[base, which[0]], data, own_model, names)
            by_name |= more
            own |= dict.fromkeys(more, own[base])
            names += more
            result = replace(result, left_out=tuple(left_out))
            configs |= {(name, seed): config_of(name, seed) for seed in which for name in more}
        if folder is not None:
            counts, class_names = data.label_distribution()
            plot_clients_by_class(
                counts,
                class_names,
                folder / "clients.png",
                title=f"{data.name}, {data.partition}, seed {which[0]}",
                client_names=data.client_names,
                exclusive=data.task != "multilabel",
            )
        at_once = num_parallel_runs(parallel, list(configs.values()), size)
        if budget_minutes is not None or on_estimate is not None:
            finished_ones = {config for config in configs if is_finished(arguments(*config)[2], configs[config])}
            left = {name: [seed for seed in which if (name, seed) not in finished_ones] for name in names}
            todo = {name: (configs[name, which[0]], by_name[name], len(todo)) for name, todo in left.items() if todo}
            known = None
            if todo and not (isinstance(parallel, str) and "@" in parallel):
                known = estimate(todo, data, own_model, at_once, WORTH if budget_minutes is None else 0)
            if budget_minutes is not None and todo:
                check_within(known, budget_minutes)
            if on_estimate is not None and known is not None:
                on_estimate(str(known))
        works = [Job(config, run_or_resume, arguments(*config), partial(pool_callbacks, *config)) for config in configs]
        finished = dict(run_jobs(works, at_once, shared_inputs)) if run_in_pool(at_once) else {}
        for seed in which:
            for name in names:
                run = finished.get((name, seed))
                if run is None:
                    run = run_or_resume(shared_inputs, *arguments(name, seed), run_callbacks(name, seed))
                history, summary, rows = run
                if is_local(name):
                    history, summary, rows = local_records(history, summary, rows)
                result.histories.setdefault(name, []).append(history)
                result.summaries.setdefault(name, []).append(summary)
                result.clients.setdefault(name, []).append(rows)
            if len({group[0]["client_weighting"] for group in result.ranked.values()}) > 1:
                unequal = unequal or len(set(data_of(seed).sizes.tolist())) > 1
        if target is None:
            target = default_target(result.ranked.values())
        result = replace(result, target=target, unequal=unequal)
        if folder is not None:
            result.plot(folder / "convergence.png")
            write_atomic(folder / "comparison.json", (json.dumps(result.rows(), indent=2) + "\n").encode())
    return result


def is_finished(folder: Path | None, config: Experiment) -> bool:
    """Return whether a run folder contains all rounds of a run.

    Args:
        folder: Run folder, or None.
        config: Configuration of the run.
    """
    return folder is not None and folder.exists() and finished_rounds(folder) == config.rounds


def seed_list(seeds: int | str | Sequence[int]) -> list[int]:
    """Return the seeds as a list; an integer n means 0 to n - 1.

    Args:
        seeds: Number of seeds, a list of seeds, or an expression such as ``0..2,7``.

    Raises:
        ConfigError: If there are no seeds, duplicates or too many seeds.
    """
    if isinstance(seeds, str):
        return parse_seed_list(seeds)
    if isinstance(seeds, int) and not 1 <= seeds <= MOST_SEEDS:
        raise ConfigError(
            f"seeds={short_repr(seeds)} is not valid: the number of seeds must be from 1 to {MOST_SEEDS}."
        )
    wrong = ConfigError(
        f"seeds must be a number of seeds or a list of seeds such as [0, 1, 7], not {short_repr(seeds)}."
    )
    which = list(range(seeds)) if isinstance(seeds, int) else list_items(seeds, wrong)
    for seed in which:
        if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= int(seed) < 2**63:
            raise ConfigError(f"A seed must be an integer from 0 and below 2**63, not {short_repr(seed)}.")
    if not which or len(set(which)) < len(which):
        raise ConfigError("Name at least one seed, and each only once.")
    return which
