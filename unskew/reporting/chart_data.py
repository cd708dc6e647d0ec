"""Data of the report's charts, as plain numbers; a script on the page draws them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unskew.methods.registry import METHODS, rule_class
from unskew.plots.figure import MARKERS, PALETTE
from unskew.reporting.run_groups import MethodRuns, RunGroup
from unskew.reporting.run_reader import is_usable_number
from unskew.tasks.primary_metric import KNOWN_METRICS, RECALL, SCORES, MetricInfo, metric_info

POINTS = 300
"""Points of a curve at most."""
DOTS = 200
"""Clients of a method that are drawn as dots at most; the box is of all of them."""
MARKS = 2000
"""Numbers of a list that a method gives in every round, drawn at most."""
EVALUATED = {
    "accuracy": "test accuracy (%)",
    "r2": "test R² (%)",
    "loss": "test loss",
    "mae": "mean absolute error",
    "rmse": "root mean squared error",
    "perplexity": "perplexity",
    "macro_f1": "F1, mean of the labels (%)",
    "micro_f1": "F1 of all decisions (%)",
    "samples_f1": "F1 per sample (%)",
    "auroc": "AUROC (%)",
    "auprc": "AUPRC (%)",
    "f1": "F1 (%)",
    "balanced_accuracy": "balanced accuracy (%)",
    "ece": "calibration error, ECE (%)",
    "worst_client": "accuracy or R² of the worst client (%)",
    "validation_accuracy": "accuracy on what clients hold out (%)",
    "validation_r2": "R² on what clients hold out (%)",
}
"""Figures of the model, with what the page calls them; those in per cent end so."""
DASHES = ("solid", "dash", "dot", "dashdot")
"""Dash patterns of lines: the next one is used each time the colors start over."""
ALWAYS = {
    *("round", "bytes_up", "bytes_down", "seconds", "cohort", "updates", "skipped"),
    *("macro_precision", "macro_recall", "micro_precision", "micro_recall"),
    *EVALUATED,
}
"""Figures of a round that are no method's own."""


def method_style(place: int) -> dict[str, str]:
    """Color, dash and marker of the method at this place of the report's list; colors are those of every plot."""
    turn = place // len(PALETTE)
    return {
        "color": PALETTE[place % len(PALETTE)],
        "dash": DASHES[turn % len(DASHES)],
        "marker": MARKERS[place % len(MARKERS)],
    }


def evenly_spaced(count: int, most: int = POINTS) -> list[int]:
    """Evenly spaced places of ``count``, the first and the last among them.

    Args:
        count: Number of indices to choose from.
        most: Largest number of chosen ones.

    >>> evenly_spaced(5, 3), evenly_spaced(2, 3)
    ([0, 2, 4], [0, 1])
    """
    return list(range(count)) if count <= most else np.linspace(0, count - 1, most).round().astype(int).tolist()


def evaluated_metrics(part: RunGroup) -> dict[str, str]:
    """Return the metrics of the model in the rounds of a part with what the page calls them, the objective first."""
    judge = part.objective
    summaries = [run.summary for method_runs in part.series for run in method_runs.runs]
    own = {name for summary in summaries for name in summary.get("own_metrics", {})}
    recalls = {name for summary in summaries for name in summary if name.startswith(RECALL)}
    names = EVALUATED | {name: axis_title(metric_info(name)) for name in sorted({*own, *recalls})}
    validation_key = f"validation_{judge.name}"
    names[validation_key] = names.get(validation_key, axis_title(judge, " on what clients hold out"))
    there = {
        name
        for method_runs in part.series
        for run in method_runs.runs
        for row in run.history
        for name in row
        if is_usable_number(row[name])
    }
    first = (
        (judge.name, validation_key) if judge.name not in SCORES else ("loss", "perplexity") if part.language else ()
    )
    return {name: names[name] for name in dict.fromkeys([*first, *names]) if name in there}


def axis_title(one: MetricInfo, where: str = "") -> str:
    """Return what an axis with a metric is called.

    Args:
        one: The metric.
        where: Text after its name.
    """
    return f"{one.title}{where}{' (%)' if one.percent else ''}"


