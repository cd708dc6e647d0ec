"""Single run of a comparison, in this process or in another one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unskew.comparison.client_records import read_clients
from unskew.comparison.summary_statistics import check_summary
from unskew.config.experiment import Experiment
from unskew.config.loader import experiment, load_yaml
from unskew.config.paths import with_absolute_paths
from unskew.data.federation import Federation
from unskew.data.load import federation_of
from unskew.data.spec import DataSpec
from unskew.errors import CheckpointError, ConfigError
from unskew.protocol.rules import Method
from unskew.records.recorder import Callback
from unskew.records.result import read_history, read_summary
from unskew.runs.build_model import ModelLike
from unskew.runs.resume import check_same
from unskew.runs.run import check_unfinished, finished_rounds, run_experiment

RunRecords = tuple[list[dict[str, Any]], dict[str, Any], list[dict[str, Any]]]
"""History and summary of a run, and a row for each evaluated client."""
Given = tuple[Federation | None, ModelLike | None, dict[str, Method]]
"""Data and model given in Python, if any, and the methods by name."""


class FederationCache:
    """Cache of the last run's data, because consecutive runs often share them."""

    def __init__(self) -> None:
        self._data: tuple[tuple[DataSpec, int], Federation] | None = None

    def of(self, config: Experiment) -> Federation:
        """Return the data of a run."""
        key = config.data_spec, config.seed
        if self._data is None or self._data[0] != key:
            self._data = key, federation_of(*key)
        return self._data[1]


last = FederationCache()
"""Data of the last run in this process."""


def run_or_resume(
    given: Given, name: str, config: Experiment, folder: Path | None, shared: Path | None, callbacks: Sequence[Callback]
) -> RunRecords:
    """Run a method, resume its run, or read its results if it is finished.

    Args:
        given: Data, model and methods of the comparison.
        name: Method expression.
        config: Configuration of the run.
        folder: Run folder, or None.
        shared: Folder for prepared data that all runs share.
        callbacks: Callbacks of the run.

    Raises:
        ConfigError: If the folder contains another run.
    """
    federation, model, methods = given
    method = methods[name]
    begun = folder is not None and (folder / "config.yaml").is_file()
    if folder is not None and begun:
        before = with_absolute_paths(experiment(load_yaml(folder / "config.yaml"), method))
        try:
            check_same(before.model_dump(mode="json"), with_absolute_paths(config))
        except CheckpointError as error:
            raise ConfigError(f"{folder} cannot be resumed. {error}") from error
        if finished_rounds(folder) == config.rounds:
            summary = read_summary(folder)
            check_summary(summary, folder / "summary.json")
            return read_history(folder), summary, evaluated_rows(read_clients(folder / "clients.jsonl"))
        check_unfinished(folder, config.rounds)
    result = run_experiment(
        config,
        federation=federation or last.of(config),
        model=model,
        method=method,
        out=folder,
        resume=begun,
        callbacks=callbacks,
        shared=shared,
    )
    return result.history, result.summary, evaluated_rows(result.clients)


def evaluated_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the clients that were evaluated, without those that have only their number of samples."""
    return [row for row in rows if "loss" in row]
