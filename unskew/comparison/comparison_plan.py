"""Plan of a comparison: its validated methods, seeds and runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from numbers import Integral
from pathlib import Path
from typing import Any

from unskew.comparison import references as reference_rows
from unskew.comparison.folder_name import folder_name
from unskew.comparison.overrides import (
    check_same_data,
    check_same_objective,
    check_same_positive,
    overrides_by_method,
)
from unskew.comparison.references import applicable_references, is_reference, reference_config
from unskew.comparison.same_settings import check_same_settings
from unskew.comparison.single_run import Given, RunRecords, last, run_or_resume
from unskew.config.experiment import Experiment
from unskew.config.loader import experiment
from unskew.data.federation import Federation
from unskew.data.spec import DataSpec
from unskew.errors import CheckpointError, ConfigError, list_items, short_repr
from unskew.expressions import MOST_SEEDS, parse_seed_list
from unskew.filesystem import parse_path
from unskew.generators.synthetic_dataset import SYNTHETIC
from unskew.methods.registry import MethodLike, method
from unskew.protocol.rules import Method
from unskew.records.recorder import Callback
from unskew.records.result import read_summary
from unskew.runs.api_arguments import config_from_arguments, method_expression, model_object
from unskew.runs.build_model import ModelLike
from unskew.runs.cost import WORTH, check_budget, check_within, estimate
from unskew.runs.parallel import check_parallel, execute_jobs
from unskew.runs.preparation import check_given_set
from unskew.runs.process_pool import Job
from unskew.runs.resume import check_finished_data, stored_content
from unskew.runs.run import finished_rounds, with_unseen_clients
from unskew.runs.validation import resolve_run

CallbackFactory = Callable[[str, int, Experiment], Sequence[Callback]]
"""Function that returns the callbacks of a run for its method, seed and configuration."""


@dataclass(frozen=True)
class ComparisonPlan:
    """Runs of a comparison: each method with each seed.

    Attributes:
        federation: Data for all seeds; if None, data are loaded for each seed.
        model: Model given in Python, or None.
        methods: Methods by name.
        seeds: Seeds of the runs.
        values: Fields of the configuration that all runs share.
        overrides: Fields that differ for single methods, by name.
        folder: Folder for all runs, or None.
        target: Value of the objective for which rounds are counted, or None; no run has it.
    """

    federation: Federation | None
    model: ModelLike | None
    methods: dict[str, Method]
    seeds: list[int]
    values: Mapping[str, Any]
    overrides: Mapping[str, Mapping[str, Any]]
    folder: Path | None
    target: float | None = None

    @cached_property
    def configs(self) -> dict[tuple[str, int], Experiment]:
        """Configuration of each run by method and seed, seed by seed."""
        configs, ignoring = {}, without_synthetic(self.methods)
        for seed in self.seeds:
            for name, own_method in self.methods.items():
                images = {"synthetic": None} if name in ignoring else {}
                fields = {**self.values, **images, **self.overrides[name], "seed": seed, "method": name}
                fields = reference_config(fields, name) if is_reference(name) else fields
                configs[name, seed] = experiment(fields, own_method)
        return configs

    @property
    def shared_folder(self) -> Path | None:
        """Folder for prepared data that all runs share."""
        return None if self.folder is None else self.folder / SYNTHETIC

    def run_folder(self, name: str, seed: int) -> Path | None:
        """Return the folder of a run, or None.

        Args:
            name: Name of the method.
            seed: Seed of the run.
        """
        return None if self.folder is None else self.folder / folder_name(name) / f"seed-{seed}"

    def has_begun(self) -> bool:
        """Return whether a run was started or shared data were generated."""
        folder = self.folder
        return folder is not None and (any(folder.glob("*/*/config.yaml")) or (folder / SYNTHETIC).exists())

    def data_of(self, seed: int) -> Federation:
        """Return the data of a seed."""
        return self.federation or last.of(self.configs[next(iter(self.methods)), seed])

    def prepare(self, references: bool | None) -> tuple[ComparisonPlan, Federation, int, list[str]]:
        """Validate the folder and all methods before the first one is trained.

        Args:
            references: Whether to add references; None means the default.

        Returns:
            Plan with the references that fit, data of the first seed, number of parameters of the largest model, and notes
            on the other references.
        """
        if self.folder is not None:
            check_same_settings(self.folder, self.configs, self.methods)
        data = self.data_of(self.seeds[0])
        size = self.check_methods(data)
        if reference_rows.BY_DEFAULT if references is None else references:
            plan, left_out = self.with_references(data)
            return plan, data, size, left_out
        return self, data, size, []

    def check_methods(self, data: Federation) -> int:
        """Validate all methods before the first one is trained, and return the size of the largest model."""
        sizes, metrics = [], []
        for name, own_method in self.methods.items():
            config = self.configs[name, self.seeds[0]].model_copy(update={"target": self.target})
            run = resolve_run(config, data, self.model, own_method)
            sizes.append(run.spec.size)
            metrics.append(run.metrics)
            check_given_set(config, own_method)
        check_same_positive(metrics)
        return max(sizes)

    def check_data_unchanged(self, keys: Sequence[tuple[str, int]]) -> None:
        """Validate, before anything is trained, that finished runs used the same data; others do so when they resume.

        Args:
            keys: Method and seed of each run.

        Raises:
            ConfigError: If a finished run used other data.
        """
        loaded: tuple[DataSpec, int] | None = None
        for key in keys:
            folder, config = self.run_folder(*key), self.configs[key]
            if folder is None or not is_finished(folder, config):
                continue
            if loaded != (config.data_spec, config.seed):
                loaded = config.data_spec, config.seed
                data = with_unseen_clients(self.federation or last.of(config), config)
                content = stored_content(data)
            try:
                check_finished_data(read_summary(folder), data, content)
            except CheckpointError as error:
                raise ConfigError(f"{folder} cannot be reused. {error}") from error

    def with_references(self, data: Federation) -> tuple[ComparisonPlan, list[str]]:
        """Return the plan with the references that fit, which use the settings of one method, and notes on the others."""
        base = "fedavg" if "fedavg" in self.methods else next(iter(self.methods))
        config = self.configs[base, self.seeds[0]]
        added, left_out = applicable_references(config, data, self.model, list(self.methods))
        overrides = {**self.overrides, **dict.fromkeys(added, self.overrides[base])}
        return replace(self, methods=self.methods | added, overrides=overrides), left_out

    def execute(
        self, keys: Sequence[tuple[str, int]], at_once: int, callback_factory: CallbackFactory | None
    ) -> Iterator[tuple[str, int, RunRecords]]:
        """Execute runs in order; finished runs are read and interrupted ones resumed.

        Args:
            keys: Method and seed of each run.
            at_once: Number of concurrent runs, see ``num_parallel_runs``; unless it is 1, all runs finish before the first
                yield.
            callback_factory: Returns the callbacks of a run, or None.

        Yields:
            Method, seed and records of each run.
        """

        def callbacks(name: str, seed: int) -> Sequence[Callback]:
            return list(callback_factory(name, seed, self.configs[name, seed])) if callback_factory else []

        jobs = []
        for key in keys:
            arguments = key[0], self.configs[key], self.run_folder(*key), self.shared_folder
            jobs.append(Job(key, run_or_resume, arguments, partial(callbacks, *key)))
        given: Given = (self.federation, self.model, self.methods)
        runs = execute_jobs(jobs, at_once, given, [self.configs[key] for key in keys])
        for (name, seed), records in runs if at_once == 1 else sorted(runs, key=lambda run: keys.index(run[0])):
            yield name, seed, records


def plan_comparison(
    federation: Federation | None,
    *,
    methods: Sequence[MethodLike],
    seeds: int | str | Sequence[int],
    out: str | Path | None,
    callback_factory: CallbackFactory | None,
    parallel: int | str | None,
    budget_minutes: float | None,
    model: ModelLike | Mapping[str, Any] | None = None,
    target: float | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
) -> ComparisonPlan:
    """Validate the arguments of ``compare`` as far as possible without data, and return the plan of its methods.

    Args:
        federation: Data for all seeds, or None.
        methods: Methods as ``unskew.method`` accepts them.
        seeds: Seeds.
        out: Folder for all runs, or None.
        callback_factory: Returns the callbacks of a run, or None.
        parallel: Number of concurrent runs.
        budget_minutes: Maximum estimated time, or None.
        model: Model, see ``unskew.run``.
        target: Value of the objective for which rounds are counted, or None.
        overrides: Fields that differ for single methods.
        **options: Fields of ``unskew.Experiment``.

    Raises:
        ConfigError: If an argument is not valid.
    """
    if budget_minutes is not None:
        check_budget(budget_minutes)
    by_name = methods_by_name(methods)
    if callback_factory is not None and not callable(callback_factory):
        raise ConfigError(
            "callback_factory must be a function of a method, a seed and a configuration, not "
            f"{short_repr(callback_factory)}."
        )
    check_parallel(parallel)
    which = seed_list(seeds)
    folder = None if out is None else parse_path(out).absolute()
    if not {"method", "seed"}.isdisjoint(options):
        raise ConfigError("A comparison takes methods=[...] and seeds=... instead of method and seed.")
    values, own_model = config_from_arguments(options, federation, model), model_object(model)
    own = overrides_by_method(overrides, list(by_name))
    experiment({**values, **own[next(iter(by_name))], "target": target})  # validate the target, which no run has
    plan = ComparisonPlan(federation, own_model, by_name, which, values, own, folder, target)
    check_same_data(plan.configs[name, which[0]] for name in by_name)
    check_same_objective(plan.configs[name, which[0]] for name in by_name)
    return plan


def methods_by_name(methods: Sequence[MethodLike]) -> dict[str, Method]:
    """Return the methods by their expressions, with the references last.

    Args:
        methods: Methods as ``unskew.method`` accepts them.

    Raises:
        ConfigError: If a method is not valid or named twice, or all of them are references.
    """
    if isinstance(methods, str):
        methods = [methods]
    if not isinstance(methods, Sequence):
        raise ConfigError(f"methods must be a list such as ['fedavg', 'scaffold'], not {short_repr(methods)}.")
    names = [method_expression(m) for m in methods]
    if all(map(is_reference, names)):
        raise ConfigError("Name at least one method. pooled and local are only references to compare it with.")
    folders = [folder_name(name).casefold() for name in names]  # some file systems do not distinguish case
    twice = ", ".join(sorted({name for name, own in zip(names, folders, strict=True) if folders.count(own) > 1}))
    if twice:
        raise ConfigError(f"Name each method only once: {twice} is listed twice.")
    by_name = dict(zip(names, map(method, methods), strict=True))
    return {name: by_name[name] for name in sorted(names, key=is_reference)}


def without_synthetic(methods: Mapping[str, Method]) -> frozenset[str]:
    """Return the methods that do not use given synthetic images, because only others would generate some."""
    makers = {name for name, m in methods.items() if any(rule.generates_data for rule in m.data)}
    return frozenset(set(methods) - makers if makers else ())


def report_estimate(
    plan: ComparisonPlan,
    keys: Sequence[tuple[str, int]],
    data: Federation,
    at_once: int | None,
    budget_minutes: float | None,
    on_estimate: Callable[[str], None] | None,
) -> None:
    """Estimate the time of unfinished runs, compare it with the budget, and report it.

    Args:
        plan: Plan of the comparison.
        keys: Method and seed of each run.
        data: Data of the first seed.
        at_once: Number of concurrent runs; None on a cluster, where nothing is estimated.
        budget_minutes: Maximum estimated time, or None.
        on_estimate: Called with the estimated time as text, or None.

    Raises:
        ConfigError: If the estimate is above the budget.
    """
    todo = {}
    for name, own_method in plan.methods.items():
        open_runs = sum(key[0] == name and not is_finished(plan.run_folder(*key), plan.configs[key]) for key in keys)
        if open_runs:
            todo[name] = (plan.configs[name, plan.seeds[0]], own_method, open_runs)
    known = None
    if todo and at_once is not None:
        known = estimate(todo, data, plan.model, at_once, WORTH if budget_minutes is None else 0)
    if budget_minutes is not None and todo:
        check_within(known, budget_minutes)
    if on_estimate is not None and known is not None:
        on_estimate(str(known))


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
        ConfigError: If the list is empty, too long or has duplicates, or an entry is not a seed.
    """
    if isinstance(seeds, str):
        return parse_seed_list(seeds)
    wrong = ConfigError(
        f"seeds must be a number of seeds or a list of seeds such as [0, 1, 7], not {short_repr(seeds)}."
    )
    if isinstance(seeds, bool):
        raise wrong
    if isinstance(seeds, int) and not 1 <= seeds <= MOST_SEEDS:
        raise ConfigError(
            f"seeds={short_repr(seeds)} is not valid: the number of seeds must be from 1 to {MOST_SEEDS}."
        )
    which = list(range(seeds)) if isinstance(seeds, int) else list_items(seeds, wrong)
    for seed in which:
        if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= int(seed) < 2**63:
            raise ConfigError(f"A seed must be an integer from 0 and below 2**63, not {short_repr(seed)}.")
    if not which or len(set(which)) < len(which):
        raise ConfigError("Name at least one seed, and each only once.")
    return which
