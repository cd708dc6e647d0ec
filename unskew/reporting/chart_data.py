"""Data of the report's charts as plain numbers, which a script on the page draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from unskew.comparison.benefit import client_label, num_events, rarest_class
from unskew.comparison.summary_statistics import final_metrics, is_usable_number, rank_means
from unskew.methods.registry import METHODS, rule_class
from unskew.plots.curves import rows_of_common_rounds
from unskew.plots.figure import MARKERS, PALETTE
from unskew.reporting.run_groups import MethodRuns, RunGroup
from unskew.tasks.few_samples import compares_classes, has_few_samples
from unskew.tasks.primary_metric import KNOWN_METRICS, METRIC_PREFIXES, ONE_CLASS, SCORES, MetricInfo, metric_info

POINTS = 300
"""Maximum number of points of a curve."""
DOTS = 200
"""Maximum number of clients of a method that are drawn as dots; the box covers all clients."""
MARKS = 2000
"""Maximum number of values drawn of a list that a method reports in every round."""
EVALUATED = {
    "accuracy": "test accuracy (%)",
    "r2": "test R² (%)",
    "concordance": "test concordance (%)",
    "uno": "Uno's concordance (%)",
    "ibs": "integrated Brier score",
    "dice": "test Dice (%)",
    "loss": "test loss",
    "mae": "mean absolute error",
    "rmse": "root mean squared error",
    "perplexity": "perplexity",
    "dice_pooled": "pooled Dice (%)",
    "hd95": "HD95 in pixels",
    "macro_f1": "F1, mean of the labels (%)",
    "micro_f1": "F1 of all decisions (%)",
    "samples_f1": "F1 per sample (%)",
    "auroc": "AUROC (%)",
    "auprc": "AUPRC (%)",
    "f1": "F1 (%)",
    "balanced_accuracy": "balanced accuracy (%)",
    "ece": "calibration error, ECE (%)",
    "brier": "Brier score",
    "observed_expected": "observed divided by expected",
    "calibration_slope": "calibration slope",
    "worst_client": "accuracy or R² of the worst client (%)",
    "validation_accuracy": "accuracy on held-out samples of the clients (%)",
    "validation_dice": "Dice on held-out samples of the clients (%)",
    "validation_r2": "R² on held-out samples of the clients (%)",
    "validation_concordance": "concordance on held-out samples of the clients (%)",
}
"""Metrics of the model with their titles; titles of metrics in percent end with (%)."""
DASHES = ("solid", "dash", "dot", "dashdot")
"""Dash patterns of lines; the next one is used each time the colors repeat."""
ALWAYS = {
    *("round", "bytes_up", "bytes_down", "seconds", "seconds_simulated", "cohort", "updates", "skipped"),
    *("macro_precision", "macro_recall", "micro_precision", "micro_recall"),
    *EVALUATED,
}
"""Round metrics that do not belong to a method."""


def method_style(index: int) -> dict[str, str]:
    """Return color, dash and marker of the method at an index of the report's list; all plots use the same colors."""
    turn = index // len(PALETTE)
    return {
        "color": PALETTE[index % len(PALETTE)],
        "dash": DASHES[turn % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)],
    }


def evenly_spaced(count: int, most: int = POINTS) -> list[int]:
    """Return evenly spaced indices of ``count`` entries, including the first and the last.

    Args:
        count: Number of entries.
        most: Maximum number of indices.

    >>> evenly_spaced(5, 3), evenly_spaced(2, 3)
    ([0, 2, 4], [0, 1])
    """
    return list(range(count)) if count <= most else np.linspace(0, count - 1, most).round().astype(int).tolist()


def evaluated_metrics(part: RunGroup) -> dict[str, str]:
    """Return the round metrics of the model with their titles, the objective first."""
    judge = part.objective
    summaries = [run.summary for run in part.runs]
    own = {name for summary in summaries for name in summary.get("own_metrics", {})}
    recalls = {name for summary in summaries for name in summary if name.startswith(METRIC_PREFIXES)}
    positive = summaries[0].get("positive")
    named = {*own, *recalls, *(ONE_CLASS if positive else ())}
    names = EVALUATED | {name: axis_title(metric_info(name, positive=positive)) for name in sorted(named)}
    validation_key = f"validation_{judge.name}"
    names[validation_key] = names.get(validation_key, axis_title(judge, " on held-out samples of the clients"))
    there = {name for run in part.runs for row in run.history for name in row if is_usable_number(row[name])}
    first = () if judge.name in SCORES else (judge.name, validation_key)
    return {name: names[name] for name in dict.fromkeys([*first, *names]) if name in there}


def axis_title(one: MetricInfo, where: str = "") -> str:
    """Return the axis title of a metric.

    Args:
        one: The metric.
        where: Text after its title.
    """
    return f"{one.title}{where}{' (%)' if one.percent else ''}"


