"""Execution of a table's runs: finished runs are reused, interrupted ones resumed, common rounds trained once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unskew.comparison.single_run import last
from unskew.config.experiment import Experiment
from unskew.data.federation import Federation
from unskew.engines.registry import pick_device
from unskew.errors import ConfigError, DataError
from unskew.generators.synthetic_dataset import SYNTHETIC
from unskew.methods.registry import method
from unskew.records.recorder import Callback
from unskew.records.result import read_about, read_history, read_summary
from unskew.reproduction.outcomes import (
    EARLIER,
    Outcome,
    experiment_hash,
    store_outcome,
    stored_outcome,
    stored_outcomes,
)
from unskew.reproduction.preset import MARK, Preset, PresetCell, preset_cells
from unskew.reproduction.time_limit import RunSpeeds, StopInTime, TableProgress, TimeIsOverError, TimeLimit
from unskew.runs.parallel import STACKED, check_parallel, execute_jobs, num_parallel_runs
from unskew.runs.process_pool import Job
from unskew.runs.run import finished_rounds, resume, run_experiment
from unskew.runs.validation import resolve_run
from unskew.simulation.checkpoint import newest_checkpoint

Sources = tuple[str, str | None, int | str | None, str | None]
"""Data of a run and of its server, with their paths."""
Storage = tuple[Path, Path, str]
"""Folder for run folders, folder of the outcomes, and name of the table."""
Follow = Callable[[str, bool], Sequence[Callback]]
"""Returns the callbacks of a run for its title and whether it is only the common part of other runs."""


@dataclass
class Sweep:
    """Runs of one table.

    Attributes:
        preset: Preset of the table.
        scale: ``smoke``, ``cpu`` or ``paper``.
        runs: Folder for run folders, which may be removed afterwards.
        results: Folder of the outcomes.
        extra: Settings of this machine (``data_path``, ``engine``, ``device``).
        rows: Rows to run; None for all.
        columns: Columns to run; None for all.
        follow: Creates the callbacks of a run.
        warn: Receives a sentence about rows whose data are not available.
        limit: Time in which runs are executed; None for no limit.
        otherwise: Whether the scale's settings for unavailable data are used.
    """

    preset: Preset
    scale: str
    runs: Path
    results: Path
    extra: dict[str, Any]
    rows: Sequence[str] | None = None
    columns: Sequence[str] | None = None
    follow: Follow = lambda title, common: ()
    warn: Callable[[str], object] = lambda text: None
    limit: TimeLimit | None = None
    otherwise: bool = field(default=False, init=False)
    _seeds: Sequence[int] = field(default=(), init=False)
    _unavailable: set[Sources] = field(default_factory=set, init=False)
    _at_once: int = field(default=1, init=False)
    _speeds: RunSpeeds | None = field(default=None, init=False)

    def cells(self, seed: int) -> list[PresetCell]:
        """Return the chosen runs for a seed."""
        table = preset_cells(self.preset, self.scale, seed, self.extra, self.otherwise)
        return [
            c for c in table if (not self.rows or c.row in self.rows) and (not self.columns or c.column in self.columns)
        ]

    def settle(self) -> str | None:
        """Switch to the scale's other settings if the data are not available, and return the reason."""
        at_scale = self.preset.scales.get(self.scale)
        if at_scale is None or not at_scale.otherwise or "data_path" in self.extra:
            return None
        try:
            self.federation(self.cells(0)[0].config)
        except (DataError, ConfigError) as error:
            self.otherwise = True
            return str(error)
        return None

    def known(self, seeds: Sequence[int]) -> list[tuple[PresetCell, Outcome]]:
        """Return stored outcomes of the table; without any, those of the scale's other settings. Needs no data."""
        outcomes = list(self.found(seeds))
        at_scale = self.preset.scales.get(self.scale)
        if not outcomes and at_scale is not None and at_scale.otherwise:
            self.otherwise = True
            outcomes = list(self.found(seeds))
        return outcomes

    def carry_out(self, seeds: Sequence[int], parallel: int | str | None = None) -> list[tuple[PresetCell, Outcome]]:
        """Execute the chosen runs and return those with an outcome; all methods are validated before the first run.

        Args:
            seeds: Seeds of the runs.
            parallel: Number of concurrent runs, ``auto``, or ``stacked`` to train the seeds of a run together, which is the
                default on a GPU without a time limit.

        Raises:
            ConfigError: If runs with a time limit are to be trained together.
        """
        check_parallel(parallel)
        if self.limit is not None:
            if parallel == STACKED:
                raise ConfigError(
                    "With a time limit, runs end one by one; parallel=stacked trains them together. Remove one of the two."
                )
            parallel = parallel or 1
        self._seeds = seeds
        size, self._unavailable = self._check(seeds[0])
        works = self._works(self._available())
        configs = [work.arguments[0] for work in works]
        at_once = num_parallel_runs(parallel, configs, size)
        self._at_once = max(1, int(at_once))
        if self.limit is not None:
            self.limit.begin()
        with suppress(TimeIsOverError):
            for _ in execute_jobs(works, at_once, (self.runs, self.results, self.preset.name), configs):
                self._speeds = None
        return list(self.found(seeds))

    def progress(self) -> TableProgress:
        """Return which runs of the last ``carry_out`` are finished, and how long the others will take."""
        self._speeds = None
        table = self._available()
        open_ = [cell for cell in table if stored_outcome(self.results, cell.config, cell.parent) is None]
        in_progress = {}
        for cell in open_:
            before = 0 if cell.parent is None else self._saved(experiment_hash(cell.parent))[0]
            if done := max(before, self._saved(experiment_hash(cell.config, cell.parent))[0]):
                in_progress[self._title(cell)] = done, cell.config.rounds
        expected = []
        for work in self._works(table):
            config, parent = work.arguments
            done = max(parent.rounds if parent else 0, self._saved(str(work.name))[0])
            expected.append(self._run_speeds().seconds(config, parent, config.rounds - done, guess=True))
        known = [seconds for seconds in expected if seconds is not None]
        rest = sum(known) / self._at_once if len(known) == len(expected) else None
        return TableProgress(len(table) - len(open_), in_progress, len(open_) - len(in_progress), rest)

    def _available(self) -> list[PresetCell]:
        """Return the runs whose data are available, or that are finished, in the order in which they are executed.

        The first row and those of the paper's own method come first, and all seeds of a column before the next column.
        """
        cells = [cell for seed in self._seeds for cell in self.cells(seed)]
        paper, first = self.preset.name.partition("/")[0], next(iter(self.preset.rows))
        columns = list(dict.fromkeys(cell.column for cell in cells))
        cells.sort(key=lambda cell: (cell.row != first and paper not in cell.row.lower(), columns.index(cell.column)))
        return [
            cell
            for cell in cells
            if sources_of(cell) not in self._unavailable or stored_outcome(self.results, cell.config, cell.parent)
        ]

    def _works(self, table: Sequence[PresetCell]) -> list[Job]:
        """Return the jobs of runs without an outcome, each once, preceded by the common rounds that they start from."""
        works: dict[str, Job] = {}

        def add(config: Experiment, parent: Experiment | None, title: str, after: tuple[str, ...] = ()) -> str:
            name = experiment_hash(config, parent)
            follow = partial(self._followers, title, config.base_run)
            ready = partial(self._may_start, name, config, parent)
            works.setdefault(name, Job(name, run_cell, (config, parent), follow, after, ready))
            return name

        for cell in table:
            if stored_outcome(self.results, cell.config, cell.parent) is not None:
                continue
            config, after = cell.config, tuple[str, ...]()
            if cell.parent is not None:
                title = f"{self.preset.name}, common rounds, {cell.column}, seed {config.seed}"
                after = (add(cell.parent, None, title),)
                config = config.model_copy(update={"start_from": str(self.runs / after[0])})
            add(config, cell.parent, self._title(cell), after)
        return list(works.values())

    def _may_start(self, name: str, config: Experiment, parent: Experiment | None) -> bool:
        """Return whether there is time to start or continue a run."""
        if self.limit is None:
            return True
        if (self.runs / name / "config.yaml").is_file():
            return self.limit.remaining > 0
        rounds = config.rounds - (parent.rounds if parent else 0)
        return self.limit.admits(self._run_speeds().seconds(config, parent, rounds))

    def _run_speeds(self) -> RunSpeeds:
        """Return the speeds of the table's runs that were executed on this machine."""
        if self._speeds is not None:
            return self._speeds
        self._speeds, stored = RunSpeeds(), stored_outcomes(self.results)
        cells = [cell for seed in self._seeds for cell in self.cells(seed)]
        device = pick_device(cells[0].config.device)
        here = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type, os.cpu_count()

        def measured(name: str) -> tuple[int, float] | None:
            if name not in stored:
                machine = read_about(self.runs / name).get("machine", {})
                return self._saved(name) if (machine.get("device"), machine.get("cores")) == here else None
            machine, summary = (stored[name].outcome[part] for part in ("made_with", "summary"))
            same = (machine.get("device", "cpu"), machine.get("cores")) == here
            return (summary["rounds"], summary["seconds"]) if same else None

        for cell in cells:
            before = None if cell.parent is None else measured(experiment_hash(cell.parent))
            its = measured(experiment_hash(cell.config, cell.parent))
            if cell.parent is not None and before:
                self._speeds.add(cell.parent, None, *before)
            if its and (before or cell.parent is None):
                rounds, seconds = before or (0, 0.0)
                self._speeds.add(cell.config, cell.parent, its[0] - rounds, its[1] - seconds)
        return self._speeds

    def _saved(self, name: str) -> tuple[int, float]:
        """Return the number and the seconds of the rounds of a run that are in its newest checkpoint."""
        newest = newest_checkpoint(self.runs / name / "checkpoints")
        return (0, 0.0) if newest is None else (int(newest[1]["round"]), newest[1]["extra"]["seconds"])

    def found(self, seeds: Sequence[int]) -> Iterator[tuple[PresetCell, Outcome]]:
        """Yield runs with a stored outcome, or with one of the same run before a default changed; nothing is run."""
        stored = stored_outcomes(self.results)
        for cell in (cell.of_seed(seed) for cell in self.cells(0) for seed in seeds):
            key = experiment_hash(cell.config, cell.parent)
            if key in stored:
                yield cell, stored[key].outcome
            elif EARLIER + key in stored:
                yield replace(cell, row=cell.row + MARK), stored[EARLIER + key].outcome

    def folder(self, cell: PresetCell) -> Path | None:
        """Return the folder of a cell's finished run, if it still exists."""
        folder = self.runs / experiment_hash(cell.config, cell.parent)
        return folder if (folder / "summary.json").is_file() else None

    def federation(self, config: Experiment) -> Federation:
        """Return the data of a run; the last ones are cached, because consecutive runs often share them."""
        return last.of(config)

    def _check(self, seed: int) -> tuple[int, set[Sources]]:
        """Load all data and validate all methods before the first run.

        Of columns with the same sources one suffices, because they differ only in the partition.

        Returns:
            Number of parameters of the largest model, and the sources that are not available, which some rows do without.

        Raises:
            ConfigError: If a method does not fit, or no source is available.
            DataError: If no source is available.
        """
        open_ = [cell for cell in self.cells(seed) if stored_outcome(self.results, cell.config, cell.parent) is None]
        sizes, errors = dict[Sources, int](), dict[Sources, DataError | ConfigError]()
        for cell in open_:
            sources = sources_of(cell)
            if sources in errors or (sources in sizes and cell.column != open_[0].column):
                continue
            try:
                federation = self.federation(cell.config)
            except (DataError, ConfigError) as error:
                errors[sources] = error
                continue
            size = resolve_run(cell.config, federation, None, method(cell.config.method)).spec.size
            sizes[sources] = max(size, sizes.get(sources, 0))
        if errors and not sizes:
            raise next(iter(errors.values()))
        for reason in dict.fromkeys(map(str, errors.values())):
            rows = dict.fromkeys(c.row for c in open_ if str(errors.get(sources_of(c))) == reason)
            self.warn(f"Not run without their data: {', '.join(rows)}. {reason}")
        return max(sizes.values(), default=0), {*errors}

    @staticmethod
    def _title(cell: PresetCell) -> str:
        return f"{cell.row}, {cell.column}, seed {cell.config.seed}"

    def _followers(self, title: str, common: bool) -> list[Callback]:
        stop = [] if self.limit is None else [StopInTime(self.limit)]
        return [*self.follow(title, common), *stop]


