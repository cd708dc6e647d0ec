"""Statistics of run summaries over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any

from unskew.errors import CheckpointError
from unskew.tasks.primary_metric import METRIC_PREFIXES, WORST, MetricInfo, primary_metric_name
from unskew.tasks.registry import TASKS, client_metric, objective_metric

LARGEST = 1e300
ENDS = ("low", "high")
"""Ends of an interval, in names of keys."""
WORDS = ("method", "data", "partition", "partition_hash", "model", "client_weighting", "engine", "buffers")
WHOLE = ("clients", "seed", "rounds", "parameters")
NUMBERS = ("bytes_up", "bytes_down", "seconds")
Spread = tuple[float, float]
Summary = Mapping[str, Any]
COMPARED_METRICS = {
    *chain.from_iterable((*task.extra_metrics, *task.lower_is_better) for task in TASKS.values()),
    *(name for task in TASKS.values() for name in task.requestable),
    *(WORST, "best_loss"),
} - {"loss"}


def is_metric(name: str) -> bool:
    """Return whether a key of a summary is a metric of the task or a requested metric."""
    return name.startswith(METRIC_PREFIXES) or not COMPARED_METRICS.isdisjoint((name, name.removeprefix("best_")))


def metric_keys(summary: Mapping[str, Any]) -> list[str]:
    """Return the keys of a summary for which ``is_metric`` holds, without the ends of intervals.

    >>> metric_keys({"brier/9": 0.2, "brier/9_low": 0.1, "brier/9_high": 0.3, "recall/low": 0.5, "loss": 1.0})
    ['brier/9', 'recall/low']
    """
    ends = {f"{name}_{end}" for name in summary if summary.keys() >= {f"{name}_low", f"{name}_high"} for end in ENDS}
    return [name for name in summary if is_metric(name) and name not in ends]


def std_key(name: str) -> str:
    """Return the key of a metric's standard deviation over seeds in rows of a comparison; no class name can equal it.

    >>> std_key("auroc"), std_key("recall/a"), std_key("brier/365")
    ('auroc_std', 'recall_std/a', 'brier_std/365')
    """
    metric, _, rest = name.partition("/")
    return f"{metric}_std/{rest}" if name.startswith(METRIC_PREFIXES) else f"{name}_std"


UNSEEN = ("unseen", "unseen_personal")
"""Prefixes of the metrics over unseen clients, of the global model and of personal models."""
OVER_CLIENTS = ("mean", "std", "worst_decile", "worst")
"""Statistics of a metric over clients."""
CLIENT_MODELS = {
    "client": "global",
    "personal": "personal",
    "unseen": "global, unseen clients",
    "unseen_personal": "personal, unseen clients",
}
"""Prefixes of these statistics, with the evaluated model."""


def averaged_keys(summary: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the summary keys whose mean and standard deviation (``std_key``) over seeds are in table rows."""
    scored, objective = primary_metric_name(summary), objective_metric(summary).name
    judging = dict.fromkeys([scored, client_metric(summary).name])
    groups = ("client", "personal", *(UNSEEN if "unseen_evaluated" in summary else ()))
    over_clients = (f"{whose}_{name}_{what}" for name in judging for whose in groups for what in OVER_CLIENTS)
    judged = (name for key in dict.fromkeys([scored, objective]) for name in (key, f"best_{key}"))
    kept_keys = (name for name in (f"kept_{key}" for key in (scored, objective)) if name in summary)
    attack = [name for name in ("backdoor_success",) if name in summary]
    return tuple(dict.fromkeys([*judged, "loss", *over_clients, *summary.get("own_metrics", ()), *kept_keys, *attack]))


KEPT = "kept_"
"""Prefix of the metrics of the model that a run with ``keep: best`` keeps."""


def final_metrics(summary: Summary) -> Summary:
    """Return a summary in which metrics of the kept model replace those of the last round, as in metrics over clients.

    >>> final_metrics({"accuracy": 0.5, "kept_accuracy": 0.7, "kept_round": 2})["accuracy"]
    0.7
    """
    return {**summary, **{name.removeprefix(KEPT): value for name, value in summary.items() if name.startswith(KEPT)}}


def keeps_best(summaries: Iterable[Summary]) -> bool:
    """Return whether runs keep the model of their best round."""
    return any("kept_round" in summary for summary in summaries)


