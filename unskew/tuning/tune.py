"""Implementation of ``unskew.tune``: tune several methods equally, then compare them on fresh seeds."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from unskew.comparison import references as reference_rows
from unskew.comparison.compare import compare
from unskew.comparison.comparison_plan import seed_list
from unskew.comparison.comparison_result import Comparison
from unskew.config.loader import experiment
from unskew.config.paths import without_data_locations
from unskew.data.federation import Federation
from unskew.engines.cpu import exit_with_parent
from unskew.errors import ConfigError, UnskewError, list_items, short_repr
from unskew.filesystem import check_plain, make_folder, parse_path, write_atomic
from unskew.folder_locks import file_lock, is_occupied, unmake_folder
from unskew.json_models import read_model
from unskew.records.recorder import Callback
from unskew.runs.api_arguments import config_from_arguments, model_object
from unskew.runs.build_model import ModelLike
from unskew.runs.parallel import MOST, check_parallel, num_parallel_runs, run_jobs, run_on_cluster, stacks_runs
from unskew.runs.process_pool import Job, raise_if_unpicklable
from unskew.runs.resume import RESUMABLE, stored_content
from unskew.tuning.results import TunedMethod, TuningResult, best_of_trials, write_results
from unskew.tuning.spaces import canonical_expression, user_spaces
from unskew.tuning.study import database, optuna_library
from unskew.tuning.trial_runner import Follow, TuningPlan, finish_trials, make_trials, no_callbacks

MOST_TRIALS = 10_000
MACHINE = {*RESUMABLE} - {"rounds", "trackers", "target", "save_samples", "base_run"}
"""Fields that may change when tuning is resumed, because they do not change the numbers."""
CHECKSUM = "data_checksum"
"""Entry of ``plan.json`` with the checksum of the data."""
PATIENCE = 30 * 86_400.0
"""Seconds to wait while another process runs the comparison."""


def tune(
    federation: Federation | None = None,
    *,
    methods: Sequence[str],
    trials: int = 20,
    seeds: int | str | Sequence[int] = 3,
    search_space: Mapping[str, object] | None = None,
    model: ModelLike | Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    parallel: int | str | None = None,
    pruning: bool = True,
    references: bool | None = None,
    callback_factory: Follow = no_callbacks,
    **options: Any,
) -> TuningResult:
    """Tune several methods equally, then compare the tuned methods on fresh seeds.

    Every method gets the same number of trials and rounds, the same data and the same sampler seed. Trials are judged
    on held-out samples of the clients, never on the test set.

    Args:
        federation: Data of all clients; if None, they are loaded and partitioned as configured in ``options``.
        methods: Method expressions. Options set in an expression are not tuned unless ``search_space`` names them.
        trials: Number of trials per method; the first is the configuration, with the options that ``search_space`` fixes.
        seeds: Fresh seeds for the comparison; an integer n means the n seeds after the seed of the trials.
        search_space: Spaces of options, such as
            ``{"lr": "0.001:0.3:log", "fedprox.mu": [0.01, 0.1], "batch_size": 32}``.
        model: Model, see ``unskew.run``.
        out: Folder of the trials' database, the tuned configurations and the comparison.
        resume: Continue in an existing ``out``.
        parallel: Number of processes that run trials. On a Ray cluster ``"8@HOST:PORT"``, with an ``out`` that all
            nodes can access. ``"stacked"`` runs one trial after another, and trains the fresh seeds of a method together
            (see ``unskew.compare``), which is the default on a GPU; 1 switches it off.
        pruning: Whether to end trials early if they are worse than most others after the same number of rounds.
        references: Whether to tune ``pooled`` and ``local`` as well, with as many trials, and to compare them. None means
            True.
        callback_factory: Returns the callbacks of a run for its title.
        **options: Fields of ``unskew.Experiment``; ``seed`` is the seed of the trials.

    Returns:
        Best options of each method, all trials, and the comparison of the tuned methods on fresh seeds.

    Raises:
        ConfigError: If an option is not valid, a method does not fit, ``out`` already exists, or Optuna is not
            installed.
    """
    optuna_library()
    names = _names(methods)
    of_comparison = None if isinstance(parallel, int) and parallel > 1 else parallel
    parallel = 1 if parallel in (None, "stacked") else parallel
    _check_counts(trials, parallel)
    if "method" in options:
        raise ConfigError("Tuning takes methods=[...] instead of method.")
    values = config_from_arguments(options, federation, model)
    config, folder = experiment(values), None if out is None else parse_path(out).absolute()
    fresh = fresh_seeds(seeds, config.seed)
    own_spaces = user_spaces(search_space or {}, names, values)
    plan = TuningPlan(names, values, own_spaces, trials, pruning, folder, federation, model_object(model))
    if isinstance(parallel, str):
        num_parallel_runs(parallel, [config], 0)
    stacks_runs(of_comparison, [config])
    if parallel != 1 and (folder is None or federation is not None or plan.model is not None):
        raise ConfigError(
            "With parallel, several processes share a folder and load data and model by name. Set out, and pass neither a "
            "federation nor a model object, or remove parallel."
        )
    with database(), _in(folder, resume):
        left_out: list[str] = []
        if reference_rows.BY_DEFAULT if references is None else references:
            added, left_out = reference_rows.applicable_references(config, plan.data, plan.model, names)
            plan.methods += added
        plan.check()
        if folder is not None:
            _remember(folder, plan, fresh)
        studies = plan.studies()
        if isinstance(parallel, str):
            count = plan.trials * len(plan.methods)
            works = [Job(number, _trials_there) for number in range(min(count, MOST))]
            for _ in run_jobs(works, run_on_cluster(parallel, len(works), small=True), replace(plan)):
                pass
        with _helpers(plan, parallel - 1 if isinstance(parallel, int) else 0):
            finish_trials(plan, studies, callback_factory)
        tuned = {name: best_of_trials(plan, name, study, fresh[0]) for name, study in studies.items()}
        rows = [{**row, "objective": plan.objective.name} for study in studies.values() for row in study.rows()]
        if folder is not None:
            write_results(folder, tuned, rows)
        comparison = _compared(plan, tuned, fresh, federation, model, callback_factory, of_comparison)
        if folder is not None:
            shutil.rmtree(folder / "trials", ignore_errors=True)
    comparison = replace(comparison, left_out=(*left_out, *comparison.left_out))
    spent = [each for study in studies.values() for each in study.spent()]
    return TuningResult(tuned, rows, comparison, folder, spent)


def _names(methods: Any) -> list[str]:
    names = [methods] if isinstance(methods, str) else list_items(methods, ConfigError("methods must be a list."))
    wrong = next((name for name in names if not isinstance(name, str)), None)
    if wrong is not None:
        raise ConfigError(
            f"Methods to tune must be strings such as 'fedprox', to which options are added, not {short_repr(wrong)}."
        )
    if not names:
        raise ConfigError("Name at least one method.")
    names = [canonical_expression(name) for name in names]
    if len(set(names)) < len(names):
        raise ConfigError("Name each method only once.")
    return names


def _check_counts(trials: Any, parallel: Any) -> None:
    on_machine = not (isinstance(parallel, str) and "@" in parallel)
    if not on_machine:
        check_parallel(parallel)
    for name, value, most in (("trials", trials, MOST_TRIALS), ("parallel", parallel if on_machine else 1, 4096)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise ConfigError(f"{name}={short_repr(value, str)} is not valid: it must be an integer from 1 to {most}.")


def fresh_seeds(seeds: int | str | Sequence[int], seed: int) -> list[int]:
    """Return the seeds of the comparison; a number means that many seeds after ``seed``, which is used for tuning.

    Args:
        seeds: Seeds of the comparison, or their number.
        seed: Seed that trials use.

    Raises:
        ConfigError: If the value is not a list of seeds, or contains ``seed``.

    >>> fresh_seeds(2, 0), fresh_seeds("5..6", 0)
    ([1, 2], [5, 6])
    """
    count = int(seeds) if isinstance(seeds, str) and seeds.strip().isdigit() else seeds
    which = seed_list(count)
    if isinstance(count, int):
        return [seed + 1 + chosen for chosen in which]
    if seed in which:
        raise ConfigError(
            f"The seed {seed} is used for tuning, so it is not fresh. Use others with --seeds, or tune with another --seed."
        )
    return which


@contextmanager
def _in(folder: Path | None, resume: bool) -> Iterator[None]:
    """Context manager that creates the output folder; a new folder without trials is removed again."""
    if folder is None:
        if resume:
            raise ConfigError("Resuming a tuning needs its folder. Set out.")
        yield
        return
    fresh = not is_occupied(folder)
    if not fresh and not resume:
        raise ConfigError(f"The folder {folder} already exists. Choose another with --out, or continue with --resume.")
    added = make_folder(folder)
    check_plain(folder)
    try:
        yield
    except BaseException:
        if fresh and not (folder / "study.db").exists():
            unmake_folder(folder, added)
        raise


def _remember(folder: Path, plan: TuningPlan, seeds: list[int]) -> None:
    """Store the settings of the tuning, or validate that they match the stored ones.

    Raises:
        ConfigError: If the folder belongs to another tuning.
    """
    config = {k: v for k, v in without_data_locations(plan.config.model_dump(mode="json")).items() if k not in MACHINE}
    space = {key: str(value) for key, value in plan.given.items()}
    options = {"methods": plan.methods, "trials": plan.trials, "seeds": seeds, "pruning": plan.pruning, "space": space}
    options = json.loads(json.dumps(options | config | {CHECKSUM: stored_content(plan.data)}))
    path = folder / "plan.json"
    with file_lock(folder / ".plan", 60.0):
        if not path.exists():
            write_atomic(path, (json.dumps(options, indent=2) + "\n").encode())
            return
        before = read_model(path, dict[str, Any], "Tune in another folder with --out.")
        differing = [key for key in {**options, **before} if before.get(key) != options.get(key)]
    if differing:
        key = differing[0]
        if key == CHECKSUM and key in before:
            raise ConfigError(
                f"The data differ from those of the tuning in {folder} (content {options[key]} instead of "
                f"{before.get(key)}). Continue with the same data and library versions, or choose another folder with --out."
            )
        raise ConfigError(
            f"{folder} contains a tuning with {key}={before.get(key)}, not {options.get(key)}. Use the same settings, or "
            "choose another folder with --out."
        )


@contextmanager
def _helpers(plan: TuningPlan, count: int) -> Iterator[None]:
    """Context manager with ``count`` additional processes that run trials.

    This process continues the trials of processes that die.
    """
    context = multiprocessing.get_context("spawn")
    # Pass only the fields: each process loads the data itself.
    helpers = [context.Process(target=_help, args=(replace(plan),)) for _ in range(count)]
    with raise_if_unpicklable():
        for helper in helpers:
            helper.start()
    try:
        yield
    finally:
        for helper in helpers:
            if helper.is_alive():
                helper.terminate()  # finishes the round and saves it
            helper.join()


def _help(plan: TuningPlan) -> None:
    """Run trials in an additional process. Its errors are reported by the process that continues the trial."""
    exit_with_parent()
    with contextlib.suppress(KeyboardInterrupt, UnskewError, OSError), database():
        make_trials(plan, plan.studies())


def _trials_there(plan: TuningPlan, callbacks: Sequence[Callback]) -> None:
    """Run trials in a task on a cluster until no unclaimed trial is left."""
    with database():
        make_trials(plan, plan.studies())


def _compared(
    plan: TuningPlan,
    tuned: Mapping[str, TunedMethod],
    seeds: list[int],
    federation: Federation | None,
    model: Any,
    follow: Follow,
    parallel: int | str | None,
) -> Comparison:
    """Compare the tuned methods on fresh seeds."""
    out = None if plan.folder is None else plan.folder / "compare"
    common = {key: value for key, value in plan.values.items() if key not in ("seed", "model")}
    given_fields = {} if federation is None else {"data", "partition", "clients"}
    common = {key: value for key, value in common.items() if key not in given_fields}
    fields = {"lr", *(key for tuned_method in tuned.values() for key in tuned_method.options if "." not in key)}
    budgets = {"local_steps", "local_epochs"}
    each: dict[str, dict[str, Any]] = {}
    same: list[str] = []
    for spelling, tuned_method in tuned.items():
        config = tuned_method.config
        if config.method in each:
            same.append(
                f"{spelling} is left out of the comparison: after tuning, it is {config.method}, as is another method."
            )
        else:
            each[config.method] = {key: getattr(config, key) for key in sorted(fields | budgets)}
    alone = nullcontext() if plan.folder is None else file_lock(plan.folder / ".compare", PATIENCE)
    with alone:
        compared = compare(
            federation,
            methods=list(each),
            overrides=each,
            seeds=seeds,
            model=plan.values.get("model") if model is None else model,
            out=out,
            resume=out is not None,
            parallel=parallel,
            references=False,
            callback_factory=lambda name, seed, _: follow(f"{name}, seed {seed}"),
            **common,
        )
    return replace(compared, left_out=(*compared.left_out, *same))