def sources_of(cell: PresetCell) -> Sources:
    """Return the data of a cell's run and of its server, with their paths."""
    config = cell.config
    return config.data, config.data_path, config.server_data, config.server_data_path


def run_cell(storage: Storage, config: Experiment, parent: Experiment | None, callbacks: list[Callback]) -> None:
    """Run an experiment in its folder unless it is finished, and store its outcome.

    Args:
        storage: Folder for run folders, folder of the outcomes, and name of the table.
        config: Configuration of the run.
        parent: Configuration of the run that it starts from, or None.
        callbacks: Callbacks of the run.
    """
    runs, results, table = storage
    folder, shared = runs / experiment_hash(config, parent), runs / SYNTHETIC
    if (folder / "config.yaml").is_file() and finished_rounds(folder) == config.rounds:
        history, summary = read_history(folder), read_summary(folder)
    else:
        federation = last.of(config)
        if (folder / "config.yaml").is_file():
            machine = {k: getattr(config, k) for k in ("engine", "workers", "clients_per_group", "device")}
            result = resume(folder, federation=federation, callbacks=callbacks, shared=shared, **machine)
        else:
            result = run_experiment(config, federation=federation, out=folder, callbacks=callbacks, shared=shared)
        history, summary = result.history, result.summary
    if stored_outcome(results, config, parent) is None:
        device = read_about(folder).get("machine", {}).get("device", "cpu")
        store_outcome(results, table, config, parent, history, summary, device)
