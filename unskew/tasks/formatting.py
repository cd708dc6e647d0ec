"""Formatting of metrics for the terminal and reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unskew.tasks.primary_metric import METRIC_PREFIXES, SCORES, WORST, MetricInfo, metric_info, metric_of
from unskew.tasks.registry import TASKS, objective_metric

F1 = {"C-F1": "macro_f1", "O-F1": "micro_f1"}
"""Columns and metrics of the multi-label task: macro-averaged and micro-averaged F1."""

COST = ("MB up", "MB down", "seconds")
"""Titles of the columns of costs."""


def further_metrics(row: Mapping[str, Any]) -> list[MetricInfo]:
    """Return the metrics in a row or a summary, besides the objective and the loss, that its task lists as ``shown``."""
    objective = objective_metric(row).name
    names = [name for task in TASKS.values() for name in task.shown if name in row]
    return [metric_info(name) for name in names if name != objective]


def secondary_metrics(row: Mapping[str, Any]) -> list[MetricInfo]:
    """Return the metrics in a row or a summary besides the objective: the primary metric, then requested ones."""
    own, objective = row.get("own_metrics") or {}, row.get("objective")
    requested = {WORST, *own, *(name for task in TASKS.values() for name in task.requestable)}
    names = [name for name in row if name in requested or name.startswith(METRIC_PREFIXES)]
    judged = [name for name in SCORES if name in row and objective not in (None, name)]
    return [metric_of(row, name) for name in (*judged, *names) if name != objective]


def value_text(one: MetricInfo, value: float | None, spread: float | None = None, sign: str = "%") -> str:
    """Format a value of a metric, in percent or as a plain number.

    Args:
        one: Metric.
        value: Value of the metric, or None if it is not known.
        spread: Standard deviation of the value, or None.
        sign: Text after a percentage.

    >>> value_text(MetricInfo("auroc", "AUROC"), 0.5), value_text(MetricInfo("loss", "loss", percent=False), 0.5, 0.1)
    ('50.0%', '0.5000 ± 0.1000')
    """
    if one.percent and value is not None:
        return format_percent(value, spread) + sign
    return format_number(value, spread)


def points_text(metric: MetricInfo, value: float, spread: float | None = None, signed: bool = False) -> str:
    """Format a value in points, which are percent or, for other metrics, plain numbers.

    Args:
        metric: Metric of the value.
        value: Value of the metric in percent or as a plain number, or a difference of such values.
        spread: Standard deviation of the value, or None.
        signed: Whether a positive value has a sign.

    >>> points_text(MetricInfo("auroc", "AUROC"), 71.0, 1.4), points_text(MetricInfo("auroc", "AUROC"), 0.5, signed=True)
    ('71.0 ± 1.4', '+0.5')
    >>> points_text(MetricInfo("mae", "MAE", percent=False), 0.0123, signed=True)
    '+0.0123'
    """
    percent = f"{value:.1f}" + ("" if spread is None else f" ± {spread:.1f}")
    text = percent if metric.percent else format_number(value, spread)
    return f"+{text}" if signed and not text.startswith("-") else text


def target_note(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a note, to follow a table's title, if a constant prediction reaches the target; otherwise nothing.

    There is none if no method trains a global model, because no rounds to the target are counted then.

    Args:
        rows: Rows of a comparison.

    >>> row = {"accuracy": 0.8, "objective": "accuracy", "target": 0.72, "constant_accuracy": 0.75}
    >>> target_note([row]), target_note([{**row, "accuracy": None}])
    ('A constant prediction, which scores 75.0 %, reaches the target of 72.0 %.', '')
    """
    row = rows[0]
    judge = objective_metric(row)
    constant = row.get(f"constant_{judge.name}")
    if (
        constant is None
        or all(one[judge.name] is None for one in rows)
        or judge.rank(constant) < judge.rank(row["target"])
    ):
        return ""
    constant, target = (value_text(judge, value, sign=" %") for value in (constant, row["target"]))
    return f"A constant prediction, which scores {constant}, reaches the target of {target}."