def learning_curves(part: RunGroup) -> dict[str, Any]:
    """Accuracy, loss and their kin of every method against rounds, traffic and seconds: mean and band over seeds."""
    titles = evaluated_metrics(part)
    return {
        "figures": titles,
        "scored": part.objective.name,
        "target": (100 if part.objective.percent else 1) * part.target if part.counts else None,
        "unit": " %" if part.objective.percent else "",
        "lines": {
            method_runs.label: {
                name: mean_line(method_runs, name, title.endswith("(%)")) for name, title in titles.items()
            }
            for method_runs in part.series
        },
    }


def mean_line(one: MethodRuns, name: str, share: bool = False) -> dict[str, list[float]] | None:
    """Mean and standard deviation over seeds of a figure, at the rounds that all seeds have; None where there are none.

    Args:
        one: Runs of a method.
        name: Name of the metric.
        share: Whether to convert shares to percentages.
    """
    rows = [[row for row in run.history if is_usable_number(row.get(name))] for run in one.runs]
    shortest = min(map(len, rows))
    if not shortest:
        return None
    factor = 100 if share else 1
    values = factor * np.array([[row[name] for row in of_seed[:shortest]] for of_seed in rows], float)
    sent = np.array([[(row["bytes_up"] + row["bytes_down"]) / 1e6 for row in of_seed[:shortest]] for of_seed in rows])
    seconds = np.array([[row["seconds"] for row in of_seed[:shortest]] for of_seed in rows], float)
    spread = values.std(0, ddof=1) if len(values) > 1 else np.zeros(shortest)
    indices = evenly_spaced(shortest)
    mean = values.mean(0)
    return {
        "round": [rows[0][index]["round"] for index in indices],
        "mb": sent.mean(0)[indices].tolist(),
        "seconds": seconds.mean(0)[indices].tolist(),
        "mean": mean[indices].tolist(),
        "std": spread[indices].tolist() if len(values) > 1 else [],
    }


def method_metric_titles() -> dict[str, str]:
    """Return the titles of the metrics of registered methods."""
    return {
        metric.name: metric.title
        for kind in map(rule_class, METHODS)
        for metric in getattr(kind, "summary_metrics", ())
    }


def diagnostic_charts(part: RunGroup) -> dict[str, Any]:
    """Return charts of the metrics of methods and diagnostics.

    Numbers as lines, lists of numbers as dots of the first seed.
    """
    declared, known = method_metric_titles(), {*ALWAYS, *evaluated_metrics(part)}
    lines: dict[str, dict[str, Any]] = {}
    dots: dict[str, dict[str, Any]] = {}
    names = dict.fromkeys(
        name
        for method_runs in part.series
        for run in method_runs.runs
        for row in run.history
        for name in row
        if name not in known
    )
    for name in names:
        for method_runs in part.series:
            line = mean_line(method_runs, name)
            if line is not None:
                lines.setdefault(name, {})[method_runs.label] = {key: line[key] for key in ("round", "mean", "std")}
            marks = [
                (row["round"], value)
                for row in method_runs.runs[0].history
                if isinstance(row.get(name), list)
                for value in row[name]
                if is_usable_number(value)
            ]
            if marks:
                marked = [marks[index] for index in evenly_spaced(len(marks), MARKS)]
                dots.setdefault(name, {})[method_runs.label] = {
                    "round": [r for r, _ in marked],
                    "value": [v for _, v in marked],
                }
    return {"titles": {name: declared.get(name, name) for name in names}, "lines": lines, "dots": dots}


KINDS = {
    "roc": ("ROC", "false positives, share", "true positives, share"),
    "pr": ("precision and recall", "recall", "precision"),
    "calibration": ("calibration", "mean probability", "share that is right"),
}
"""Curves of classifiers, with the titles of their axes."""
BEST = 4
"""Methods whose curves are shown at most."""


