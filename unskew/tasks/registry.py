"""The tasks by name."""

from unskew.tasks.labels import Classification, Language, MultiLabel
from unskew.tasks.regression import Regression
from unskew.tasks.task import Task

TASKS: dict[str, Task] = {task.name: task for task in (Classification(), MultiLabel(), Language(), Regression())}
"""By name."""
