"""Carrying out the runs of a table: what is finished is reused, what was interrupted goes on, what is common runs once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from unskew.config.experiment import Experiment
from unskew.data.federation import Federation
from unskew.data.load import federation_of
from unskew.data.spec import DataSpec
from unskew.errors import ConfigError, DataError
from unskew.methods.catalogue import method
from unskew.records.recorder import Callback
from unskew.records.result import read_history
from unskew.reproduction.earlier import as_earlier
from unskew.reproduction.outcomes import Outcome, keep, kept, key_of, outcome_files
from unskew.reproduction.preset import Cell, Preset, cells
from unskew.runs.checks import check_method
from unskew.runs.preparation import SYNTHETIC
from unskew.runs.run import finished_rounds, resume, run_experiment

Follow = Callable[[str, bool], Sequence[Callback]]
"""From the title of a run, and whether it is only the common part of others, to its callbacks."""


class Sweep:
    """The runs of one table.

    Args:
        preset: The table.
        scale: ``smoke``, ``cpu`` or ``paper``.
        runs: Where run folders are made; they may be removed afterwards.
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
        self._data: tuple[tuple[DataSpec, int], Federation] | None = None

    def cells(self, seed: int) -> list[Cell]:
        """The chosen runs for a seed."""
        table = cells(self.preset, self.scale, seed, self.extra, self.otherwise)
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

    def known(self, seeds: Sequence[int]) -> list[tuple[Cell, Outcome]]:
        """What is there of the table, also of the scale's other settings if there is nothing of the first; needs no data."""
        outcomes = list(self.found(seeds))
        at_scale = self.preset.scales.get(self.scale)
        if not outcomes and at_scale is not None and at_scale.otherwise:
            self.otherwise = True
            outcomes = list(self.found(seeds))
        return outcomes

    def carry_out(self, seeds: Sequence[int]) -> Iterator[tuple[Cell, Outcome]]:
        """Every chosen run and its outcome, seed by seed; before the first is trained, every row's method is checked."""
        self._check(seeds[0])
        for seed in seeds:
            for cell in self.cells(seed):
                yield cell, self._outcome(cell)

    def found(self, seeds: Sequence[int]) -> Iterator[tuple[Cell, Outcome]]:
        """The runs whose outcomes are there already, else those of the same run before a default changed; nothing is run."""
        files, cells = outcome_files(self.results), self.cells(0)
        for seed in seeds:
            for cell in (cell.of_seed(seed) for cell in cells):
                for one in filter(None, (cell, as_earlier(cell))):
                    outcome = kept(files, one.config, one.parent)
                    if outcome is not None:
                        yield one, outcome
                        break

    def folder(self, cell: Cell) -> Path | None:
        """The folder of a cell's finished run, if it is still there."""
        folder = self.runs / key_of(cell.config, cell.parent)
        return folder if (folder / "summary.json").is_file() else None

    def federation(self, config: Experiment) -> Federation:
        """The data of a run; the last are kept, as neighbours in a table often share them."""
        key = config.data_spec, config.seed
        if self._data is None or self._data[0] != key:
            self._data = key, federation_of(*key)
        return self._data[1]

    def _check(self, seed: int) -> None:
        """Refuse a method that does not fit now and not after hours; columns differ in data only, so one will do."""
        files = outcome_files(self.results)
        open_ = [cell for cell in self.cells(seed) if kept(files, cell.config, cell.parent) is None]
        for cell in open_:
            if cell.column == open_[0].column:
                check_method(cell.config, self.federation(cell.config), None, method(cell.config.method))

    def _outcome(self, cell: Cell) -> Outcome:
        outcome = kept(self.results, cell.config, cell.parent)
        if outcome is not None:
            return outcome
        config = cell.config
        if cell.parent is not None:
            start = self._run(
                cell.parent, None, f"{self.preset.name}, common rounds, {cell.column}, seed {config.seed}", common=True
            )
            config = config.model_copy(update={"start_from": str(start)})
        title = f"{cell.row}, {cell.column}, seed {config.seed}"
        folder = self._run(config, cell.parent, title)
        outcome = kept(self.results, cell.config, cell.parent)
        assert outcome is not None, f"the run in {folder} was not kept"
        return outcome

    def _run(self, config: Experiment, parent: Experiment | None, title: str, common: bool = False) -> Path:
        """Carry out a run in its folder unless it is finished; gives the folder."""
        folder, shared = self.runs / key_of(config, parent), self.runs / SYNTHETIC
        if (folder / "config.yaml").is_file() and finished_rounds(folder) == config.rounds:
            history, summary = read_history(folder), json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        else:
            federation, callbacks = self.federation(config), list(self.follow(title, common))
            if (folder / "config.yaml").is_file():
                machine = {k: getattr(config, k) for k in ("engine", "workers", "together", "device")}
                result = resume(folder, federation=federation, callbacks=callbacks, shared=shared, **machine)
            else:
                result = run_experiment(config, federation=federation, out=folder, callbacks=callbacks, shared=shared)
            history, summary = result.history, result.summary
        keep(self.results, config, parent, history, summary)
        return folder