def learning_curves(part: RunGroup) -> dict[str, Any]:
    """Return the metrics of every method against rounds, traffic and seconds: mean and band over seeds."""
    titles = evaluated_metrics(part)
    return {
        "metric_titles": titles,
        "scored": part.objective.name,
        "target": (100 if part.objective.percent else 1) * part.target,
        "unit": " %" if part.objective.percent else "",
        "lines": {
            entry.label: {name: mean_line(entry, name, title.endswith("(%)")) for name, title in titles.items()}
            for entry in part.series
        },
    }


def mean_line(one: MethodRuns, name: str, share: bool = False) -> dict[str, list[float]] | None:
    """Return mean and standard deviation of a metric over seeds, in rounds that all seeds have; None without any.

    Args:
        one: Runs of a method.
        name: Name of the metric.
        share: Whether to convert shares to percentages.
    """
    rows = [[row for row in run.history if is_usable_number(row.get(name))] for run in one.runs]
    rows = rows_of_common_rounds(rows)
    count = len(rows[0])
    if not count:
        return None
    factor = 100 if share else 1
    values = factor * np.array([[row[name] for row in of_seed] for of_seed in rows], float)
    sent = np.array([[(row["bytes_up"] + row["bytes_down"]) / 1e6 for row in of_seed] for of_seed in rows])
    seconds = np.array([[row["seconds"] for row in of_seed] for of_seed in rows], float)
    timed = all(is_usable_number(row.get("seconds_simulated")) for of_seed in rows for row in of_seed)
    simulated = [[row["seconds_simulated"] for row in of_seed] for of_seed in rows] if timed else []
    spread = values.std(0, ddof=1) if len(values) > 1 else np.zeros(count)
    indices = evenly_spaced(count)
    mean = values.mean(0)
    return {
        "round": [rows[0][index]["round"] for index in indices],
        "mb": sent.mean(0)[indices].tolist(),
        "seconds": seconds.mean(0)[indices].tolist(),
        **({"simulated": np.mean(simulated, 0)[indices].tolist()} if timed else {}),
        "mean": mean[indices].tolist(),
        "std": spread[indices].tolist() if len(values) > 1 else [],
    }


def method_metric_titles() -> dict[str, str]:
    """Return the titles of the metrics of registered methods."""
    metrics = (metric for name in METHODS for metric in getattr(rule_class(name), "summary_metrics", ()))
    return {metric.name: metric.title for metric in metrics}


def diagnostic_charts(part: RunGroup) -> dict[str, Any]:
    """Return charts of the metrics of methods and diagnostics: numbers as lines, lists as dots of the first seed."""
    declared, known = method_metric_titles(), {*ALWAYS, *evaluated_metrics(part)}
    lines: dict[str, dict[str, Any]] = {}
    dots: dict[str, dict[str, Any]] = {}
    names = dict.fromkeys(name for run in part.runs for row in run.history for name in row if name not in known)
    for name in names:
        for method_runs in part.series:
            line = mean_line(method_runs, name)
            if line is not None:
                lines.setdefault(name, {})[method_runs.label] = {key: line[key] for key in ("round", "mean", "std")}
            lists = [row for row in method_runs.runs[0].history if isinstance(row.get(name), list)]
            marks = [(row["round"], value) for row in lists for value in row[name] if is_usable_number(value)]
            if marks:
                marked = [marks[index] for index in evenly_spaced(len(marks), MARKS)]
                columns = {"round": [r for r, _ in marked], "value": [v for _, v in marked]}
                dots.setdefault(name, {})[method_runs.label] = columns
    return {"titles": {name: declared.get(name, name) for name in names}, "lines": lines, "dots": dots}


KINDS = {
    "roc": ("ROC", "false positive rate", "true positive rate"),
    "pr": ("precision and recall", "recall", "precision"),
    "calibration": ("calibration", "mean probability", "share of correct predictions"),
}
"""Classifier curves, with the titles of their axes."""
BEST = 4
"""Maximum number of methods whose curves are shown."""


def best_classifiers(part: RunGroup) -> list[MethodRuns]:
    """Return the best methods whose first run has curves of a classifier or of survival."""
    classifiers = {method_runs.label: method_runs for method_runs in part.series if method_runs.runs[0].curves}
    ranked = rank_means(
        {label: [*map(final_metrics, part.comparison.summaries[label])] for label in classifiers}, part.objective
    )
    return [classifiers[label] for label in {**ranked, **classifiers}][:BEST]


def classifier_curves(part: RunGroup) -> dict[str, Any]:
    """Return the classifier curves of the first seed of the best methods, by kind and method."""
    curves = {classifier.label: classifier.runs[0].curves for classifier in best_classifiers(part)}
    lines = {kind: {label: own[kind] for label, own in curves.items() if kind in own} for kind in KINDS}
    return {"axes": {kind: KINDS[kind][1:] for kind in KINDS}, "lines": lines}


