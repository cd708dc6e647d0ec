"""Options of tasks, and constants from the data of all clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

from torch import Tensor

Ask = Callable[[str, Mapping[str, Any], Mapping[str, Tensor]], dict[str, Tensor]]
"""Maps the kind, the arguments and the constants of a federated sum to the sums over the training rows of all clients."""


class TaskConstants:
    """Part of the interface of a task that concerns its options and constants."""

    name: ClassVar[str]

    section: ClassVar[str] = ""
    """Name of the section of the configuration with the task's options, a field of ``DataSpec``; empty if it has none."""

    @property
    def fits(self) -> bool:
        """True if ``fit`` must be called before training, because constants of the task come from sums over the clients."""
        return False

    def configured(self, options: Any) -> Self:
        """Return the task with options of the configuration.

        Args:
            options: The section ``section`` of the configuration.

        Raises:
            ConfigError: If options contradict each other.
        """
        return self

    @property
    def of_one_site(self) -> Self:
        """Task that can be fitted to the data of a single site, for checks before all sites are known."""
        return self

    def asks(self, kind: str, args: Mapping[str, Any]) -> bool:
        """Return whether ``fit`` may ask a client for a sum, whatever its data are.

        Args:
            kind: Name of the kind.
            args: Arguments of the request.
        """
        return False

    def accepts(self, constants: Mapping[str, Sequence[float]]) -> str:
        """Return why constants cannot be those of this task after ``fit``; empty if they can.

        A site compares what a server sends with its experiment, so that the server cannot choose constants that reveal rows.

        Args:
            constants: Constants of a task, from ``with_constants``.
        """
        return f"the task {self.name} has no constants" if constants else ""

    def fit(self, ask: Ask) -> Self:
        """Return the task with constants from sums over the clients, if ``fits``.

        Args:
            ask: Returns sums over the training rows of all clients, whose targets, as ``read`` returns them, are their ``y``.

        Raises:
            DataError: If no task can be fitted to these sums.
        """
        return self

    @property
    def constants(self) -> dict[str, tuple[float, ...]]:
        """Constants from the data that predictions need, for files and messages."""
        return {}

    def with_constants(self, constants: Mapping[str, Sequence[float]], classes: int) -> Self:
        """Return the task of a trained model.

        Args:
            constants: Constants of the task for which it was trained.
            classes: Number of outputs.

        Raises:
            ValueError: If these are not the constants of such a task.
        """
        if constants:
            raise ValueError(f"the task {self.name} has no constants")
        return self
