"""Execution of a benchmark suite: one unit per federation and method, which tunes the method and runs fresh seeds.

Each finished unit is appended to the JSON Lines file of its federation, with everything that determines its numbers. Run
the suite again to continue: stored units are not repeated, and an interrupted unit continues with the trials that it has
finished, which are in a folder next to the results. Units of a part (``--part``) have files of their own, because several
machines may write at the same time; the next command without ``--part`` moves them to the file of the federation.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from unskew.benchmark.suite import BenchmarkFederation, Suite, missing_file, run_settings
from unskew.comparison.references import is_local, is_reference, reference_config, without_global_model
from unskew.comparison.summary_statistics import final_metrics
from unskew.config.experiment import Experiment
from unskew.config.loader import experiment
from unskew.data.load import federation_of
from unskew.errors import ConfigError, DataError, EngineError
from unskew.folder_locks import is_occupied, output_folder
from unskew.methods.registry import method
from unskew.records.recorder import Callback, with_closing
from unskew.reproduction.outcomes import (
    Outcome,
    append_outcome,
    identity_hash,
    merge_outcomes,
    read_outcome,
    stored_outcomes,
    write_outcome,
)
from unskew.runs.cost import estimate
from unskew.runs.parallel import execute_jobs, num_parallel_jobs
from unskew.runs.parts import Part
from unskew.runs.process_pool import Job
from unskew.runs.run import run_experiment
from unskew.tasks.primary_metric import WORST, primary_metric_name
from unskew.tasks.registry import objective_metric
from unskew.tuning.spaces import SHARED, fixed_fields, spaces_for, split_expression, user_spaces, without_rival
from unskew.tuning.tune import tune

VERSION = 1
"""Version of the outcomes; increased when a change makes older ones incomparable."""
COMMON_OPTIONS = 3
"""Number of options that are tuned for every method."""
POINTS = 25
"""Maximum number of rounds that a stored curve has."""


@dataclass(frozen=True)
class Unit:
    """Unit of work: tuning and fresh seeds of one method on one federation.

    Attributes:
        federation: Name of the federation.
        method: Method expression.
        trials: Number of trials; 1 runs the configured options.
    """

    federation: str
    method: str
    trials: int


class SuiteRuns:
    """Units of a suite and their stored outcomes.

    Args:
        suite: The suite.
        federations: Federations of the suite.
        results: Folder of the outcomes.
        data: Folder of the data files, or None.

    Attributes:
        unfinished: Folder of the trials of units that were interrupted, next to ``results``.
    """

    def __init__(
        self, suite: Suite, federations: Sequence[BenchmarkFederation], results: Path, data: Path | None = None
    ):
        self.suite = suite
        self.federations = {federation.name: federation for federation in federations}
        self.results = results
        folder = results.resolve()
        self.unfinished = folder.parent / f"{folder.name}.unfinished"
        self.data = None if data is None else data.absolute()
        self._options: dict[str, int] = {}

    def units(self, federations: Sequence[str] = (), methods: Sequence[str] = ()) -> list[Unit]:
        """Return the units of the suite, method by method, and without those that a federation excludes.

        Args:
            federations: Federations to run; empty for all.
            methods: Methods to run; empty for all.

        Raises:
            ConfigError: If the suite has no such federation or method.
        """
        suite = self.suite
        names = [suite.baseline, *suite.references, *suite.methods[1:]]
        for kind, wanted, available in (("federation", federations, self.federations), ("method", methods, names)):
            for name in wanted:
                if name not in available:
                    raise ConfigError(f"The suite {suite.name} has no {kind} {name!r}. It has {', '.join(available)}.")
        chosen = []
        for name in names:
            for federation in self.federations.values():
                chosen_here = (not methods or name in methods) and (not federations or federation.name in federations)
                if chosen_here and name not in federation.without:
                    chosen.append(self.tuned_unit(federation.name, name))
                    if name in suite.untuned:
                        chosen.append(Unit(federation.name, name, 1))
        return [*dict.fromkeys(chosen)]  # with one trial, a tuned unit is the untuned one

    def units_of_part(self, units: Sequence[Unit], part: Part) -> list[Unit]:
        """Return the units of a part, federation by federation, with similar numbers of runs in all parts.

        References are in the part of the baseline's unit, whose options they use.

        Args:
            units: Units of all parts, finished or not.
            part: Part to execute.
        """
        groups: dict[Unit, list[Unit]] = {}
        for name in self.federations:
            baseline = self.tuned_unit(name, self.suite.baseline)
            for unit in units:
                if unit.federation == name:
                    groups.setdefault(baseline if is_reference(unit.method) else unit, []).append(unit)
        seeds = len(self.suite.seeds)
        runs = [
            sum(seeds + (0 if is_reference(unit.method) else unit.trials) for unit in group)
            for group in groups.values()
        ]
        return [unit for group in part.share(list(groups.values()), runs) for unit in group]

    def merge_parts(self) -> None:
        """Move outcomes of parts to the files of their federations, in the order of the units."""
        order = [identity_hash(self.identity(unit)) for unit in self.units()]
        for name in self.federations if self.results.is_dir() else ():
            merge_outcomes(self.results, name, order)

    def tuned_unit(self, federation: str, name: str) -> Unit:
        """Return the unit that tunes a method with its budget of trials.

        Args:
            federation: Name of the federation.
            name: Method expression, or a reference, which has the tuned options of the baseline.
        """
        method_name = self.suite.baseline if is_reference(name) else name
        if method_name not in self._options:
            spaces = spaces_for(
                method_name, Experiment(), user_spaces(own_space(self.suite, method_name), [method_name], {})
            )
            self._options[method_name] = len(spaces.keys() - fixed_fields(spaces).keys())
        more = max(0, self._options[method_name] - COMMON_OPTIONS)
        return Unit(federation, name, self.suite.trials + self.suite.trials_per_option * more)

    def missing(self) -> dict[str, str]:
        """Return the missing file of each federation whose data are not available."""
        missing = {name: missing_file(federation, self.data) for name, federation in self.federations.items()}
        return {name: path for name, path in missing.items() if path is not None}

    def identity(self, unit: Unit) -> dict[str, Any]:
        """Return everything that determines the numbers of a unit, without the location of the data."""
        settings = run_settings(self.suite, self.federations[unit.federation], None)
        return {
            "benchmark": VERSION,
            "federation": unit.federation,
            "method": unit.method,
            "trials": unit.trials,
            "seeds": self.suite.seeds,
            "tuning_seed": self.suite.tuning_seed,
            "space": self.suite.space,
            "settings": {name: value for name, value in settings.items() if name not in ("engine", "device")},
        }

    def stored(self) -> dict[Unit, Outcome]:
        """Return the stored outcomes of all units."""
        return self._outcomes({unit: unit for unit in self.units()})

    def with_fewer_trials(self, repeated: bool = False) -> dict[Unit, Outcome]:
        """Return the outcomes that tuned with ``trials`` only, of units that have a larger budget and no outcome yet.

        Args:
            repeated: Whether to return those of units with an outcome instead.
        """
        stored = self.stored()
        smaller = {unit: replace(unit, trials=self.suite.trials) for unit in self.units()}
        wanted = {u: own for u, own in smaller.items() if u.trials > own.trials and (u in stored) == repeated}
        return self._outcomes(wanted)

    def _outcomes(self, units: Mapping[Unit, Unit]) -> dict[Unit, Outcome]:
        stored = stored_outcomes(self.results)
        keys = {unit: identity_hash(self.identity(own)) for unit, own in units.items()}
        return {unit: stored[key].outcome for unit, key in keys.items() if key in stored}

    def estimate(self, units: Sequence[Unit], at_once: int) -> tuple[float, list[str]]:
        """Estimate the time of units from FedAvg's local steps on each federation.

        Args:
            units: Units to run.
            at_once: Number of units that run at the same time.

        Returns:
            Seconds, if every method took as long as FedAvg and no trial ended early, and the federations that could not
            be measured.
        """
        total, unknown = 0.0, []
        for name in dict.fromkeys(unit.federation for unit in units):
            config = experiment({**run_settings(self.suite, self.federations[name], self.data), "method": "fedavg"})
            runs = sum(unit.trials + len(self.suite.seeds) for unit in units if unit.federation == name)
            cost = estimate(
                {"fedavg": (config, method("fedavg"), runs)}, federation_of(config.data_spec, 0), None, 1, 0.0
            )
            if cost is None or not cost.seconds:
                unknown.append(name)
            else:
                total += runs * cost.seconds["fedavg"]
        return total / max(1, at_once), unknown

    def carry_out(
        self, units: Sequence[Unit], parallel: int | str | None = None, in_parts: bool = False
    ) -> Iterator[tuple[Unit, str | None]]:
        """Run units and store their outcomes. A unit that fails does not stop the others.

        Args:
            units: Units to run, such as those without an outcome.
            parallel: Number of concurrent units, ``auto``, or ``N@HOST:PORT`` on a Ray cluster whose nodes can access
                the data and the results under the same paths.
            in_parts: Whether each unit is stored in a file of its own, because other machines write to the same folder.

        Yields:
            Each finished unit, and the error with which it failed or None.
        """
        works = [Job(unit, run_unit, (unit, in_parts), after=self._before(unit, units)) for unit in units]
        try:
            yield from execute_jobs(works, num_parallel_jobs(parallel, len(units)), self)
        finally:
            with suppress(OSError):
                self.unfinished.rmdir()  # if it is empty

    def _before(self, unit: Unit, units: Sequence[Unit]) -> tuple[Unit, ...]:
        """Return the unit of the baseline, whose options a reference uses, if it is yet to run."""
        baseline = self.tuned_unit(unit.federation, self.suite.baseline)
        return (baseline,) if is_reference(unit.method) and baseline in units else ()


def run_unit(runs: SuiteRuns, unit: Unit, in_parts: bool, callbacks: Sequence[Callback]) -> str | None:
    """Tune a method on a federation, run the fresh seeds, and store the outcome.

    Args:
        runs: Suite of the unit.
        unit: Unit to run.
        in_parts: Whether the unit is stored in a file of its own.
        callbacks: Callbacks of the job; not used.

    Returns:
        The error with which the unit failed; None if its outcome was stored. If the method does not fit the data, the
        outcome is the reason.
    """
    settings = run_settings(runs.suite, runs.federations[unit.federation], runs.data)
    settings.setdefault("eval_every", max(1, math.ceil(experiment(settings).rounds / POINTS)))
    folder = runs.unfinished / f"{unit.federation}-{identity_hash(runs.identity(unit))}"
    if is_reference(unit.method):
        compute = partial(_reference, runs, unit, settings)
    else:
        compute = partial(_tuned, runs.suite, unit, settings, folder)
    store = write_outcome if in_parts else append_outcome
    try:
        with output_folder(folder, True, lambda: (folder / "study.db").exists()), _stopwatch(folder) as seconds:
            if read_outcome(runs.results, runs.identity(unit)) is None:  # else another command has finished it
                outcome = _result_or_reason(compute, folder)
                store(runs.results, unit.federation, runs.identity(unit), outcome | {"seconds": round(seconds(), 1)})
            shutil.rmtree(folder)
    except Exception as error:  # also out of memory: the other units continue, and this one has no outcome
        return f"{type(error).__name__}: {error}"
    return None


def _result_or_reason(compute: Callable[[], Outcome], folder: Path) -> Outcome:
    """Return the outcome of a unit, or the reason why the method does not fit the data.

    Another version of unskew may have written the folder. If a unit that continues fails, the folder is emptied, and the unit
    starts again.
    """
    continues = is_occupied(folder)
    try:
        return compute()
    except (ConfigError, DataError) as error:
        if not continues:
            return {"not_applicable": str(error)}
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != ".lock":
            path.unlink()
    return _result_or_reason(compute, folder)


@contextmanager
def _stopwatch(folder: Path) -> Iterator[Callable[[], float]]:
    """Context manager that returns a function for the seconds since the start, with those of earlier commands.

    Args:
        folder: Folder in which the seconds are stored for the next command, unless it is empty at the end.

    Yields:
        The function.
    """
    path = folder / "seconds.json"
    started = time.perf_counter()
    with suppress(OSError, ValueError, TypeError):
        started -= max(0.0, float(json.loads(path.read_text(encoding="utf-8"))))
    try:
        yield lambda: time.perf_counter() - started
    finally:
        if is_occupied(folder):
            path.write_text(json.dumps(round(time.perf_counter() - started, 1)), encoding="utf-8")


def own_space(suite: Suite, spelling: str) -> dict[str, Any]:
    """Return the search spaces of a suite that concern a method.

    Args:
        suite: The suite.
        spelling: Method expression.
    """
    owners = {name for name, _ in split_expression(spelling)}
    return {key: value for key, value in suite.space.items() if "." not in key or key.rpartition(".")[0] in owners}


def _tuned(suite: Suite, unit: Unit, settings: dict[str, Any], folder: Path) -> Outcome:
    """Return the outcome of tuning a method and running it with fresh seeds, with the finished trials in a folder."""
    result = tune(
        methods=[unit.method],
        trials=unit.trials,
        seeds=suite.seeds,
        seed=suite.tuning_seed,
        search_space={} if unit.trials == 1 else own_space(suite, unit.method),
        references=False,
        out=folder,
        resume=True,
        **settings,
    )
    [tuned], [summaries] = result.tuned.values(), result.comparison.summaries.values()
    [histories] = result.comparison.histories.values()
    return {
        "personal": tuned.judged_by.endswith("of personal models"),
        "options": tuned.options,
        "validation": {"configured": _rounded(tuned.configured), "tuned": _rounded(tuned.value)},
        "trials": tuned.trials,
        **results_of_runs(summaries, histories),
    }


def _reference(runs: SuiteRuns, unit: Unit, settings: dict[str, Any]) -> Outcome:
    """Return the outcome of a reference, which uses the tuned training options of the baseline."""
    suite = runs.suite
    try:
        baseline = read_outcome(runs.results, runs.identity(runs.tuned_unit(unit.federation, suite.baseline)))
    except DataError as error:  # else the error would be stored as the reason why the reference is not applicable
        raise EngineError(str(error)) from error
    if baseline is None or "options" not in baseline:
        raise EngineError(f"{unit.method} uses the options of {suite.baseline}, which has no outcome. Run it first.")
    options = {name: value for name, value in baseline["options"].items() if name in SHARED}
    share, alone = experiment(settings).participation, is_local(unit.method)
    spelling = unit.method if alone or share == 1 else f"{unit.method}:participation={share:g}"
    for name in options:
        settings = without_rival(settings, name)
    summaries, histories = [], []
    for seed in suite.seeds:
        values = {**settings, **options, "seed": seed, "method": spelling}
        result = run_experiment(experiment(reference_config(values, spelling)), method=method(spelling))
        summaries.append(without_global_model(result.summary) if alone else result.summary)
        histories.append([] if alone else result.history)
    return {"personal": False, "options": options, **results_of_runs(summaries, histories)}


def results_of_runs(summaries: Sequence[Mapping[str, Any]], histories: Sequence[Sequence[dict[str, Any]]]) -> Outcome:
    """Return the metrics, curves and traffic of runs with different seeds, rounded to five digits.

    Metrics are those of the kept model. Curves have a value for each round that was evaluated with any seed, None where a
    run has none, because it stopped early or its metric is undefined. A run with a closing step has its last round twice,
    before and after the step. Bytes are listed for each seed if they differ. If the objective is a custom metric, its
    direction is stored in ``own_metrics``.

    Args:
        summaries: Summary of each run.
        histories: History of each run, one row per round; empty without a global model.
    """
    histories = [with_closing(*run) for run in zip(histories, summaries, strict=True)]
    summaries = [*map(final_metrics, summaries)]
    objective = objective_metric(summaries[0]).name
    name = primary_metric_name(summaries[0]) if objective == WORST else objective
    names = [f"{whose}_{name}_{what}" for whose in ("client", "personal") for what in ("mean", "worst")]
    metrics = [
        {key: _rounded(summary[key]) for key in (objective, *names) if summary.get(key) is not None}
        | {"bytes": summary["bytes_up"] + summary["bytes_down"], "diverged": bool(summary.get("diverged"))}
        for summary in summaries
    ]
    scored = [_rows_by_round(history, objective) for history in histories]
    keys = sorted({key for rows in scored for key in rows})

    def curves(value: Callable[[Mapping[str, Any]], float | None]) -> list[list[float | None]]:
        return [[value(rows[key]) if key in rows else None for key in keys] for rows in scored]

    sent = curves(lambda row: row["bytes_up"] + row["bytes_down"])
    results: Outcome = {
        "rounds": [round for round, _ in keys],
        "bytes": sent[0] if all(own == sent[0] for own in sent) else sent,
        "curves": curves(lambda row: _rounded(row[objective])),
    }
    if any("seconds_simulated" in row for row in scored[0].values()):
        results["seconds_simulated"] = curves(lambda row: _rounded(row["seconds_simulated"]))
    directions = {key: way for key, way in summaries[0].get("own_metrics", {}).items() if key == objective}
    if directions:
        results["own_metrics"] = directions
    return {"objective": objective, "client_metric": name, "summaries": metrics, **results}


def _rows_by_round(history: Sequence[Mapping[str, Any]], objective: str) -> dict[tuple[int, bool], Mapping[str, Any]]:
    """Return the rows with a value of the objective, by round and whether the row is after the closing step."""
    rows: dict[tuple[int, bool], Mapping[str, Any]] = {}
    for previous, row in zip([{}, *history], history, strict=False):
        if row.get(objective) is not None:
            rows[row["round"], row["round"] == previous.get("round")] = row
    return rows


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")
