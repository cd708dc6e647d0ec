"""Metrics of a run's models at its sites, from ``unskew deploy evaluate``: tables, intervals per site, and the matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from unskew.json_models import JsonModel, read_model
from unskew.reporting.chart_data import axis_title
from unskew.reporting.run_groups import RunGroup
from unskew.reporting.run_reader import RunFiles
from unskew.reporting.tables import Cell, Table
from unskew.tasks.formatting import interval_text, value_text
from unskew.tasks.primary_metric import metric_info

NAME = "evaluation.json"
TITLE = "Evaluation at the sites"


class EvaluationRow(JsonModel):
    """Metric of a model at a site; ``trained_at`` is the site of a local model, ``reason`` says why there is no value."""

    model: str
    site: str
    metric: str
    client: int | None = None
    trained_at: str | None = None
    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    support: dict[str, int | str | None] = Field(default_factory=dict)
    reason: str = ""

    @property
    def own(self) -> bool:
        """Whether the model serves this site: it is not one that another site has trained alone."""
        return self.trained_at in (None, self.site)


def read_evaluation(path: Path) -> list[EvaluationRow]:
    """Read ``evaluation.json``; empty if it does not exist.

    Args:
        path: File to read.

    Raises:
        CheckpointError: If the file is corrupted.
    """
    return read_model(path, list[EvaluationRow], "Remove it and evaluate the run again.") if path.is_file() else []


def evaluations(part: RunGroup) -> list[tuple[str, RunFiles, list[EvaluationRow]]]:
    """Return label, run and metrics of each run of a group that was evaluated at its sites."""
    found = []
    for method_runs in part.series:
        for run in method_runs.runs:
            if rows := read_evaluation(run.folder / NAME):
                found.append((f"{method_runs.label}, seed {run.summary['seed']}", run, rows))
    return found


def evaluation_charts(part: RunGroup) -> list[dict[str, Any]]:
    """Return the data of the charts: per metric, a point for each model and site, and the matrix of local models."""
    charts = []
    for label, run, rows in evaluations(part):
        sites = list(dict.fromkeys(row.site for row in rows))
        positive = run.summary.get("positive")
        infos = {row.metric: metric_info(row.metric, positive=positive) for row in rows if row.value is not None}
        chart: dict[str, Any] = {"title": label, "sites": sites, "metrics": {}, "points": {}, "matrix": {}}
        for name, info in infos.items():
            factor = 100 if info.percent else 1
            chart["metrics"][name] = axis_title(info, " on held-out samples")
            points: dict[str, list[Any]] = {}
            for row in rows:
                if row.own and row.metric == name and row.value is not None:
                    ends = (row.value if end is None else end for end in (row.low, row.high))
                    numbers = [factor * number for number in (row.value, *ends)]
                    points.setdefault(row.model, []).append([sites.index(row.site), *numbers, row.n])
            chart["points"][name] = points
            if any(not row.own for row in rows):
                chart["matrix"][name] = _matrix(rows, sites, name, factor)
        charts.append(chart)
    return charts


def _matrix(rows: list[EvaluationRow], sites: list[str], metric: str, factor: int) -> dict[str, Any]:
    """Return the matrix of a metric: the global model, then the model of each site, on the data of each site."""
    values = {
        (row.trained_at, row.site): row.value
        for row in rows
        if row.metric == metric and row.model in ("global", "local")
    }
    reasons = {
        (row.trained_at, row.site): row.reason for row in rows if row.reason and row.model in ("global", "local")
    }
    trainers = [None, *sites]
    cells = [[values.get((trainer, site)) for site in sites] for trainer in trainers]
    return {
        "rows": ["global", *(f"local of {site}" for site in sites)],
        "cells": [[None if value is None else factor * value for value in line] for line in cells],
        "reasons": [[reasons.get((trainer, site), "") for site in sites] for trainer in trainers],
    }


def evaluation_table(part: RunGroup) -> Table | None:
    """Return the table of all metrics, or None if no run was evaluated at its sites."""
    found, columns = evaluations(part), dict[str, str]()
    lines: list[list[Cell]] = []
    groups: list[str] = []
    for _, run, rows in found:
        positive = run.summary.get("positive")
        columns |= {row.metric: axis_title(metric_info(row.metric, positive=positive)) for row in rows}
    for label, _, rows in found:
        cells = {(row.model, row.site, row.metric): row for row in rows if row.own}
        for model, site in dict.fromkeys((row.model, row.site) for row in rows if row.own):
            own = [cells.get((model, site, name)) for name in columns]
            first = next(row for row in own if row is not None)
            support = ", ".join(f"{name} {count or 'withheld'}" for name, count in first.support.items())
            words = [model, site, "-" if first.n is None else str(first.n), support or "-"]
            lines.append([*map(Cell, words), *(_cell(row) for row in own)])
            groups.append(label)
    titles = ["model", "site", "samples", "samples per class", *columns.values()]
    groups = groups if len(found) > 1 else []
    return Table("evaluation", TITLE, titles, lines, words=4, groups=groups, choice="run") if lines else None


def _cell(row: EvaluationRow | None) -> Cell:
    if row is None or row.value is None:
        return Cell("-")
    info = metric_info(row.metric)
    ends = "" if row.low is None or row.high is None else f" ({interval_text(info, (row.low, row.high))})"
    return Cell(f"{value_text(info, row.value, sign='')}{ends}", 100 * row.value if info.percent else row.value)


def refusals(part: RunGroup) -> list[str]:
    """Return the reasons why sites have not scored models."""
    return list(dict.fromkeys(row.reason for _, _, rows in evaluations(part) for row in rows if row.reason))
