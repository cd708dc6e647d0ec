"""Encoders of numeric, categorical and date columns as model inputs, fitted with client sums."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from unskew.data.column_statistics import ColumnTotals
from unskew.data.normalization import Normalization
from unskew.data.readers.arrow import cast, pa, pc, plain_numbers
from unskew.data.readers.cell_types import TRUTH, may_be_number
from unskew.data.readers.column_roles import is_category, is_date, is_numeric, is_string
from unskew.data.readers.missing_values import PLACEHOLDERS
from unskew.data.readers.names import with_clean_names
from unskew.data.validation import OFFSET_RATIO
from unskew.errors import DataError
from unskew.sums.base import ClientRows, Computed

Kind = Literal["number", "category", "date"]


@dataclass(frozen=True)
class Encoder:
    """Encoder of one table column.

    Attributes:
        name: Name of the column.
        kind: ``number``; ``category``, encoded as the position of its value in ``values``, starting at 1, and as 0 if
            the value is missing or unknown; or ``date``, encoded as days since 1970.
        values: Known categories.
        mean: Mean over the training rows of all clients, for numbers and dates; it replaces missing values.
        std: Standard deviation over the same rows.
        fills: Whether missing values are allowed and replaced.
        marks: Whether an additional input marks missing values.
        form: Format of dates in the training files, if it is not ISO 8601.
    """

    name: str
    kind: Kind = "number"
    values: tuple[str, ...] = ()
    mean: float = 0.0
    std: float = 1.0
    fills: bool = False
    marks: bool = False
    form: str = ""

    @property
    def offset(self) -> float:
        """Number that is subtracted in float64: the mean, if float32 would lose digits of the differences to it."""
        return self.mean if self.kind != "category" and abs(self.mean) > OFFSET_RATIO * self.std else 0.0


REMEDY = (
    ". Fill them, exclude the column (--exclude), or set missing to mean or indicator (infinite values are never "
    "replaced)."
)
"""Advice in error messages about training data."""
UNITS_PER_DAY = {unit: 86_400 * 1000**power for power, unit in enumerate(("s", "ms", "us", "ns"))}


def read_columns(
    table: Any, encoders: Sequence[Encoder], where: str, remedy: str = REMEDY, exact: Collection[str] = ()
) -> np.ndarray:
    """Read the columns of some encoders as float32 ``[n, f]``, or float64 if float32 would lose digits of a column.

    Missing numbers and dates are NaN.

    Args:
        table: pyarrow table.
        encoders: Encoders of the columns to read; if they have an offset, float32 would lose digits of their columns.
        where: Name of the data, for errors.
        remedy: Advice at the end of the error for missing or infinite values.
        exact: Further columns of which float32 would lose digits, in other rows.

    Raises:
        DataError: If a column does not exist, has another type, or lacks required values.
    """
    out, there = np.zeros((table.num_rows, len(encoders)), np.float32), set(table.column_names)
    for j, encoder in enumerate(encoders):
        if encoder.name not in there:
            raise DataError(f"{where}: the column {encoder.name!r} is missing; the training rows have it.")
        values = read_column(table.column(encoder.name), encoder, f"{where}: column {encoder.name!r}", remedy)
        known = encoder.offset != 0 or encoder.name in exact
        is_exact = encoder.kind != "category" and (known or needs_offset(values))
        if is_exact and out.dtype == np.float32:
            out = out.astype(np.float64)
        out[:, j] = values if is_exact else values.astype(np.float32)
    return out


def exact_columns(values: np.ndarray, encoders: Sequence[Encoder]) -> list[str]:
    """Return the names of the columns of which float32 would lose digits.

    Args:
        values: Columns as ``read_columns`` returns them, ``[n, f]``.
        encoders: Encoder of each column.
    """
    if values.dtype == np.float32:
        return []
    return [encoder.name for encoder, column in zip(encoders, values.T, strict=True) if needs_offset(column)]


def needs_offset(values: np.ndarray) -> bool:
    """Return whether float32 would lose digits of the differences between the values of a column ``[n]``."""
    values = values[~np.isnan(values)]
    if not len(values):
        return False
    mean, std = abs(float(values.mean())), float(values.std())
    return mean > OFFSET_RATIO * std and (std > 0 or mean >= 2**24)


def read_column(column: Any, encoder: Encoder, what: str, remedy: str = REMEDY) -> np.ndarray:
    """Read one column as float64 ``[n]``, or category codes as float32.

    Args:
        column: Values of the column.
        encoder: Encoder of the column.
        what: Description of the column, for errors.
        remedy: Advice at the end of the error for missing or infinite values.
    """
    empty = pa.types.is_null(column.type)
    if encoder.kind == "category":
        if not empty and not is_category(column):
            raise DataError(f"{what} contains {column.type}, not categories as in the training rows.")
        return to_codes(to_texts(column), encoder.values)
    if encoder.kind == "date":
        if not empty and not is_date(column.type):
            mismatch = first_mismatch(column, pa.timestamp("us"))
            raise DataError(f"{what} contains {mismatch}, not dates. Write them as 2024-01-31, or 2024-01-31 12:00:00.")
        values = days_since_1970(column)
    else:
        if not empty and not is_numeric(column.type):
            mismatch = first_mismatch(column, pa.float64())
            raise DataError(f"{what} contains {mismatch}, not numbers as in the training rows.")
        values = column.cast(pa.float64(), safe=False).to_numpy()
    infinite = np.abs(values) > np.finfo(np.float32).max
    if infinite.any() or (not encoder.fills and np.isnan(values).any()):
        bad = np.flatnonzero(infinite if encoder.fills else infinite | np.isnan(values))
        raise DataError(f"{what} has {len(bad)} missing or infinite values, the first in row {bad[0]}{remedy}")
    return np.asarray(values)


def days_since_1970(column: Any) -> np.ndarray:
    """Return dates as days since 1970, float64 ``[n]``; missing dates are NaN.

    Args:
        column: Dates of any resolution, or a column without values.

    >>> import pyarrow as pa
    >>> days_since_1970(pa.chunked_array([pa.array([43_200_000_000_001, None], pa.timestamp("ns"))]))
    array([0.5, nan])
    """
    kind = column.type
    if pa.types.is_null(kind):
        return np.full(len(column), np.nan)
    units = 1 if pa.types.is_date32(kind) else UNITS_PER_DAY["ms" if pa.types.is_date64(kind) else kind.unit]
    integers = column.cast(pa.int32() if units == 1 else pa.int64()).fill_null(0).to_numpy().astype(np.int64)
    if units == UNITS_PER_DAY["ns"]:
        integers, units = integers // 1000, UNITS_PER_DAY["us"]
    return np.where(column.is_null().to_numpy(), np.nan, integers / units)


def first_mismatch(column: Any, kind: Any) -> str:
    """Describe the first string that cannot be converted to a type and its row (from 0), or else the column's type.

    Args:
        column: Values of the column.
        kind: Arrow type to convert to.

    >>> import pyarrow as pa
    >>> first_mismatch(pa.chunked_array([["true", None, "2", "maybe"]]), pa.float64())
    "'maybe' in row 3"
    """
    if is_string(column.type):
        for row, value in enumerate(column.to_pylist()):
            text = None if value is None or value.strip() in PLACEHOLDERS else value.strip()
            if pa.types.is_floating(kind):
                fits = text is None or text in TRUTH or may_be_number(text)
            else:
                fits = cast(pa.array([text], pa.string()), kind) is not None
            if not fits:
                return f"{value!r} in row {row}"
    return str(column.type)


def to_texts(column: Any, what: str | None = None) -> np.ndarray:
    """Return the values as names: clean strings, whole numbers without a decimal point; missing values are None.

    Args:
        column: Values of the column.
        what: Description of the column, for the error about two names for the same thing; None does not check for it.
    """
    column = plain_numbers(column)
    if pa.types.is_floating(column.type):
        is_whole = pc.and_(pc.equal(column, pc.round(column)), pc.less(pc.abs(column), 2.0**53))
        integers = pc.if_else(is_whole, column, 0.0).cast(pa.int64()).cast(pa.string())
        column = pc.if_else(is_whole, integers, column.cast(pa.string()))
    return with_clean_names(np.asarray(column.cast(pa.string()).to_numpy(zero_copy_only=False), object), what)


def to_codes(values: np.ndarray, known: Sequence[str]) -> np.ndarray:
    """Encode values as their positions among the known values, starting at 1; other values are 0.

    Args:
        values: Values, ``[n]``.
        known: Known values, in order.

    >>> to_codes(np.array(["b", None, "z"], object), ["a", "b"])
    array([2., 0., 0.], dtype=float32)
    """
    code_of = {value: number for number, value in enumerate(known, 1)}
    return np.array([code_of.get(value, 0) for value in values], np.float32)


def distinct_values(column: Any, what: str) -> tuple[str, ...]:
    """Return the distinct values of a column as names, sorted, without missing values.

    Args:
        column: Values of the column.
        what: Description of the column, for errors.

    Raises:
        DataError: If two names differ only by surrounding spaces or by the form of their accents.
    """
    return tuple(sorted({*to_texts(column, what).tolist()} - {None}))


@dataclass(frozen=True)
class FittedEncoders:
    """Encoders fitted with client sums.

    Attributes:
        encoders: Fitted encoder of each column.
        known: Initial encoders, with which the columns were read.
    """

    encoders: tuple[Encoder, ...]
    known: tuple[Encoder, ...]

    def apply(self, x: Tensor) -> Tensor:
        """Convert columns read with the initial encoders to model inputs, before standardization."""
        values = x.numpy().copy()
        for j, (encoder, before) in enumerate(zip(self.encoders, self.known, strict=True)):
            if encoder.kind == "category":
                new_codes = np.concatenate([[0], to_codes(np.array(before.values, object), encoder.values)])
                values[:, j] = new_codes[values[:, j].astype(np.int64)]
        return torch.from_numpy(impute(values, self.encoders))

    @property
    def normalization(self) -> Normalization:
        """Normalization of the inputs, as ``column_scaling`` returns it."""
        return column_scaling(self.encoders)


def impute(values: np.ndarray, encoders: Sequence[Encoder]) -> np.ndarray:
    """Replace missing values by means, subtract offsets, and append the columns that mark missing values.

    Args:
        values: Columns, ``[n, f]``; NaN where a value is missing.
        encoders: Encoder of each column.
    """
    missing = np.isnan(values)
    offsets = np.array([encoder.offset for encoder in encoders])
    means = np.array([encoder.mean for encoder in encoders], np.float64 if offsets.any() else np.float32)
    marks = [missing[:, j] for j, encoder in enumerate(encoders) if encoder.marks]
    completed = np.where(missing, means, values)
    if offsets.any():
        completed = completed - offsets
    return np.column_stack([completed, *marks]).astype(np.float32)


def missing_values(values: np.ndarray, known: Sequence[Encoder]) -> np.ndarray:
    """Return where columns have no value, boolean ``[n, f]``.

    Args:
        values: Columns, read with the initial encoders, ``[n, f]``.
        known: Initial encoder of each column.
    """
    coded = np.array([encoder.kind == "category" for encoder in known])
    return np.asarray(np.isnan(values) | (coded & (values == 0)))


def column_rows(values: np.ndarray, known: Sequence[Encoder]) -> ClientRows:
    """Return the columns of rows as sums use them.

    Args:
        values: Columns, read with the encoders ``known``, ``[n, f]``.
        known: Encoder of each column.
    """
    numbers, coded = numeric_columns(known), [j for j, encoder in enumerate(known) if encoder.kind == "category"]

    def texts(index: int) -> np.ndarray:
        return np.array([None, *known[coded[index]].values], object)[values[:, coded[index]].astype(np.int64)]

    return ClientRows(
        columns=tuple(known[j].name for j in numbers),
        numbers=values[:, numbers].astype(np.float64),
        texts=Computed([known[j].name for j in coded], texts),
    )


def column_scaling(encoders: Sequence[Encoder]) -> Normalization:
    """Return the normalization of encoded columns.

    Numbers and dates are standardized; category codes and missing-value marks are not.
    """
    marks = sum(encoder.marks for encoder in encoders)
    return Normalization(
        (*(encoder.mean - encoder.offset for encoder in encoders), *[0.0] * marks),
        (*(encoder.std for encoder in encoders), *[1.0] * marks),
    )


def category_counts(encoders: Sequence[Encoder]) -> tuple[int, ...]:
    """Return the number of category codes of each input; 0 for numbers."""
    marks = sum(encoder.marks for encoder in encoders)
    return (*(len(encoder.values) + 1 if encoder.kind == "category" else 0 for encoder in encoders), *[0] * marks)


def numeric_columns(known: Sequence[Encoder]) -> list[int]:
    """Return the indices of the columns that are not categorical."""
    return [j for j, encoder in enumerate(known) if encoder.kind != "category"]


def values_of(codes: np.ndarray, encoder: Encoder) -> tuple[str, ...]:
    """Return the values that occur in a categorical column.

    Args:
        codes: Column, ``[n]``, read with ``encoder``.
        encoder: Its initial encoder.
    """
    return tuple(encoder.values[int(code) - 1] for code in np.unique(codes) if code)


def fit_encoders(
    known: Sequence[Encoder], indicate: bool, found: ColumnTotals, rows: int, agreed: Mapping[str, Sequence[str]]
) -> FittedEncoders:
    """Fit the encoders on the training rows of all clients.

    Args:
        known: Initial encoders, with which the columns were read.
        indicate: Whether missing numbers are marked by an additional input.
        found: Statistics of the columns over all clients.
        rows: Number of rows of all clients.
        agreed: Values of categorical columns that were agreed in advance, by the column's name.
    """
    encoders = list(known)
    for index, j in enumerate(numeric_columns(known)):
        marks = indicate and int(found.columns.counts[index]) < rows
        mean, std = float(found.columns.mean[index]), float(found.columns.std[index])
        encoders[j] = replace(known[j], mean=mean, std=std, marks=marks)
    for j, encoder in enumerate(known):
        if encoder.kind == "category":
            values = agreed[encoder.name] if encoder.name in agreed else found.values[encoder.name]
            encoders[j] = replace(encoder, values=tuple(values))
    return FittedEncoders(tuple(encoders), tuple(known))
