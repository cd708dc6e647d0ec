"""Grouping of runs: groups have the same data and model, and contain methods with several seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from unskew.comparison.comparison_result import Comparison, default_target
from unskew.comparison.references import is_reference
from unskew.comparison.summary_statistics import is_usable_number
from unskew.errors import CheckpointError
from unskew.json_models import read_model
from unskew.reporting.run_reader import RunFiles
from unskew.tasks.primary_metric import MetricInfo, primary_metric_name
from unskew.tasks.registry import client_metric, objective_metric

PLACE = ("data", "partition", "clients", "server_data", "model")
"""Fields in the title of a group."""
SHARED = (
    *(*PLACE, "max_classes", "max_train_samples", "image_size", "holdout", "reserve_test_samples", "model_options"),
    *("unseen", "shift", "label", "label_separator", "image", "task", "split_by", "csv"),
    *("text", "segmentation", "survival"),
)
"""Fields that all runs of a group share: they determine the samples, their outcomes, and the model."""
HOW = (
    *("seed", "method", "engine", "workers", "graphs", "stall_warning_seconds", "device", "trackers", "target"),
    *("checkpoint_every", "save_samples", "base_run", "data_path", "server_data_path", "synthetic", "start_from"),
    *("objective", "coefficients"),
)
"""Fields that may differ between the runs of one method."""


@dataclass
class MethodRuns:
    """Runs of one method with its options, over seeds.

    Attributes:
        label: Label in the report.
        method: Method expression.
        runs: A run for each seed.
    """

    label: str
    method: str
    runs: list[RunFiles] = field(default_factory=list)


@dataclass(frozen=True)
class RunGroup:
    """Methods with the same data and model.

    Attributes:
        title: Data, partition and model.
        series: Runs of each method.
        target: Value of the objective for which rounds are counted.
    """

    title: str
    series: list[MethodRuns]
    target: float

    @property
    def runs(self) -> list[RunFiles]:
        """Runs of all methods."""
        return [run for method_runs in self.series for run in method_runs.runs]

    @property
    def ranked(self) -> list[MethodRuns]:
        """Methods without the reference rows."""
        return [method_runs for method_runs in self.series if not is_reference(method_runs.method)]

    @property
    def scored(self) -> str:
        """Name of the task's primary metric."""
        return primary_metric_name(self.runs[0].summary)

    @property
    def objective(self) -> MetricInfo:
        """Metric by which methods are compared."""
        return objective_metric(self.runs[0].summary)

    @property
    def at_clients(self) -> MetricInfo:
        """Corresponding metric of single clients."""
        return client_metric(self.runs[0].summary)

    @cached_property
    def comparison(self) -> Comparison:
        """The group as a result of ``unskew.compare``."""
        runs = {method_runs.label: method_runs.runs for method_runs in self.series}
        histories = {label: [run.history for run in own] for label, own in runs.items()}
        summaries = {label: [run.summary for run in own] for label, own in runs.items()}
        clients = {label: [run.clients for run in own] for label, own in runs.items()}
        unequal = any(len({row["samples"] for row in run.clients}) > 1 for run in self.runs)
        return Comparison(histories, summaries, self.target, None, unequal, clients=clients)


def group_runs(runs: Sequence[RunFiles]) -> tuple[list[RunGroup], list[str]]:
    """Group runs in the order of their first runs, and return notes on runs that were omitted."""
    notes: list[str] = []
    groups: dict[str, dict[str, MethodRuns]] = {}
    for run in runs:
        part = _key({name: run.config.get(name) for name in SHARED}) + objective_metric(run.summary).name
        rest = {name: value for name, value in run.config.items() if name not in (*SHARED, *HOW)}
        method = run.summary["method"]
        method_runs = groups.setdefault(part, {}).setdefault(method + _key(rest), MethodRuns(method, method))
        twin = next((other for other in method_runs.runs if other.summary["seed"] == run.summary["seed"]), None)
        if twin is None:
            method_runs.runs.append(run)
        else:
            notes.append(f"{run.folder} is left out: {twin.folder} is the same run.")
    parts = []
    for series in map(list, map(dict.values, groups.values())):
        for method_runs in series:
            method_runs.runs.sort(key=lambda run: run.summary["seed"])
        disambiguate_names(series)
        parts.append(RunGroup(_title(series[0].runs[0]), order_methods(series), _target(series)))
    return distinguish_titles(parts), notes


def distinguish_titles(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """Return groups in which equal titles are followed by the fields in which the groups differ."""
    distinct = []
    for group in groups:
        configs = [other.runs[0].config for other in groups if other.title == group.title]
        names = [name for name in SHARED if len({_key(config.get(name)) for config in configs}) > 1]
        fields = [f"{name}={plain_value(group.runs[0].config.get(name))}" for name in names]
        distinct.append(replace(group, title=", ".join([group.title, *fields])))
    return distinct


def _key(value: object) -> str:
    """Return a string that is equal for equal values, whatever the order of keys in a file."""
    if isinstance(value, dict):
        return repr(sorted((repr(name), _key(item)) for name, item in value.items()))
    return repr(list(map(_key, value))) if isinstance(value, list) else repr(value)


def disambiguate_names(series: Sequence[MethodRuns]) -> None:
    """Add differing fields to the labels of methods that occur with several configurations."""
    for method in {method_runs.method for method_runs in series}:
        same = [method_runs for method_runs in series if method_runs.method == method]
        configs = [method_runs.runs[0].config for method_runs in same]
        names = sorted({name for config in configs for name in config} - {*SHARED, *HOW})
        differ = [name for name in names if len({_key(config.get(name)) for config in configs}) > 1]
        for method_runs in same:
            config = method_runs.runs[0].config
            differences = ", ".join(f"{name}={plain_value(config.get(name))}" for name in differ)
            method_runs.label = f"{method} ({differences})" if differences else method


def plain_value(value: object) -> str:
    """Format a value of a configuration briefly."""
    return "none" if value is None else str(value)


def order_methods(series: list[MethodRuns]) -> list[MethodRuns]:
    """Return the methods in the order of the comparison's table, otherwise with FedAvg first."""
    table = _table(series)
    listed = [row.get("method") for row in table]
    if all(method_runs.method in listed for method_runs in series):
        return sorted(series, key=lambda method_runs: listed.index(method_runs.method))
    return sorted(series, key=lambda method_runs: (is_reference(method_runs.method), method_runs.method != "fedavg"))


def _table(series: Sequence[MethodRuns]) -> list[dict[str, Any]]:
    """Return the rows of the comparison that all runs belong to, if there is one."""
    folders = {run.folder.parent.parent for method_runs in series for run in method_runs.runs}
    path = min(folders) / "comparison.json"
    if len(folders) > 1 or not path.is_file():
        return []
    try:
        return read_model(path, list[dict[str, Any]])
    except CheckpointError:
        return []  # the table is redundant: the runs contain the same numbers


def _target(series: Sequence[MethodRuns]) -> float:
    """Return the target of the runs or of ``unskew compare``, otherwise its default."""
    own_targets = [run.config.get("target") for method_runs in series for run in method_runs.runs]
    listed = [row.get("target") for row in _table(series)]
    for value in (*own_targets, *listed):
        if isinstance(value, int | float) and is_usable_number(value):
            return float(value)
    return default_target({method_runs.label: [run.summary for run in method_runs.runs] for method_runs in series})


def _title(run: RunFiles) -> str:
    summary, server = run.summary, run.config.get("server_data")
    title = f"{summary['data']}, {summary['partition']}, {summary['clients']} clients, {summary['model']}"
    return title if server is None else f"{title}, server: {server}"
