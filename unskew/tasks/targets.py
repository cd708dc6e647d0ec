"""Targets of tasks: how they are read and described."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar, Self

import numpy as np
from torch import Tensor

from unskew.errors import DataError


class TaskTargets:
    """Part of the interface of a task that concerns targets. ``C`` is the number of classes or labels."""

    name: ClassVar[str]

    provides: ClassVar[frozenset[str]] = frozenset()
    """Names of ``PROVIDED``; methods that need others do not support the task."""

    numeric_labels: ClassVar[bool] = False
    """True if the labels of a table are columns of numbers, so that the configuration must name the task."""

    coded_labels: ClassVar[tuple[int, ...]] = ()
    """Positions of label columns that need not have numbers, because ``encode_column`` reads them."""

    label_order: ClassVar[str] = ""
    """Order of the label columns of a table, in words; empty if any order is right."""

    standardized: ClassVar[bool] = False
    """True if ``standardize`` needs mean and standard deviation of all clients' targets."""

    tokens: ClassVar[bool] = False
    """True if inputs and targets are token ids, padded with -1, so that the outputs have no names."""

    pixels: ClassVar[bool] = False
    """True if targets are one class per pixel, ``[n, *sides]``, which move with their images."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the outputs, if the task and not the data define them; otherwise empty."""
        return ()

    def named(self, names: Sequence[str]) -> Self:
        """Return the task with the names of its outputs, if its metrics have them.

        Args:
            names: Names of the classes, labels or targets.
        """
        return self

    @property
    def exclusive(self) -> bool:
        """True if no sample counts for several labels."""
        return "one_class" in self.provides or "counts" not in self.provides

    def recoded(self, y: Tensor, who: str) -> Tensor:
        """Return targets of an array with the values that ``read`` expects, if the configuration names other ones.

        Args:
            y: Targets as the user wrote them.
            who: Owner of the targets, for errors.
        """
        return y

    def read(self, y: Tensor, who: str) -> Tensor:
        """Return targets in the shape and type of the task.

        Args:
            y: Targets as they were passed.
            who: Name of the data, for errors.

        Raises:
            DataError: If shape or values do not match the task.
        """
        raise NotImplementedError

    def check_labels(self, names: Sequence[str]) -> None:
        """Validate the number of label columns of a table, if labels are numbers.

        Args:
            names: Names of the label columns.

        Raises:
            ConfigError: If the task needs another number of columns.
        """

    def encode_column(self, name: str, values: Sequence[object], where: str) -> np.ndarray:
        """Return the numbers of a label column of a table, ``[n]``, if its position is in ``coded_labels``.

        Args:
            name: Name of the column.
            values: Values of the column; None where one is missing.
            where: Name of the data, for errors.

        Raises:
            DataError: If a value is missing or not valid.
        """
        raise NotImplementedError

    def check(self, y: Tensor, classes: int, who: str, x: Tensor | None = None) -> None:
        """Validate that targets match the number of classes.

        Args:
            y: Targets from ``read``.
            classes: Number of classes, labels, tokens or targets.
            who: Name of the data, for errors.
            x: Inputs of the samples.

        Raises:
            DataError: If the targets do not match.
        """
        if y.dim() == 2 and y.shape[1] != classes:
            raise DataError(f"The labels of {who} have {y.shape[1]} columns, but there are {classes} labels.")

    def num_outputs(self, ys: Sequence[Tensor]) -> int:
        """Return the number of outputs for targets of all clients and the test set."""
        return ys[0].shape[1] if ys[0].dim() > 1 else 1

    def standardize(self, y: Tensor) -> Tensor:
        """Return targets from ``read`` as a federation stores them."""
        return y

    def distribution(self, y: Tensor, classes: int) -> Tensor:
        """Return the numbers, ``[n, D]``, whose means describe the targets of a client, such as 0 and 1 for each class.

        Args:
            y: Targets, ``[n]`` or ``[n, L]``.
            classes: Number of classes.
        """
        return y.reshape(len(y), -1).double()

    def counts(self, y: Tensor, classes: int) -> Tensor:
        """Count the samples of each class or label, ``[C]``.

        Args:
            y: Targets of all samples, ``[n]`` or ``[n, L]``.
            classes: Number of classes.
        """
        raise NotImplementedError

    def pairs(self, y: Tensor, classes: int) -> Tensor:
        """Count the samples that have both of two labels, ``[C, C]``; the diagonal is ``counts``.

        Args:
            y: Targets of all samples, ``[n]`` or ``[n, L]``.
            classes: Number of classes.
        """
        raise NotImplementedError

    def targets(self, labels: Tensor, classes: int) -> Tensor:
        """Return the targets of samples that have one label each.

        Args:
            labels: One label per sample, ``[B]``.
            classes: Number of classes.
        """
        raise NotImplementedError

    def named_counts(self, y: Tensor, names: Collection[str]) -> dict[str, int]:
        """Return the number of samples of each class or label by its name.

        Args:
            y: Targets, ``[n]`` or ``[n, L]``.
            names: Names of all classes or labels.
        """
        return dict(zip(names, self.counts(y, len(names)).tolist(), strict=True))
