"""What a federated sum is: a request, the rows of a client, and the interface of a kind of sum.

A kind turns all training rows of a client and the arguments of a request into tensors: counts (int64) and sums (float64).
Their shapes depend on the arguments only, so a server can validate them, and masks can hide those of a single client.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from unskew.errors import DataError
from unskew.json_models import JsonModel

Sums = dict[str, Tensor]
Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
Value = TypeVar("Value")
LARGEST = 1e40
"""Largest magnitude of a sum over one client."""
MOST_VALUES = 3
"""Most distinct values of a column for which the number of rows with each follows from count, sum and sum of squares."""
FREE = -1
"""In a shape: any length."""


@dataclass(frozen=True)
class SumRequest:
    """Request for sums of one kind.

    Attributes:
        kind: Name of the kind, in ``unskew.sums.registry.SUMS``.
        args: Names and constants that every client knows, as JSON; never a selection of rows.
        tensors: Public constants, such as means over all clients.
    """

    kind: str
    args: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Digest of the request, the same at every client."""
        constants = [
            [
                name,
                str(t.dtype),
                [*t.shape],
                hashlib.sha256(t.detach().cpu().contiguous().numpy().tobytes()).hexdigest(),
            ]
            for name, t in sorted(self.tensors.items())
        ]
        return hashlib.sha256(json.dumps([self.kind, self.args, constants], sort_keys=True).encode()).hexdigest()

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a float64 constant of the request.

        Args:
            name: Name of the tensor.
            *shape: Expected shape; ``FREE`` for any length.

        Raises:
            DataError: If it is missing, or has another dtype, another shape or values that are not finite.
        """
        found = self.tensors.get(name)
        fits = found is not None and found.dtype == torch.float64 and has_shape(found, shape)
        if not fits or found is None or not bool(found.isfinite().all()):
            raise DataError(f"The request for {self.kind} has no finite {name} of shape {[*shape]}.")
        return found


def has_shape(tensor: Tensor, shape: Sequence[int]) -> bool:
    """Return whether a tensor has a shape.

    Args:
        tensor: Tensor to check.
        shape: Shape, in which ``FREE`` stands for any length.
    """
    return len(shape) == tensor.dim() and all(n in (FREE, size) for n, size in zip(shape, tensor.shape, strict=True))


class Computed(Mapping[str, Value]):
    """Values by name, each computed when it is read.

    Args:
        names: Names, in order.
        compute: Function from the position of a name to its value.
    """

    def __init__(self, names: Sequence[str], compute: Callable[[int], Value]):
        self.names, self.compute = tuple(names), compute

    def __getitem__(self, name: str) -> Value:
        """Return the value of a name."""
        if name not in self.names:
            raise KeyError(name)
        return self.compute(self.names.index(name))

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self.names)

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self.names)


@dataclass(frozen=True)
class HeldOutScores:
    """Scores of a model on the held-out rows of a client.

    Attributes:
        sums: Number of predictions, correct ones, sum of the losses, and the tally of the task, float64 ``[3 + T]``.
        p: Probabilities, ``[n, C]``, or predictions.
        y: True values.
        decided: Predicted classes, ``[n]``; empty for other tasks.
        table: Numbers of rows in cells, from ``Task.held_out_sums``, int64.
        further: Further sums, likewise, float64 ``[S]``.
    """

    sums: Tensor
    p: np.ndarray
    y: np.ndarray
    decided: np.ndarray
    table: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    further: np.ndarray = field(default_factory=lambda: np.zeros(0))


@dataclass(frozen=True)
class ClientRows:
    """All training rows of a client, as kinds of sums use them. What a client does not have has no columns.

    Attributes:
        columns: Names of the numeric columns and dates of a table, as read.
        numbers: Their values before standardization, float64 ``[n, f]``; NaN where a value is missing.
        values: The distinct values of each categorical column, by its name.
        texts: Values of each categorical column, by its name, ``[n]``; None where a value is missing.
        missing: Missing values of each column of a table, by its name.
        target_names: Names of the targets of regression.
        targets: Their values before standardization, float64 ``[n, T]``.
        labels: Names of the label columns of a table.
        class_counts: Counts the samples of each class or label, ``[C]``; None without them.
        class_names: Names of the classes or labels, in the order in which they are counted.
        x: Inputs as a model gets them, before normalization, ``[n, ...]``; None before they are known.
        y: Targets as a task gets them, ``[n]`` or ``[n, L]``.
        gradient: Returns the mean gradient of the rows at the initial model, ``[d]``, and the variance of the gradients of
            single rows.
        score: Returns the scores of a model, ``v [d]`` and ``b [m]``, on the client's held-out rows.
    """

    columns: tuple[str, ...] = ()
    numbers: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    values: Mapping[str, Sequence[str]] = field(default_factory=dict)
    texts: Mapping[str, np.ndarray] = field(default_factory=dict)
    missing: Mapping[str, int] = field(default_factory=dict)
    target_names: tuple[str, ...] = ()
    targets: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    labels: tuple[str, ...] = ()
    class_counts: Callable[[], Tensor] | None = None
    class_names: tuple[str, ...] = ()
    x: Tensor | None = None
    y: Tensor | None = None
    gradient: Callable[[], tuple[Tensor, float]] | None = None
    score: Callable[[Tensor, Tensor], HeldOutScores] | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows; 0 if none of the arrays with one entry per row is known."""
        return max(len(self.numbers), len(self.targets), 0 if self.y is None else len(self.y))


