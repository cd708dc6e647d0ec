"""Carrying out the runs of a table: what is finished is reused, what was interrupted goes on, what is common runs once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from unskew.comparison.single_run import FederationCache, last
from unskew.config.experiment import Experiment
from unskew.data.federation import Federation
from unskew.errors import ConfigError, DataError
from unskew.methods.registry import method
from unskew.records.recorder import Callback
from unskew.records.result import read_history
from unskew.reproduction.legacy_outcomes import legacy_identity
from unskew.reproduction.outcomes import Outcome, experiment_hash, outcome_files, store_outcome, stored_outcome
from unskew.reproduction.preset import Preset, PresetCell, preset_cells
from unskew.runs.parallel import check_parallel, num_parallel_runs, run_in_pool, run_jobs
from unskew.runs.preparation import SYNTHETIC
from unskew.runs.process_pool import Job
from unskew.runs.run import finished_rounds, resume, run_experiment
from unskew.runs.validation import check_method

Follow = Callable[[str, bool], Sequence[Callback]]
"""From the title of a run, and whether it is only the common part of others, to its callbacks."""


class Sweep:
    """The runs of one table.

    Args:
        preset: The table.
        scale: ``smoke``, ``cpu`` or ``paper``.
        runs: Folder for run folders; they may be removed afterwards.
        results: Where outcomes are kept.
        extra: Settings of the machine at hand (``data_path``, ``engine``, ``device``).
        rows, columns: Only these; all if None.
        follow: Gives the callbacks of a run.
    """

    def __init__(
        self,
        preset: Preset,
        scale: str,
        runs: Path,
        results: Path,
        extra: dict[str, Any],
        rows: Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        follow: Follow = lambda title, common: (),
    ):
        self.preset, self.scale, self.runs, self.results = preset, scale, runs, results
        self.extra, self.rows, self.columns, self.follow = extra, rows, columns, follow
        self.otherwise = False
        self._last = FederationCache()

    def cells(self, seed: int) -> list[PresetCell]:
        """The chosen runs for a seed."""
        table = preset_cells(self.preset, self.scale, seed, self.extra, self.otherwise)
        return [
            c for c in table if (not self.rows or c.row in self.rows) and (not self.columns or c.column in self.columns)
        ]

    def settle(self) -> str | None:
        """Take the scale's other settings if the data are not at hand; gives the reason, to be told."""
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
        """Return existing outcomes of the table, of the scale's other settings if the first have none; needs no data."""
        outcomes = list(self.found(seeds))
        at_scale = self.preset.scales.get(self.scale)
        if not outcomes and at_scale is not None and at_scale.otherwise:
            self.otherwise = True
            outcomes = list(self.found(seeds))
        return outcomes

    def carry_out(self, seeds: Sequence[int], parallel: int | str = 1) -> Iterator[tuple[PresetCell, Outcome]]:
        """Every chosen run and its outcome, seed by seed; before the first is trained, every row's method is checked.

        Args:
            seeds: Which.
            parallel: Runs at a time, or ``auto``; all of them are made before the first outcome is given then.
        """
        check_parallel(parallel)
        size = self._check(seeds[0])
        table = [cell for seed in seeds for cell in self.cells(seed)]
        works = [] if parallel == 1 else self._works(table)
        at_once = num_parallel_runs(parallel, [work.arguments[0] for work in works], size)
        if run_in_pool(at_once):
            for _ in run_jobs(works, at_once, (self.runs, self.results)):
                pass
        for cell in table:
            yield cell, self._outcome(cell)

    def _works(self, table: Sequence[PresetCell]) -> list[Job]:
        """The runs that are not made yet, each once, and before them the common rounds that they begin with."""
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
                works.setdefault(begun.name, Job(begun.name, _beside, (cell.parent, None), follow))
            name, follow = experiment_hash(cell.config, cell.parent), partial(self._followers, self._title(cell), False)
            works.setdefault(name, Job(name, _beside, (config, cell.parent), follow, after))
        return list(works.values())

    def found(self, seeds: Sequence[int]) -> Iterator[tuple[PresetCell, Outcome]]:
        """The runs whose outcomes are there already, else those of the same run before a default changed; nothing is run."""
        files, cells = outcome_files(self.results), self.cells(0)
        for seed in seeds:
            for cell in (cell.of_seed(seed) for cell in cells):
                for identity in filter(None, (cell, legacy_identity(cell))):
                    outcome = stored_outcome(files, identity.config, identity.parent)
                    if outcome is not None:
                        yield identity, outcome
                        break

    def folder(self, cell: PresetCell) -> Path | None:
        """The folder of a cell's finished run, if it is still there."""
        folder = self.runs / experiment_hash(cell.config, cell.parent)
        return folder if (folder / "summary.json").is_file() else None

    def federation(self, config: Experiment) -> Federation:
        """The data of a run; the last are kept, as neighbours in a table often share them."""
        return self._last.of(config)

    def _check(self, seed: int) -> int:
        """Refuse a method that does not fit now and not after hours; columns differ in data only, so one will do.

        Gives the parameters of the largest model.
        """
        files = outcome_files(self.results)
        open_ = [cell for cell in self.cells(seed) if stored_outcome(files, cell.config, cell.parent) is None]
        sizes = [
            check_method(cell.config, self.federation(cell.config), None, method(cell.config.method))[0].size
            for cell in open_
            if cell.column == open_[0].column
        ]
        return max(sizes, default=0)

    @staticmethod
    def _title(cell: PresetCell) -> str:
        return f"{cell.row}, {cell.column}, seed {cell.config.seed}"

    def _common(self, cell: PresetCell, parent: Experiment) -> tuple[Path, str]:
        """The folder and the title of the rounds that a run has in common with others."""
        return self.runs / experiment_hash(
            parent
        ), f"{self.preset.name}, common rounds, {cell.column}, seed {cell.config.seed}"

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
        assert outcome is not None, f"the run in {folder} was not kept"
        return outcome

    def _run(self, config: Experiment, parent: Experiment | None, title: str, common: bool = False) -> Path:
        callbacks = partial(self._followers, title, common)
        return run_cell((self.runs, self.results), self._last, config, parent, callbacks)


def run_cell(
    folders: tuple[Path, Path],
    data: FederationCache,
    config: Experiment,
    parent: Experiment | None,
    follow: Callable[[], list[Callback]],
) -> Path:
    """Carry out a run in its folder unless it is finished, and keep its outcome; gives the folder.

    Args:
        folders: Folder for run folders, and where outcomes are kept.
        data: Gives its data.
        config: The run.
        parent: The one that it begins from, if there is one.
        follow: Gives its followers, if it is made.
    """
    runs, results = folders
    folder, shared = runs / experiment_hash(config, parent), runs / SYNTHETIC
    if (folder / "config.yaml").is_file() and finished_rounds(folder) == config.rounds:
        history, summary = read_history(folder), json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    else:
        federation, callbacks = data.of(config), follow()
        if (folder / "config.yaml").is_file():
            machine = {k: getattr(config, k) for k in ("engine", "workers", "clients_per_group", "device")}
            result = resume(folder, federation=federation, callbacks=callbacks, shared=shared, **machine)
        else:
            result = run_experiment(config, federation=federation, out=folder, callbacks=callbacks, shared=shared)
        history, summary = result.history, result.summary
    store_outcome(results, config, parent, history, summary)
    return folder


def _beside(
    folders: tuple[Path, Path], config: Experiment, parent: Experiment | None, callbacks: list[Callback]
) -> None:
    """A run in a process of its own, which keeps its outcome."""
    run_cell(folders, last, config, parent, lambda: callbacks)
