"""Sums over the columns of a table: moments, categories, missing values, and counts of classes and in cells."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from unskew.errors import DataError, abbreviate
from unskew.sums.base import FREE, MOST_VALUES, Arguments, ClientRows, Shapes, SumKind, SumRequest, Sums
from unskew.tasks.base import OUTSIDE

LONGEST = 1000
"""Maximum number of characters of a category value."""
LARGEST_SUM = 1e15
"""Largest magnitude of the sum of a column at one client."""
CELLS = 64
"""Number of cells of a histogram between the ends of its range."""


def counts_and_sums(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute number and sum of the values in each column of a client's rows ``[n_k, f]``; NaN means missing."""
    return (~np.isnan(rows)).sum(0), np.asarray(np.nansum(rows, 0, dtype=np.float64))


def sums_of_squares(rows: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Compute the sum of squared distances from the global mean for each column, ``[f]``.

    Args:
        rows: Values of a client, ``[n, f]``.
        mean: Mean over all clients, ``[f]``.
    """
    return np.asarray(np.nansum((rows - mean) ** 2, 0, dtype=np.float64))


def named_columns(request: SumRequest, rows: ClientRows) -> None:
    """Validate that a client has the requested columns and targets.

    Args:
        request: Request of columns and targets.
        rows: Rows of the client.

    Raises:
        DataError: If it has others.
    """
    own = [*rows.columns], [*rows.target_names]
    if own != ([*request.args.get("columns", ())], [*request.args.get("targets", ())]):
        names = [f"{abbreviate(some, 20) or 'none'}" for some in own]
        raise DataError(f"The request for {request.kind} is for other columns than {names[0]} and targets {names[1]}.")


def width(request: SumRequest) -> int:
    """Return the number of columns and targets of a request."""
    return len(request.args.get("columns", ())) + len(request.args.get("targets", ()))


def listing(request: SumRequest) -> str:
    """Return the names of the columns and targets of a request as text."""
    return ", ".join((*request.args.get("columns", ()), *request.args.get("targets", ())))


def num_behind_sums(rows: ClientRows, request: SumRequest) -> Tensor:
    """Return how many values each sum over a column or target describes; of few distinct values, the rarest one counts.

    A site hides sums and numbers of values by these sizes.

    Args:
        rows: Rows of a client.
        request: Request of columns and targets.
    """
    named_columns(request, rows)
    return as_tensor(*map(sizes_of_columns, (rows.numbers, rows.targets)))


def sizes_of_columns(values: np.ndarray) -> np.ndarray:
    """Return the number of values of each column, or of the rarest value of a column with at most ``MOST_VALUES``, ``[f]``.

    Args:
        values: Columns, ``[n, f]``; NaN means missing.
    """
    sizes = np.zeros(values.shape[1], np.int64)
    for j, column in enumerate(values.T):
        counts = np.unique(column[~np.isnan(column)], return_counts=True)[1]
        sizes[j] = counts.min() if 0 < len(counts) <= MOST_VALUES else counts.sum()
    return sizes


def as_tensor(*parts: np.ndarray) -> Tensor:
    """Return arrays one after the other as one tensor; dtypes stay the same."""
    return torch.from_numpy(np.concatenate(parts) if len(parts) > 1 else np.ascontiguousarray(parts[0]))


def increasing_range(ends: tuple[float, float]) -> tuple[float, float]:
    """Validate that a range is not empty, and return its ends with 0.0 for -0.0 (raises ``ValueError`` otherwise)."""
    if ends[0] >= ends[1]:
        raise ValueError("the end of a range must be greater than its start")
    return ends[0] + 0.0, ends[1] + 0.0


class ColumnArguments(Arguments):
    """Names of columns and targets."""

    columns: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()


class ClassArguments(Arguments):
    """Number of classes."""

    classes: Annotated[int, Field(ge=1)]


class RangeArguments(Arguments):
    """Column and ends of a range."""

    column: str
    range: Annotated[tuple[float, float], AfterValidator(increasing_range)]


class Moments(SumKind):
    """Number and sum of the values of each column and target."""

    name = "moments"
    uses_labels = False
    arguments = ColumnArguments

    def compute(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return a client's summands."""
        named_columns(request, rows)
        counts, sums = zip(counts_and_sums(rows.numbers), counts_and_sums(rows.targets), strict=True)
        return {"counts": as_tensor(*counts), "sums": as_tensor(*sums)}

    def shapes(self, request: SumRequest) -> Shapes:
        """Return dtype and shape of each tensor."""
        size = (width(request),)
        return {"counts": (torch.int64, size), "sums": (torch.float64, size)}

    def check(self, request: SumRequest, own: Mapping[str, Tensor]) -> None:
        """Validate the summands of a client; a larger sum would give others squares that are too large."""
        super().check(request, own)
        if bool((own["sums"].abs() > LARGEST_SUM).any()):
            raise DataError(f"a sum is larger than {LARGEST_SUM:g}; divide the column by a power of ten")

    def describe(self, request: SumRequest) -> str:
        """Describe what is sent."""
        return f"for each of {listing(request)}: number of values and their sum"

    def group_sizes(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return the number of values behind each sum."""
        return dict.fromkeys(("counts", "sums"), num_behind_sums(rows, request))


class Squares(SumKind):
    """Sum of squared deviations of each column and target from the mean over all clients."""

    name = "squares"
    uses_labels = False
    arguments = ColumnArguments
    constants = ("mean",)

    def compute(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return a client's summands."""
        named_columns(request, rows)
        mean = request.tensor("mean", width(request)).numpy()
        first = len(rows.columns)
        parts = sums_of_squares(rows.numbers, mean[:first]), sums_of_squares(rows.targets, mean[first:])
        return {"squares": as_tensor(*parts)}

    def shapes(self, request: SumRequest) -> Shapes:
        """Return dtype and shape of each tensor."""
        return {"squares": (torch.float64, (width(request),))}

    def check(self, request: SumRequest, own: Mapping[str, Tensor]) -> None:
        """Validate the summands of a client."""
        super().check(request, own)
        if bool((own["squares"] < 0).any()):
            raise DataError("a sum of squares is negative")

    def describe(self, request: SumRequest) -> str:
        """Describe what is sent."""
        return f"for each of {listing(request)}: sum of squared deviations from the mean of all sites"

    def group_sizes(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return the number of values behind each sum."""
        return {"squares": num_behind_sums(rows, request)}


class Categories(SumKind):
    """Values of categorical columns, as JSON; the total is their union, so masks cannot hide those of one client."""

    name = "categories"

    def compute(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return a client's values."""
        unknown = [name for name in request.args["columns"] if name not in rows.values]
        if unknown:
            raise DataError(f"These data have no categorical column {unknown[0]!r}.")
        return {f"values.{j}": encode_values(rows.values[name]) for j, name in enumerate(request.args["columns"])}

    def shapes(self, request: SumRequest) -> Shapes:
        """Return dtype and shape of each tensor."""
        return {f"values.{j}": (torch.uint8, (FREE,)) for j in range(len(request.args["columns"]))}

    def check(self, request: SumRequest, own: Mapping[str, Tensor]) -> None:
        """Validate the values of a client."""
        super().check(request, own)
        for tensor in own.values():
            decode_values(tensor)

    def add(self, total: Sums, own: Sums) -> Sums:
        """Return the union of the values."""
        both = {name: {*decode_values(total[name]), *decode_values(values)} for name, values in own.items()}
        return {name: encode_values(sorted(values)) for name, values in both.items()}

    def describe(self, request: SumRequest) -> str:
        """Describe what is sent."""
        return f"the values of each of {', '.join(request.args['columns'])}"


def encode_values(values: Sequence[str]) -> Tensor:
    """Encode the values of a categorical column as a tensor of bytes."""
    text = json.dumps([*values], ensure_ascii=False, separators=(",", ":"))
    return torch.from_numpy(np.frombuffer(text.encode(), np.uint8).copy())


def decode_values(tensor: Tensor) -> list[str]:
    """Decode the values of a categorical column.

    Args:
        tensor: Bytes, as ``encode_values`` returns them.

    Raises:
        DataError: If they are not valid.
    """
    try:
        values = json.loads(tensor.numpy().tobytes())
        texts = isinstance(values, list) and all(isinstance(v, str) and len(v) <= LONGEST for v in values)
        if not texts or len({*values}) < len(values):
            raise ValueError
    except (ValueError, RecursionError) as error:
        raise DataError("its categories cannot be read") from error
    return [str(value) for value in values]


class Classes(SumKind):
    """Number of samples of each class or label."""

    name = "classes"
    arguments = ClassArguments

    def compute(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return a client's summands."""
        if rows.class_counts is None:
            raise DataError("These data have no classes that can be counted.")
        return {"counts": rows.class_counts().cpu().to(torch.int64)}

    def shapes(self, request: SumRequest) -> Shapes:
        """Return dtype and shape of each tensor."""
        return {"counts": (torch.int64, (int(request.args["classes"]),))}

    def describe(self, request: SumRequest) -> str:
        """Describe what is sent."""
        return f"number of samples of each of {request.args['classes']} classes"

    def disjoint(self, rows: ClientRows) -> bool:
        """Return whether each row is counted in at most one cell."""
        return rows.y is None or rows.y.dim() == 1


class Pixels(SumKind):
    """Number of pixels of each class in masks, as float64, because sums over sites may exceed 32 bits."""

    name = "pixels"
    arguments = ClassArguments

    def compute(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return a client's summands."""
        if rows.y is None or rows.y.dtype != torch.uint8:
            raise DataError("These data have no masks whose pixels can be counted.")
        counts = torch.bincount(rows.y.cpu().flatten(), minlength=OUTSIDE + 1)
        return {"counts": counts[: int(request.args["classes"])].double()}

    def shapes(self, request: SumRequest) -> Shapes:
        """Return dtype and shape of each tensor."""
        return {"counts": (torch.float64, (int(request.args["classes"]),))}

    def describe(self, request: SumRequest) -> str:
        """Describe what is sent."""
        return f"number of pixels of each of {request.args['classes']} classes"


class Missing(SumKind):
    """Number of missing values of each column."""

    name = "missing"
    permission = "missing"
    uses_labels = False
    arguments = ColumnArguments

    def compute(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return a client's summands."""
        if [*rows.missing] != [*request.args["columns"]]:
            raise DataError("The request for missing values is for other columns.")
        return {"counts": torch.tensor([*rows.missing.values()], dtype=torch.int64)}

    def shapes(self, request: SumRequest) -> Shapes:
        """Return dtype and shape of each tensor."""
        return {"counts": (torch.int64, (len(request.args["columns"]),))}

    def describe(self, request: SumRequest) -> str:
        """Describe what is sent."""
        return f"number of missing values of each of {', '.join(request.args['columns'])}"


class Histogram(SumKind):
    """Number of values of one column in equal cells of a public range, below it and above it."""

    name = "histogram"
    permission = "histograms"
    uses_labels = False
    arguments = RangeArguments

    def disjoint(self, rows: ClientRows) -> bool:
        """Return whether each row is counted in at most one cell."""
        return True

    def grids(self, request: SumRequest, rows: ClientRows) -> dict[str, tuple[float, ...]]:
        """Return the grid of each column."""
        low, high = request.args["range"]
        return {request.args["column"]: (low, high, CELLS)}

    def compute(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return a client's summands."""
        column = request.args["column"]
        if column not in rows.columns:
            raise DataError(f"These data have no numeric column {column!r}.")
        values = rows.numbers[:, rows.columns.index(column)]
        low, high = request.args["range"]
        edges = np.linspace(low, high, CELLS + 1)
        cell = np.searchsorted(edges, values[~np.isnan(values)], side="right")
        cell[values[~np.isnan(values)] == edges[-1]] = CELLS  # the last cell includes its upper end
        return {"counts": torch.from_numpy(np.bincount(cell, minlength=CELLS + 2).astype(np.int64))}

    def shapes(self, request: SumRequest) -> Shapes:
        """Return dtype and shape of each tensor."""
        return {"counts": (torch.int64, (CELLS + 2,))}

    def describe(self, request: SumRequest) -> str:
        """Describe what is sent."""
        low, high = request.args["range"]
        cells = f"{CELLS} equal cells from {low:g} to {high:g}, below and above"
        return f"number of values of {request.args['column']} in {cells}"