class Arguments(JsonModel):
    """Arguments of a kind, which a site validates before it replies with a statistic that its administrator allows.

    Two requests for the same statistic must have equal arguments after validation, because a repeated request gets the stored
    reply. No argument may select rows.
    """


class SumKind:
    """Interface of a kind of sum.

    A kind with a ``permission`` also declares ``arguments`` and ``constants``: a site rejects all others.

    Args:
        name: Name; the name of the class by default.
        permission: Permission; that of the class by default.
    """

    name: str
    permission: str = ""
    """Entry of ``statistics.allow`` in ``site.yaml`` that the kind needs; empty if the experiment itself needs it."""
    arguments: ClassVar[type[Arguments]] = Arguments
    """Model of ``SumRequest.args``."""
    constants: ClassVar[tuple[str, ...]] = ()
    """Names of ``SumRequest.tensors``."""
    once: ClassVar[tuple[str, ...]] = ()
    """Constants for which a site accepts a single value in masked sums: sums for several values would reveal the summands of
    single sites."""
    of_experiment: ClassVar[bool] = False
    """True if the sums depend on further fields of the experiment, such as its seed, so that replies are stored for each
    experiment."""
    masked_only: ClassVar[bool] = False
    """True if a site sends the sums only under secure aggregation."""
    uses_labels: ClassVar[bool] = True
    """True if the sums depend on which columns are the labels, so that experiments with other ones get other replies."""
    scores_model: ClassVar[bool] = False
    """Whether the kind scores a model on held-out rows, which ``evaluate`` in ``site.yaml`` allows, only as masked sums."""

    def __init__(self, name: str | None = None, permission: str | None = None):
        self.name = name or self.name
        self.permission = self.permission if permission is None else permission

    def compute(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return a client's summands: int64 for counts, float64 for sums.

        Args:
            rows: All training rows of the client.
            request: Request of this kind.

        Raises:
            DataError: If the client's data do not have what is requested.
        """
        raise NotImplementedError

    def shapes(self, request: SumRequest) -> Shapes:
        """Return dtype and shape of each tensor; ``FREE`` for any length."""
        raise NotImplementedError

    def cells(self, request: SumRequest) -> tuple[str, ...]:
        """Return the names of the tensors that count rows, so that small ones could reveal single rows."""
        shapes = self.shapes(request).items()
        return tuple(name for name, (dtype, _) in shapes if dtype == torch.int64 and name != "clients")

    def disjoint(self, rows: ClientRows) -> bool:
        """Return whether each row is counted in at most one cell of a tensor of ``cells``, or one group of ``group_sizes``.

        A single hidden cell then follows from the number of rows, and noise in all cells costs epsilon once.
        """
        return False

    def grids(self, request: SumRequest, rows: ClientRows) -> dict[str, tuple[float, ...]]:
        """Return the grid on which a request counts the values of a column, by the name of the column.

        A site replies for one grid per column: two overlapping ones would reveal finer cells.

        Args:
            request: Request of this kind.
            rows: Training rows of the client, of which only the names of columns matter.
        """
        return {}

    def group_sizes(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return sizes of each group, ``[G]`` or ``[G, S]``, by the name of a tensor ``[G, ...]`` of sums over groups.

        A site sends 0 for a group if one of its sizes is small. Counts that sums are divided by have the sizes of the
        sums, so that they are hidden together. A tensor whose entries depend on all groups, such as an entropy, has the
        size of the smallest group for each of its entries. Sums of a number with few distinct values count rows, so the
        rarest value is a group as well, see ``MOST_VALUES``.

        Args:
            rows: All training rows of the client.
            request: Request of this kind.
        """
        return {}

    def describe(self, request: SumRequest) -> str:
        """Describe, for the administrator of a site, what is sent."""
        raise NotImplementedError

    def add(self, total: Sums, own: Sums) -> Sums:
        """Add the summands of one client to a total.

        Args:
            total: Sums of the clients before it.
            own: Summands of the client.
        """
        return {name: total[name] + value for name, value in own.items()}

    def check(self, request: SumRequest, own: Mapping[str, Tensor]) -> None:
        """Validate the summands of a client.

        Args:
            request: The request.
            own: Tensors that the client sent.

        Raises:
            DataError: If one is missing, or has another dtype or shape or impossible values.
        """
        expected = self.shapes(request)
        if {*own} != {*expected}:
            raise DataError(f"the sums of {self.name} have other names than {', '.join(expected)}")
        for name, (dtype, shape) in expected.items():
            tensor = own[name]
            if tensor.dtype != dtype or not has_shape(tensor, shape):
                raise DataError(f"{name} of {self.name} has another dtype or shape than requested")
            if not bool((tensor.abs() <= LARGEST).all()):
                raise DataError(f"{name} of {self.name} is not finite, or larger than {LARGEST:g}")
            if name in self.cells(request) and bool((tensor < 0).any()):
                raise DataError(f"{name} of {self.name} has negative counts")
