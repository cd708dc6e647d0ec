"""Metrics of a model card: from the summaries of a run and of its other seeds, or from the row of a client."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from unskew.config.experiment import Experiment
from unskew.config.loader import load_yaml
from unskew.config.metrics import AUTO, metric_name
from unskew.errors import ConfigError
from unskew.methods.registry import method as method_of
from unskew.records.recorder import privacy_sentences
from unskew.records.result import read_summary
from unskew.serving.load import OpenedRun
from unskew.simulation.personal_models import has_personal_models
from unskew.tasks.primary_metric import KNOWN_METRICS, SCORES, metric_of
from unskew.tasks.registry import TASKS

CLIENT_METRIC = re.compile(r"(client|personal|unseen)_.*_(mean|std|worst|worst_decile)$")
"""Metrics of a summary that are computed from clients' held-out data."""
KEPT = "kept_round"
"""Field of a summary with the round of the model of the run, with ``keep: best``."""


class MetricRow(NamedTuple):
    """A row of the table of metrics.

    Attributes:
        key: Name of the metric in files.
        title: Title of the row.
        percent: Whether the values are shown in percent.
        mean: Mean over seeds.
        std: Standard deviation over seeds; None for a single one.
    """

    key: str
    title: str
    percent: bool
    mean: float
    std: float | None


def global_metrics(opened: OpenedRun, runs: list[dict[str, Any]]) -> list[MetricRow]:
    """Return the metrics of the global model; none for a client whose architecture it does not have.

    Args:
        opened: Run with its model.
        runs: Summaries of the run, and of those with other seeds.
    """
    own = runs[0]
    if opened.client is not None and has_several_models(own):
        return []
    prefix, when = "", "last round"
    if KEPT in own:  # the other metrics of the summary are those of the last round, whose model is another one
        prefix, when = "kept_", f"kept round {own[KEPT]}" if len(runs) == 1 else "kept round"
    titles = metric_titles(opened.inputs.objective.name, opened.config, own)
    shown = {
        f"{prefix}{name}": (name, f"Test {title}, {when}", metric_of(own, name).percent)
        for name, title in titles.items()
    }
    scored = KNOWN_METRICS[TASKS[opened.inputs.objective.name].scored]
    for whose, models in (("client", "at clients"), ("personal", "of personal models")):
        for statistic, title in (("mean", "mean"), ("worst", "worst client")):
            key = f"{whose}_{scored.name}_{statistic}"
            shown[key] = (key, f"{scored.heading} {models}, {title}", scored.percent)
    return [
        MetricRow(*row, *mean_std_over_seeds(runs, key))
        for key, row in shown.items()
        if isinstance(own.get(key), int | float)
    ]


def client_metrics(opened: OpenedRun, own: dict[str, Any]) -> list[MetricRow]:
    """Return the metrics of a client's model on its held-out samples; none if the client was not evaluated.

    Args:
        opened: Run with the model of a client.
        own: Summary of the run.
    """
    if opened.client is None:
        return []
    prefix = "personal_" if has_personal_models(method_of(opened.config.method), opened.spec) else ""
    titles = metric_titles(opened.inputs.objective.name, opened.config, own)
    values = {name: opened.client.row.get(f"{prefix}{name}") for name in titles}
    where = client_test_data(opened.client.row)
    return [
        MetricRow(
            name, f"{titles[name][0].upper()}{titles[name][1:]} on {where}", metric_of(own, name).percent, value, None
        )
        for name, value in values.items()
        if isinstance(value, int | float)
    ]


def client_test_data(row: Mapping[str, Any]) -> str:
    """Describe the samples of which the metrics in a row of ``clients.jsonl`` are."""
    count = row.get("num_held_out")
    return (
        f"{count} held-out samples"
        if isinstance(count, int) and count
        else "the test set, weighted by the client's classes"
    )


def has_several_models(own: dict[str, Any]) -> bool:
    """Return whether clients of the run of a summary have models of different architectures."""
    return "," in str(own.get("model"))


def metric_titles(task: str, config: Experiment, own: dict[str, Any]) -> dict[str, str]:
    """Return the names of the metrics that the card shows, with their titles.

    Args:
        task: Name of the task.
        config: Configuration of the run.
        own: Summary of the run.
    """
    key = TASKS[task].scored
    configured = [metric_name(metric) for metric in (config.objective, *config.metrics) if metric != AUTO]
    further = dict.fromkeys([*configured, *own.get("own_metrics", {})])
    titles = {key: SCORES[key], "loss": "loss", **{name: name for name in TASKS[task].extra_metrics}}
    return titles | {name: metric_of(own, name).title for name in further}


def summaries(folder: Path) -> list[dict[str, Any]]:
    """Read the run's summary, and those of the same run with other seeds in sibling folders, as in a comparison.

    Guarantees of privacy do not cover metrics on clients' data, so those of private runs are left out.
    """
    others = []
    if re.fullmatch(r"seed-\d+", folder.resolve().name):
        own, this = without_seed(folder), folder.resolve()
        siblings = sorted(path for path in this.parent.glob("seed-*") if path != this)
        others = [path for path in siblings if (path / "summary.json").is_file() and without_seed(path) == own]
    runs = [read_summary(path) for path in (folder, *others)]
    return [{k: v for k, v in own.items() if not (privacy_sentences(own) and CLIENT_METRIC.match(k))} for own in runs]


def without_seed(folder: Path) -> dict[str, Any] | None:
    """Return a run's configuration without its seed; None if it cannot be read."""
    try:
        return {key: value for key, value in load_yaml(folder / "config.yaml").items() if key != "seed"}
    except ConfigError:
        return None


def mean_std_over_seeds(runs: list[dict[str, Any]], key: str) -> tuple[float, float | None]:
    """Return mean and standard deviation over seeds; the deviation of a single run is None.

    Args:
        runs: Summaries of the runs.
        key: Key of a number in them.
    """
    values = [float(run[key]) for run in runs if isinstance(run.get(key), int | float)]
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def table_row(row: MetricRow) -> str:
    """Format a row of the table of metrics."""

    def shown(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.1f} %" if row.percent else f"{value:.4f}"

    return f"| {row.title} | {shown(row.mean)} | {shown(row.std)} |"
