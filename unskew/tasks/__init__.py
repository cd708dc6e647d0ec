"""What a model is trained for: the loss, the beliefs that a model's outputs express, and the figures that a task reports."""

from unskew.tasks.labels import Classification, Language, MultiLabel
from unskew.tasks.regression import Regression
from unskew.tasks.task import Task

TASKS: dict[str, Task] = {task.name: task for task in (Classification(), MultiLabel(), Language(), Regression())}
"""By name."""

__all__ = ["TASKS", "Classification", "Language", "MultiLabel", "Regression", "Task"]
