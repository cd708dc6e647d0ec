"""Registry of tasks."""

from collections.abc import Collection

from unskew.tasks.base import PROVIDED, Task
from unskew.tasks.classification import Classification, LanguageModeling, MultiLabel
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


def has_loss(task: Task, loss: str) -> bool:
    """Return whether a task has a loss.

    Args:
        task: The task.
        loss: Value of the option ``loss``.

    >>> has_loss(TASKS["regression"], "huber:0.5"), has_loss(TASKS["regression"], "mae:0.5")
    (True, False)
    """
    return loss.partition(":")[:2] in [option.partition(":")[:2] for option in task.loss_options]