def mean_std(values: Sequence[float]) -> Spread:
    """Return the mean and the sample standard deviation (0 for a single value).

    >>> mean_std([1.0, 3.0])
    (2.0, 1.4142135623730951)
    """
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def is_usable_number(value: object) -> bool:
    """Return whether a value from a file is a usable number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def usable_values(rows: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    """Return the values of a key, without missing ones.

    Args:
        rows: Summaries or other rows.
        key: Key in the rows.
    """
    return [row[key] for row in rows if is_usable_number(row.get(key))]


def mean_or_none(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values; None if there are none."""
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if numbers else None


def rank_means(groups: Mapping[str, Sequence[Summary]], metric: MetricInfo, key: str | None = None) -> dict[str, float]:
    """Return the mean of a metric over seeds of each method that has a value, the best method first.

    Methods that diverged or have no value in some seed come last, because the means over their other seeds favor them.

    Args:
        groups: Summaries of the seeds, by method.
        metric: Metric whose direction counts.
        key: Key of the metric in the summaries; its name if None.
    """
    means = {name: mean_or_none(usable_values(own, key or metric.name)) for name, own in groups.items()}
    known = {name: mean for name, mean in means.items() if mean is not None}
    complete = {name: not incomplete_seeds(groups[name], key or metric.name) for name in known}
    return dict(sorted(known.items(), key=lambda pair: (complete[pair[0]], metric.rank(pair[1])), reverse=True))


def incomplete_seeds(summaries: Sequence[Summary], key: str) -> int:
    """Return the number of seeds that diverged or have no value of a metric.

    Args:
        summaries: Summaries of the seeds of a method.
        key: Key of the metric.
    """
    return sum(bool(own.get("diverged")) or not is_usable_number(own.get(key)) for own in summaries)


def seeds_text(used: int, seeds: int) -> str:
    """Return the number of seeds of a mean, to follow its value.

    Args:
        used: Number of seeds with a value.
        seeds: Number of all seeds.

    >>> seeds_text(3, 3), seeds_text(1, 3), seeds_text(1, 1)
    (', mean over 3 seeds', ', mean over 1 of 3 seeds', '')
    """
    return "" if seeds == 1 else f", mean over {seeds if used == seeds else f'{used} of {seeds}'} seeds"


def interval_of(rows: Sequence[Summary], name: str) -> tuple[float, float] | None:
    """Return the interval of a metric, means of its ends over rows; None without one.

    Args:
        rows: Rows with the ends ``NAME_low`` and ``NAME_high``.
        name: Name of the metric.
    """
    low, high = (mean_or_none(usable_values(rows, f"{name}_{end}")) for end in ENDS)
    return None if low is None or high is None else (low, high)


def pairs_by_seed(runs: Iterable[Summary], others: Iterable[Summary]) -> list[tuple[Summary, Summary]]:
    """Return the pairs of summaries with the same seed and partition.

    Args:
        runs: Summaries of a method.
        others: Summaries of another method.
    """
    return [
        (run, other)
        for run, other in product(runs, others)
        if all(run[same] == other[same] for same in ("seed", "partition_hash"))
    ]


def paired_differences(runs: Iterable[Summary], others: Iterable[Summary], key: str) -> list[float]:
    """Return the differences of a metric between two methods, paired by seed.

    Args:
        runs: Summaries of a method.
        others: Summaries of the method that is subtracted.
        key: Key of the metric.
    """
    return [
        run[key] - other[key]
        for run, other in pairs_by_seed(runs, others)
        if len(usable_values((run, other), key)) == 2
    ]


def check_summary(summary: dict[str, Any], path: Path) -> None:
    """Validate the content of ``summary.json``.

    Args:
        summary: Content of the file.
        path: Path of the file, for error messages.

    Raises:
        CheckpointError: If a metric is missing or is not a number.
    """
    metric_names = set(filter(is_metric, summary))
    scored = primary_metric_name(summary)
    needed = (scored, f"best_{scored}")  # null if it is undefined in all rounds
    optional = {*averaged_keys(summary), *metric_names}
    checks: list[tuple[Iterable[str], Callable[[Any], bool]]] = [
        (WORDS, lambda value: isinstance(value, str)),
        (WHOLE, lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0),
        (NUMBERS, is_usable_number),
        (sorted(optional), lambda value: value is None or is_usable_number(value)),
    ]
    for names, fits in checks:
        for name in names:
            if not fits(summary.get(name)) or (name in needed and name not in summary):
                raise CheckpointError(f"{path} is not the summary of a run: {name} is missing or not valid.")
