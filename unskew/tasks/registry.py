"""Registry of tasks."""

from unskew.tasks.base import Task
from unskew.tasks.classification import Classification, LanguageModeling, MultiLabel
from unskew.tasks.regression import Regression

TASKS: dict[str, Task] = {
    task.name: task for task in (Classification(), MultiLabel(), LanguageModeling(), Regression())
}
"""Tasks by name."""
