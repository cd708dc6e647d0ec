"""Metrics in a configuration: names, import paths, and functions passed in Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator

from unskew.errors import short_repr, unknown_name
from unskew.tasks.primary_metric import KNOWN_METRICS, METRIC_PREFIXES, RECALL

AUTO = "auto"
"""Objective that means the default of the task, ``Task.judged_by``."""
MetricLike = str | Callable[..., Any]


def is_custom_metric(value: MetricLike) -> bool:
    """Return whether a metric is custom: a function, or the import path of a function."""
    return not isinstance(value, str) or (":" in value and not value.startswith(RECALL))


def metric_reference(value: MetricLike) -> str:
    """Return the string for a metric in configuration files; a function becomes ``package.module:name``."""
    return value if isinstance(value, str) else f"{value.__module__}:{value.__qualname__}"


def metric_name(value: MetricLike) -> str:
    """Return the name of a metric in the files of a run; for a custom metric, the name of its function.

    >>> metric_name("auroc"), metric_name("package.module:cost")
    ('auroc', 'cost')
    """
    return metric_reference(value).rpartition(":")[2].rpartition(".")[2] if is_custom_metric(value) else str(value)


def validate_metric(value: MetricLike) -> MetricLike:
    """Validate one entry of ``metrics``, without importing anything.

    Args:
        value: Name of a metric, import path, or function.

    Raises:
        ValueError: If the metric is unknown, or a function's name is missing or taken.
    """
    from unskew.tasks.registry import TASKS  # imports NumPy, which the default configuration does not need

    requestable = {name for task in TASKS.values() for name in task.requestable}
    if not is_custom_metric(value):
        if value not in requestable:
            raise ValueError(unknown_name("metric", str(value), requestable).rstrip("."))
        return value
    if not isinstance(value, str) and not (inspect.isfunction(value) or inspect.isbuiltin(value)):
        raise ValueError(f"the metric {short_repr(value)} must be a function f(y_true, scores); define one with def")
    name = metric_name(value)
    if not name.isidentifier() or name in KNOWN_METRICS or name in requestable:
        taken = "is the name of a built-in metric" if name.isidentifier() else "is not a valid name"
        raise ValueError(
            f"the metric {short_repr(metric_reference(value))} is named {name!r}, which {taken}; choose another name"
        )
    return value


def validate_objective(value: MetricLike) -> MetricLike:
    """Validate the objective as far as possible without the data.

    Args:
        value: Name of a metric, import path, or function.

    Raises:
        ValueError: If the metric is unknown.
    """
    if is_custom_metric(value):
        return validate_metric(value)
    known = (AUTO, *KNOWN_METRICS)
    if value not in known and not str(value).startswith(METRIC_PREFIXES) and not str(value).isidentifier():
        raise ValueError(unknown_name("objective", str(value), known).rstrip("."))
    return value


MetricField = Annotated[MetricLike, AfterValidator(validate_metric)]
ObjectiveField = Annotated[MetricLike, AfterValidator(validate_objective)]
