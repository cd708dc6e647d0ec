"""Metrics in a configuration: names, import paths, and functions that were given in Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, ValidatorFunctionWrapHandler, WrapValidator

from unskew.errors import short_repr, unknown_name
from unskew.provenance import with_provenance
from unskew.tasks.metrics import METRICS
from unskew.tasks.primary_metric import KNOWN_METRICS, RECALL

AUTO = "auto"
"""The objective of the task."""
MetricLike = str | Callable[..., Any]


def is_custom_metric(value: MetricLike) -> bool:
    """Return whether a metric is the user's: a function, or the import path of one."""
    return not isinstance(value, str) or (":" in value and not value.startswith(RECALL))


def metric_reference(value: MetricLike) -> str:
    """Return the text of a metric in configuration files; a function becomes ``package.module:name``."""
    return value if isinstance(value, str) else f"{value.__module__}:{value.__qualname__}"


def metric_name(value: MetricLike) -> str:
    """Return the name of a metric in the files of a run; of a function its own name.

    >>> metric_name("auroc"), metric_name("package.module:cost")
    ('auroc', 'cost')
    """
    return metric_reference(value).rpartition(":")[2].rpartition(".")[2] if is_custom_metric(value) else str(value)


def validate_metric(value: MetricLike) -> MetricLike:
    """Validate one entry of ``metrics``, without importing anything.

    Raises:
        ValueError: If there is no such metric, or a function has no name that files can hold.
    """
    if not is_custom_metric(value):
        if value not in METRICS:
            raise ValueError(unknown_name("metric", str(value), METRICS).rstrip("."))
        return value
    if not isinstance(value, str) and not (inspect.isfunction(value) or inspect.isbuiltin(value)):
        raise ValueError(f"the metric {short_repr(value)} must be a function f(y_true, scores); define one with def")
    name = metric_name(value)
    if not name.isidentifier() or name in KNOWN_METRICS or name in METRICS:
        taken = "is the name of a metric of unskew" if name.isidentifier() else "is not a name"
        raise ValueError(
            f"the metric {short_repr(metric_reference(value))} is called {name!r}, which {taken}; choose another name"
        )
    return value


def validate_objective(value: MetricLike) -> MetricLike:
    """Validate the objective as far as that is possible without the data.

    Raises:
        ValueError: If there is no such metric.
    """
    if is_custom_metric(value):
        return validate_metric(value)
    known = (AUTO, *KNOWN_METRICS)
    if value not in known and not str(value).startswith(RECALL) and not str(value).isidentifier():
        raise ValueError(unknown_name("objective", str(value), known).rstrip("."))
    return value


def _keep(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    return with_provenance(check(value), value)


MetricField = Annotated[MetricLike, AfterValidator(validate_metric), WrapValidator(_keep)]
ObjectiveField = Annotated[MetricLike, AfterValidator(validate_objective), WrapValidator(_keep)]
"""Fields of a configuration; a path in an untrusted file keeps its mark."""