def best_classifiers(part: RunGroup) -> list[MethodRuns]:
    """Return the best methods whose first run has curves of a classifier."""
    judge = part.objective

    def rank(method_runs: MethodRuns) -> float:
        values = [
            float(run.summary[judge.name]) for run in method_runs.runs if is_usable_number(run.summary.get(judge.name))
        ]
        return judge.rank(float(np.mean(values))) if values else -np.inf

    return sorted((method_runs for method_runs in part.series if method_runs.runs[0].curves), key=rank, reverse=True)[
        :BEST
    ]


def classifier_curves(part: RunGroup) -> dict[str, Any]:
    """Return the curves of the best methods, of the first seed of each, by kind and method."""
    lines = {
        kind: {
            classifier.label: classifier.runs[0].curves[kind]
            for classifier in best_classifiers(part)
            if kind in classifier.runs[0].curves
        }
        for kind in KINDS
    }
    return {"axes": {kind: KINDS[kind][1:] for kind in KINDS}, "lines": lines}


def per_client_metrics(part: RunGroup) -> dict[str, MetricInfo]:
    """Return the metrics in ``clients.jsonl`` by the name they have there, those of the objective first."""
    runs = [run for method_runs in part.series for run in method_runs.runs]
    own = {name: way for run in runs for name, way in run.summary.get("own_metrics", {}).items()}
    there = dict.fromkeys(name for run in runs for row in run.clients for name in row if is_usable_number(row[name]))
    metrics = {}
    for prefix in ("", "personal_"):
        for name in there:
            bare = name.removeprefix(prefix) if name.startswith(prefix) else ""
            if bare in KNOWN_METRICS or bare in own or bare.startswith(RECALL):
                metrics[name] = metric_info(bare, own)
    return dict(sorted(metrics.items(), key=lambda pair: pair[1] != part.at_clients))


def client_boxes(part: RunGroup) -> dict[str, Any]:
    """Metrics over clients, all seeds together, of the global model and of the clients' own: quartiles and some dots.

    The worst decile is that of the tables: the mean over seeds of each seed's.
    """
    boxes: dict[str, Any] = {}
    for name, one_metric in per_client_metrics(part).items():
        factor = 100 if one_metric.percent else 1
        for method_runs in part.series:
            scored = sorted(
                (factor * row[name], client_label(row), run.summary["seed"])
                for run in method_runs.runs
                for row in run.clients
                if is_usable_number(row.get(name))
            )
            if scored:
                values = np.array([value for value, _, _ in scored])
                low, median, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
                dots = [scored[index] for index in evenly_spaced(len(scored), DOTS)]
                sign = -1 if one_metric.lower_is_better else 1
                deciles = [
                    sign * mean_worst_decile([sign * value for value, _, at in scored if at == seed])
                    for seed in {s for *_, s in scored}
                ]
                boxes.setdefault(name, {})[method_runs.label] = {
                    "low": low,
                    "median": median,
                    "high": high,
                    "mean": values.mean().item(),
                    "least": values[0].item(),
                    "most": values[-1].item(),
                    "decile": float(np.mean(deciles)),
                    "dots": [value for value, _, _ in dots],
                    "who": [f"{name}, seed {seed}" for _, name, seed in dots],
                }
    return boxes


def client_label(row: dict[str, Any]) -> str:
    """Return the label of a client on the page: its name, or its number."""
    name = row.get("name")
    return name if isinstance(name, str) else f"client {row['client']}"


def mean_worst_decile(values: Sequence[float] | np.ndarray) -> float:
    """The mean of the lowest tenth, at least one of them, as ``client_accuracy_worst_decile`` has it.

    >>> mean_worst_decile([3.0, 1.0, 2.0])
    1.0
    """
    ordered = np.sort(np.asarray(values, float))
    return float(ordered[: max(1, len(ordered) // 10)].mean())


def gini(values: Sequence[float] | np.ndarray) -> float:
    """Gini coefficient: the mean difference of two of them, over twice their mean; 0 where all are equal.

    >>> gini([1.0, 1.0]), gini([0.0, 1.0]), gini([0.0])
    (0.0, 0.5, 0.0)
    """
    ordered = np.sort(np.asarray(values, float))
    total, n = ordered.sum(), len(ordered)
    return float((2 * np.arange(1, n + 1) - n - 1) @ ordered / (n * total)) if total > 0 else 0.0