def interval_text(metric: MetricInfo, interval: Sequence[float] | None, sign: str = "") -> str:
    """Format an interval; empty without one.

    Args:
        metric: Metric of the interval.
        interval: Lower and upper end, or None.
        sign: ``+`` writes signs, for differences.

    >>> interval_text(MetricInfo("auroc", "AUROC"), (0.5, 0.75))
    '50.0 to 75.0'
    >>> interval_text(MetricInfo("loss", "loss", percent=False), (-1, 1), "+")
    '-1.0000 to +1.0000'
    """
    digits, factor = (1, 100) if metric.percent else (4, 1)
    return "" if interval is None else " to ".join(f"{factor * end:{sign}.{digits}f}" for end in interval)


def unit_text(one: MetricInfo) -> str:
    """Return the unit of a metric for a table header, `` in %`` or empty."""
    return " in %" if one.percent else ""


LARGEST = 1e6
"""Values of at least this size are formatted with an exponent."""


def missing_text(value: float | None) -> str:
    """Return the text of a value that is not a finite number: ``-`` if it is not known, ``diverged`` if it is infinite.

    Args:
        value: None, NaN or an infinite number.
    """
    return "diverged" if value is not None and math.isinf(value) else "-"


def method_title(row: Mapping[str, Any]) -> str:
    """Return the method of a comparison row for tables, with the numbers of diverged runs and of those with a value.

    >>> method_title({"method": "fedavg", "seeds": 3, "diverged": 2})
    'fedavg (2 of 3 diverged)'
    >>> method_title({"method": "fedavg", "seeds": 3, "seeds_defined": 2})
    'fedavg (value in 2 of 3 seeds)'
    """
    count, seeds = row.get("diverged", 0), row["seeds"]
    defined = row.get("seeds_defined", seeds)
    notes = ["diverged" if seeds == 1 else f"{count} of {seeds} diverged"] if count else []
    if 0 < defined < seeds - count:
        notes.append(f"value in {defined} of {seeds} seeds")
    return f"{row['method']} ({', '.join(notes)})" if notes else str(row["method"])


def format_percent(value: float | None, spread: float | None = None) -> str:
    """Format a share in percent.

    Args:
        value: Share from 0 to 1, or None if it is not known.
        spread: Standard deviation of the share, or None.

    >>> format_percent(0.5, 0.012), format_percent(None), format_percent(-1e12), format_percent(float("nan"))
    ('50.0 ± 1.2', '-', '-1.00e+14', '-')
    """
    return _with_spread(value, spread, 100, lambda size: 1)


def format_megabytes(value: float | None) -> str:
    """Format bytes as MB (10^6); ``-`` if they are not known.

    >>> format_megabytes(4_520), format_megabytes(88e6), format_megabytes(12e9)
    ('0.0045', '88.0', '12,000')
    """
    if value is None:
        return "-"
    if value >= 1e9:
        return f"{value / 1e6:,.0f}"
    return f"{value / 1e6:.1f}" if value >= 1e6 else f"{value / 1e6:.2g}"


def format_number(value: float | None, spread: float | None = None) -> str:
    """Format a plain number such as a loss or a perplexity.

    Args:
        value: Value, or None if it is not known.
        spread: Standard deviation of the value, or None.

    >>> format_number(1.25, 0.0125), format_number(None), format_number(31.4), format_number(float("inf"))
    ('1.2500 ± 0.0125', '-', '31.40', 'diverged')
    >>> format_number(846552.9, 18582.67), format_number(1234567, 89012)
    ('846553 ± 18583', '1.23e+06 ± 8.9e+04')
    """
    return _with_spread(value, spread, 1, lambda size: 4 if size < 10 else 2)


def _with_spread(value: float | None, spread: float | None, factor: int, digits: Callable[[float], int]) -> str:
    """Format a number and its spread with the same digits: fewer for large numbers, and from ``LARGEST`` an exponent."""
    if value is None or not math.isfinite(value):
        return missing_text(value)
    value, spread = factor * value, None if spread is None else factor * spread
    if max(abs(value), spread or 0) < LARGEST:
        after = 0 if abs(value) >= 1e4 else digits(abs(value))
        forms = (f".{after}f", f".{after}f")
    else:
        forms = (".2e", ".1e")
    return f"{value:{forms[0]}}" + ("" if spread is None else f" ± {spread:{forms[1]}}")