def survival_curves(part: RunGroup) -> dict[str, Any]:
    """Return survival curves of the first seed of the best methods, and their calibration.

    Args:
        part: Runs of the same data.

    Returns:
        ``observed`` and ``predicted`` survival by the name of the rows, the latter also by method, and ``calibration`` by
        horizon and method.
    """
    charts: dict[str, Any] = {"observed": {}, "predicted": {}, "calibration": {}}
    for method_runs in best_classifiers(part):
        curves = method_runs.runs[0].curves
        for entry in curves.get("km", []):
            name = entry["name"]
            charts["observed"].setdefault(name, {key: entry[key] for key in ("x", "y")})
            predicted = {"x": entry["x"], "y": entry["predicted"]}
            charts["predicted"].setdefault(name, {})[method_runs.label] = predicted
        for horizon, entry in curves.get("risk_calibration", {}).items():
            charts["calibration"].setdefault(horizon, {})[method_runs.label] = {key: entry[key] for key in ("x", "y")}
    return charts


def per_client_metrics(part: RunGroup) -> dict[str, MetricInfo]:
    """Return the metrics in ``clients.jsonl`` by their key, those of the objective first."""
    runs = part.runs
    own = {name: way for run in runs for name, way in run.summary.get("own_metrics", {}).items()}
    metrics = client_metrics((row for run in runs for row in run.clients), own, runs[0].summary.get("positive"))
    return dict(sorted(metrics.items(), key=lambda pair: pair[1] != part.at_clients))


def client_metrics(
    rows: Iterable[dict[str, Any]], own: Mapping[str, str], positive: str | None = None
) -> dict[str, MetricInfo]:
    """Return the metrics in rows of ``clients.jsonl`` by their key, those of the global model first.

    Args:
        rows: Rows of the clients.
        own: Directions of custom metrics by name.
        positive: Name of the positive one of two classes.
    """
    there = dict.fromkeys(name for row in rows for name in row if is_usable_number(row[name]))
    metrics = {}
    for prefix in ("", "personal_"):
        for name in there:
            bare = name.removeprefix(prefix) if name.startswith(prefix) else ""
            if bare in KNOWN_METRICS or bare in own or bare.startswith(METRIC_PREFIXES):
                metrics[name] = metric_info(bare, own, positive)
    return metrics


def client_boxes(part: RunGroup) -> dict[str, Any]:
    """Return the metrics over clients, all seeds together, of global and personal models: quartiles and some dots.

    The worst decile is the mean over seeds of each seed's, as in the tables.
    """
    boxes: dict[str, Any] = {}
    for name, one_metric in per_client_metrics(part).items():
        factor = 100 if one_metric.percent else 1
        few = few_samples_by_row(part, one_metric)
        for method_runs in part.series:
            scored = sorted(
                (factor * row[name], client_label(row) + MARK * few(row), run.summary["seed"])
                for run in method_runs.runs
                for row in honest_clients(run.clients)
                if is_usable_number(row.get(name))
            )
            if scored:
                values, seeds = np.array([value for value, _, _ in scored]), np.array([seed for *_, seed in scored])
                low, median, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
                dots = [scored[index] for index in evenly_spaced(len(scored), DOTS)]
                sign = int(one_metric.rank(1))
                deciles = [sign * mean_worst_decile(sign * values[seeds == seed]) for seed in {*seeds.tolist()}]
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


def honest_clients(rows: Iterable[dict[str, Any]], unseen: bool = False) -> list[dict[str, Any]]:
    """Return the rows of clients in training, or of unseen ones, without attackers, as in statistics of summaries.

    Args:
        rows: Rows of ``clients.jsonl``.
        unseen: Whether to return the unseen clients.
    """
    return [row for row in rows if "attacker" not in row and row.get("unseen", False) is unseen]


MARK = " (few samples)"
"""Text after the name of a client whose metric is mostly chance."""


def few_samples_by_row(part: RunGroup, metric: MetricInfo) -> Callable[[dict[str, Any]], bool]:
    """Return a function that returns whether the metric in a row of ``clients.jsonl`` is mostly chance.

    Args:
        part: Runs on the same data.
        metric: Metric of clients.
    """
    rows = [row for run in part.runs for row in run.clients]
    rarest = rarest_class(rows) if compares_classes(metric, part.scored) else None
    return lambda row: has_few_samples(row.get("num_held_out", 0), num_events(row, rarest))


def mean_worst_decile(values: Sequence[float] | np.ndarray) -> float:
    """Return the mean of the lowest tenth, at least one value, as in ``client_accuracy_worst_decile``.

    >>> mean_worst_decile([3.0, 1.0, 2.0])
    1.0
    """
    ordered = np.sort(np.asarray(values, float))
    return float(ordered[: max(1, len(ordered) // 10)].mean())


def gini(values: Sequence[float] | np.ndarray) -> float:
    """Return the Gini coefficient: the mean difference of two values divided by twice their mean; 0 if all are equal.

    >>> gini([1.0, 1.0]), gini([0.0, 1.0]), gini([0.0])
    (0.0, 0.5, 0.0)
    """
    ordered = np.sort(np.asarray(values, float))
    total, n = ordered.sum(), len(ordered)
    return float((2 * np.arange(1, n + 1) - n - 1) @ ordered / (n * total)) if total > 0 else 0.0
