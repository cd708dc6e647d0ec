"""Grouping of runs: groups have the same data and model, and contain methods with several seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from unskew.comparison.comparison_result import Comparison, default_target
from unskew.comparison.references import is_reference
from unskew.comparison.summary_statistics import is_usable_number
from unskew.config.metrics import AUTO, is_custom_metric
from unskew.data.spec import DataSpec
from unskew.errors import CheckpointError
from unskew.json_models import read_model
from unskew.reporting.run_reader import RunFiles
from unskew.tasks.primary_metric import ONE_CLASS, MetricInfo, primary_metric_name
from unskew.tasks.registry import changed_loss, client_metric, objective_metric

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
    *("checkpoint_every", "save_samples", "base_run", "data_path", "server_data_path", "objective", "coefficients"),
)
"""Fields that may differ between the runs of one method."""
INPUTS = ("start_from", "synthetic")
"""Fields that may differ between the runs of one method with different seeds, because they name files of a seed."""
METRICS = ("objective", "positive", "loss")
"""Fields that define the metrics of a group."""
CONTENT = ("partition_hash", "data_checksum")
"""Entries of a summary that identify its samples."""


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
    parts = []
    for group in divide_runs(runs, _group_key, _have_other_data):
        series = []
        for versions in divide_runs(group, _method_key, _have_other_inputs):
            distinct: dict[int, RunFiles] = {}
            for run in versions:
                twin = distinct.setdefault(run.summary["seed"], run)
                if twin is not run:
                    notes.append(f"{run.folder} is left out: {twin.folder} is the same run.")
            method = versions[0].summary["method"]
            series.append(MethodRuns(method, method, [distinct[seed] for seed in sorted(distinct)]))
        disambiguate_names(series)
        parts.append(RunGroup(_title(series[0].runs[0]), order_methods(series), _target(series)))
    return distinguish_titles(parts), notes


def divide_runs(
    runs: Sequence[RunFiles], key: Callable[[RunFiles], str], differ: Callable[[RunFiles, RunFiles], bool]
) -> list[list[RunFiles]]:
    """Divide runs into lists with the same key in which no two runs differ, in the order of their first runs.

    Only runs with the same seed can be compared with certainty. A run that fits several lists is therefore added to one that
    has its seed, otherwise to the one that was extended last, because the runs of a comparison are read together.

    Args:
        runs: Runs in the order in which they were read.
        key: Function that returns the key of a run.
        differ: Function that returns whether two runs with the same key differ.
    """
    lists: list[list[RunFiles]] = []
    with_key: dict[str, list[list[RunFiles]]] = {}  # the list that was extended last is the first one
    for run in runs:
        known = with_key.setdefault(key(run), [])
        fitting = [own for own in known if not any(differ(other, run) for other in own)]
        same_seed = [own for own in fitting if any(other.summary["seed"] == run.summary["seed"] for other in own)]
        chosen = next(iter(same_seed or fitting), None)
        if chosen is None:
            chosen = []
            lists.append(chosen)
        chosen.append(run)
        with_key[key(run)] = [chosen, *(own for own in known if own is not chosen)]
    return lists


def _group_key(run: RunFiles) -> str:
    """Return a key of everything that the runs of a group share: data, model, and the definition of the metrics."""
    objective, given = objective_metric(run.summary).name, run.config.get("objective", AUTO)
    positive = run.summary.get("positive") if any(name in run.summary for name in ONE_CLASS) else None
    loss = changed_loss(str(run.config.get("loss", "auto"))) if objective == "loss" else None
    custom = str(given) if is_custom_metric(str(given)) else None
    return _key([{name: run.config.get(name) for name in SHARED}, objective, custom, positive, loss])


def _have_other_data(run: RunFiles, other: RunFiles) -> bool:
    """Return whether runs with the same seed and the same options of the data had different samples."""
    if run.summary["seed"] != other.summary["seed"]:
        return False
    if all(run.summary.get(name) == other.summary.get(name) for name in CONTENT):
        return False
    names = [name for name in DataSpec.model_fields if name not in HOW]
    return all(_key(run.config.get(name)) == _key(other.config.get(name)) for name in names)


def _method_key(run: RunFiles) -> str:
    """Return a key of the method with its options, and of whether the run continues another one."""
    rest = {name: value for name, value in run.config.items() if name not in (*SHARED, *HOW, *INPUTS)}
    return _key([run.summary["method"], rest, run.config.get("start_from") is None])


def _have_other_inputs(run: RunFiles, other: RunFiles) -> bool:
    """Return whether runs with the same seed continue different runs or use different synthetic images."""
    same_seed = run.summary["seed"] == other.summary["seed"]
    return same_seed and any(run.config.get(name) != other.config.get(name) for name in INPUTS)


def distinguish_titles(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """Return groups in which equal titles are followed by the fields in which the groups differ."""
    for names, value in ((SHARED, _configured), (METRICS, _used), (CONTENT, _used)):
        values = [{name: value(group.runs[0], name) for name in names} for group in groups]
        distinct = []
        for group, own in zip(groups, values, strict=True):
            same = [fields for fields, other in zip(values, groups, strict=True) if other.title == group.title]
            differ = [name for name in names if len({_key(fields[name]) for fields in same}) > 1]
            fields = [f"{name}={plain_value(own[name])}" for name in differ]
            distinct.append(replace(group, title=", ".join([group.title, *fields])))
        groups = distinct
    return [*groups]


def _configured(run: RunFiles, name: str) -> object:
    """Return the configured value of a field."""
    return run.config.get(name)


def _used(run: RunFiles, name: str) -> object:
    """Return the value of a field that a run has used, otherwise the configured one."""
    return run.summary[name] if name in run.summary and name != "loss" else run.config.get(name)


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
        names = sorted({name for config in configs for name in config} - {*SHARED, *HOW, *INPUTS})
        differ = [name for name in names if len({_key(config.get(name)) for config in configs}) > 1]
        texts = [[f"{name}={plain_value(config.get(name))}" for name in differ] for config in configs]
        if len({*map(tuple, texts)}) < len(texts):
            for name in INPUTS:
                values = [_values_of(method_runs, name) for method_runs in same]
                if len({*values}) > 1:
                    texts = [[*own, f"{name}={value}"] for own, value in zip(texts, values, strict=True)]
        for method_runs, own in zip(same, texts, strict=True):
            method_runs.label = f"{method} ({', '.join(own)})" if own else method


def _values_of(method_runs: MethodRuns, name: str) -> str:
    """Return the different values of a field in the runs of a method."""
    return " and ".join(dict.fromkeys(plain_value(run.config.get(name)) for run in method_runs.runs))


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
