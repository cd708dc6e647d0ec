"""Metrics in a configuration: names, import paths, and functions that were given in Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, ValidatorFunctionWrapHandler, WrapValidator

from unskew.errors import shown, unknown
from unskew.provenance import derived
from unskew.tasks.metrics import METRICS
from unskew.tasks.primary_metric import KNOWN_METRICS, RECALL

AUTO = "auto"
"""The objective of the task."""
MetricLike = str | Callable[..., Any]


def is_own(value: MetricLike) -> bool:
    """Return whether a metric is the user's: a function, or the import path of one."""
    return not isinstance(value, str) or (":" in value and not value.startswith(RECALL))


def path_of(value: MetricLike) -> str:
    """Return the text of a metric in configuration files; a function becomes ``package.module:name``."""
    return value if isinstance(value, str) else f"{value.__module__}:{value.__qualname__}"


def name_of(value: MetricLike) -> str:
    """Return the name of a metric in the files of a run; of a function its own name.

    >>> name_of("auroc"), name_of("package.module:cost")
    ('auroc', 'cost')
    """
    return path_of(value).rpartition(":")[2].rpartition(".")[2] if is_own(value) else str(value)


def checked_metric(value: MetricLike) -> MetricLike:
    """Validate one entry of ``metrics``, without importing anything.

    Raises:
        ValueError: If there is no such metric, or a function has no name that files can hold.
    """
    if not is_own(value):
        if value not in METRICS:
            raise ValueError(unknown("metric", str(value), METRICS).rstrip("."))
        return value
    if not isinstance(value, str) and not (inspect.isfunction(value) or inspect.isbuiltin(value)):
        raise ValueError(f"the metric {shown(value)} must be a function f(y_true, scores); define one with def")
    name = name_of(value)
    if not name.isidentifier() or name in KNOWN_METRICS or name in METRICS:
        taken = "is the name of a metric of unskew" if name.isidentifier() else "is not a name"
        raise ValueError(f"the metric {shown(path_of(value))} is called {name!r}, which {taken}; choose another name")
    return value


def checked_objective(value: MetricLike) -> MetricLike:
    """Validate the objective as far as that is possible without the data.

    Raises:
        ValueError: If there is no such metric.
    """
    if is_own(value):
        return checked_metric(value)
    known = (AUTO, *KNOWN_METRICS)
    if value not in known and not str(value).startswith(RECALL) and not str(value).isidentifier():
        raise ValueError(unknown("objective", str(value), known).rstrip("."))
    return value


def _keep(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    return derived(check(value), value)


MetricField = Annotated[MetricLike, AfterValidator(checked_metric), WrapValidator(_keep)]
ObjectiveField = Annotated[MetricLike, AfterValidator(checked_objective), WrapValidator(_keep)]
"""Fields of a configuration; a path in an untrusted file keeps its mark."""
