"""Execution of a table's runs: finished runs are reused, interrupted ones resumed, common rounds trained once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from unskew.comparison.single_run import FederationCache, last
from unskew.config.experiment import Experiment
from unskew.data.federation import Federation
from unskew.engines.auto_select import planned_runs
from unskew.errors import ConfigError, DataError
from unskew.generators.synthetic_dataset import SYNTHETIC
from unskew.methods.registry import method
from unskew.records.recorder import Callback
from unskew.records.result import read_history, read_summary
from unskew.reproduction.outcomes import (
    EARLIER,
    Outcome,
    experiment_hash,
    store_outcome,
    stored_outcome,
    stored_outcomes,
)
from unskew.reproduction.preset import MARK, Preset, PresetCell, preset_cells
from unskew.runs.parallel import check_parallel, num_parallel_runs, run_in_pool, run_jobs
from unskew.runs.process_pool import Job
from unskew.runs.run import finished_rounds, resume, run_experiment
from unskew.runs.validation import resolve_run

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
    otherwise: bool = field(default=False, init=False)
    _last: FederationCache = field(default_factory=FederationCache, init=False)

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

    def carry_out(self, seeds: Sequence[int], parallel: int | str = 1) -> Iterator[tuple[PresetCell, Outcome]]:
        """Yield every chosen run with its outcome, seed by seed; all methods are validated before the first run.

        Args:
            seeds: Seeds of the runs.
            parallel: Number of concurrent runs, or ``auto``; with more than one, all runs finish before the first
                yield.

        Yields:
            Runs with their outcomes.
        """
        check_parallel(parallel)
        size, unavailable = self._check(seeds[0])
        table = [cell for seed in seeds for cell in self.cells(seed)]
        table = [
            c for c in table if sources_of(c) not in unavailable or stored_outcome(self.results, c.config, c.parent)
        ]
        works = [] if parallel == 1 else self._works(table)
        at_once = num_parallel_runs(parallel, [work.arguments[0] for work in works], size)
        if run_in_pool(at_once):
            for _ in run_jobs(works, at_once, (self.runs, self.results, self.preset.name)):
                pass
        for cell in table:
            with planned_runs(len(table)):
                outcome = self._outcome(cell)
            yield cell, outcome

    def _works(self, table: Sequence[PresetCell]) -> list[Job]:
        """Return the jobs of runs without an outcome, each once, preceded by the common rounds that they start from."""
        works: dict[str, Job] = {}
        for cell in table:
            if stored_outcome(self.results, cell.config, cell.parent) is not None:
                continue
            config, after = cell.config, tuple[str, ...]()
            if cell.parent is not None:
                begun, title = self._common(cell, cell.parent)
                after = (begun.name,)
                config = config.model_copy(update={"start_from": str(begun)})
                follow = partial(self._followers, title, True)
                works.setdefault(begun.name, Job(begun.name, _run_in_worker, (cell.parent, None), follow))
            name, follow = experiment_hash(cell.config, cell.parent), partial(self._followers, self._title(cell), False)
            works.setdefault(name, Job(name, _run_in_worker, (config, cell.parent), follow, after))
        return list(works.values())

    def found(self, seeds: Sequence[int]) -> Iterator[tuple[PresetCell, Outcome]]:
        """Yield runs with a stored outcome, or with one of the same run before a default changed; nothing is run."""
        stored, cells = stored_outcomes(self.results), self.cells(0)
        for seed in seeds:
            for cell in (cell.of_seed(seed) for cell in cells):
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
        return self._last.of(config)

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

    def _common(self, cell: PresetCell, parent: Experiment) -> tuple[Path, str]:
        """Return the folder and the title of the rounds that a run shares with others."""
        title = f"{self.preset.name}, common rounds, {cell.column}, seed {cell.config.seed}"
        return self.runs / experiment_hash(parent), title

    def _followers(self, title: str, common: bool) -> list[Callback]:
        return list(self.follow(title, common))

    def _outcome(self, cell: PresetCell) -> Outcome:
        outcome = stored_outcome(self.results, cell.config, cell.parent)
        if outcome is not None:
            return outcome
        config = cell.config
        if cell.parent is not None:
            start, title = self._common(cell, cell.parent)
            self._run(cell.parent, None, title, common=True)
            config = config.model_copy(update={"start_from": str(start)})
        folder = self._run(config, cell.parent, self._title(cell))
        outcome = stored_outcome(self.results, cell.config, cell.parent)
        assert outcome is not None, f"the outcome of the run in {folder} was not stored"
        return outcome

    def _run(self, config: Experiment, parent: Experiment | None, title: str, common: bool = False) -> Path:
        callbacks = partial(self._followers, title, common)
        return run_cell((self.runs, self.results, self.preset.name), self._last, config, parent, callbacks)


def sources_of(cell: PresetCell) -> Sources:
    """Return the data of a cell's run and of its server, with their paths."""
    config = cell.config
    return config.data, config.data_path, config.server_data, config.server_data_path


def run_cell(
    storage: Storage,
    data: FederationCache,
    config: Experiment,
    parent: Experiment | None,
    follow: Callable[[], list[Callback]],
) -> Path:
    """Run an experiment in its folder unless it is finished, store its outcome and return the folder.

    Args:
        storage: Folder for run folders, folder of the outcomes, and name of the table.
        data: Cache of federations.
        config: Configuration of the run.
        parent: Configuration of the run that it starts from, or None.
        follow: Creates the callbacks if the run is executed.
    """
    runs, results, table = storage
    folder, shared = runs / experiment_hash(config, parent), runs / SYNTHETIC
    if (folder / "config.yaml").is_file() and finished_rounds(folder) == config.rounds:
        history, summary = read_history(folder), read_summary(folder)
    else:
        federation, callbacks = data.of(config), follow()
        if (folder / "config.yaml").is_file():
            machine = {k: getattr(config, k) for k in ("engine", "workers", "clients_per_group", "device")}
            result = resume(folder, federation=federation, callbacks=callbacks, shared=shared, **machine)
        else:
            result = run_experiment(config, federation=federation, out=folder, callbacks=callbacks, shared=shared)
        history, summary = result.history, result.summary
    store_outcome(results, table, config, parent, history, summary)
    return folder


def _run_in_worker(storage: Storage, config: Experiment, parent: Experiment | None, callbacks: list[Callback]) -> None:
    """Run an experiment in a worker process, which stores its outcome."""
    run_cell(storage, last, config, parent, lambda: callbacks)
