"""Registry of tasks."""

from collections.abc import Collection, Container, Mapping
from typing import Any

from unskew.tasks.base import PROVIDED, Task
from unskew.tasks.classification import Classification, LanguageModeling, MultiLabel
from unskew.tasks.primary_metric import MetricInfo, metric_of
from unskew.tasks.regression import Regression
from unskew.tasks.segmentation import Segmentation
from unskew.tasks.survival import Survival

TASKS: dict[str, Task] = {
    task.name: task
    for task in (Classification(), MultiLabel(), LanguageModeling(), Regression(), Survival(), Segmentation())
}
"""Tasks by name."""


def tasks_with(needs: Collection[str]) -> list[str]:
    """Return the names of the tasks that provide what is needed of a sample.

    Args:
        needs: Needs of a rule; only the names of ``PROVIDED`` matter.

    >>> tasks_with(["counts", "full_gradient"])
    ['classification', 'multilabel']
    """
    return [name for name, task in TASKS.items() if PROVIDED.keys() & {*needs} <= task.provides]


def task_scored_by(name: str) -> Task:
    """Return the first task with a primary metric.

    Args:
        name: Name of the primary metric.

    >>> task_scored_by("concordance").name, task_scored_by("accuracy").name
    ('survival', 'classification')
    """
    return next(task for task in TASKS.values() if task.scored == name)


def task_of(names: Container[str]) -> Task:
    """Return the task with most of the metrics of a row or a summary.

    Args:
        names: Row or summary, or names of its metrics.

    >>> task_of({"accuracy": 0.5, "perplexity": 9.0}).name, task_of(["accuracy"]).name, task_of(["r2"]).name
    ('language', 'classification', 'regression')
    """
    return max(TASKS.values(), key=lambda task: sum(name in names for name in (task.scored, *task.extra_metrics)))


def objective_metric(summary: Mapping[str, Any]) -> MetricInfo:
    """Return the objective of the run of a summary or of a comparison row.

    Args:
        summary: Summary or row; without an objective, it is that of ``objective: auto``.

    >>> objective_metric({"objective": "ece"}).title, objective_metric({"r2": 0.5}).title
    ('ECE', 'R²')
    """
    return metric_of(summary, summary.get("objective") or task_of(summary).judged_by)


def client_metric(summary: Mapping[str, Any]) -> MetricInfo:
    """Return the metric that is shown for clients in the run of a summary or of a comparison row.

    >>> client_metric({"accuracy": 0.5, "objective": "auroc"}).name, client_metric({"accuracy": 0.5, "perplexity": 9}).name
    ('auroc', 'accuracy')
    """
    return metric_of(summary, task_of(summary).client_metric_name(objective_metric(summary).name))


def has_loss(task: Task, loss: str) -> bool:
    """Return whether a task has a loss.

    Args:
        task: The task.
        loss: Value of the option ``loss``.

    >>> has_loss(TASKS["regression"], "huber:0.5"), has_loss(TASKS["regression"], "mae:0.5")
    (True, False)
    """
    return loss.partition(":")[:2] in [option.partition(":")[:2] for option in task.loss_options]


def changed_loss(loss: str) -> Task | None:
    """Return the task that an option changes; None if its loss stays the default. Equal results mean equal losses.

    Args:
        loss: Value of the option ``loss``.

    >>> changed_loss("auto"), changed_loss("mse"), changed_loss("huber:1.0") == changed_loss("huber")
    (None, None, True)
    """
    task = next((task for task in TASKS.values() if has_loss(task, loss)), None)
    changed = None if task is None else task.with_loss(loss)
    return None if changed == task else changed
