"""Label columns of tables: one class per row, a list of labels per row, or numbers."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from unskew.data.readers.arrow import pa, pc, plain_numbers
from unskew.data.readers.cell_types import why_text
from unskew.data.readers.column_roles import is_numeric, is_string
from unskew.data.readers.images import is_binary
from unskew.data.readers.names import clean_names
from unskew.errors import ConfigError, DataError
from unskew.tasks.base import Task
from unskew.tasks.survival_columns import FEWEST_TIMES, is_event_name, is_time_name

LOG = logging.getLogger("unskew")


class EncodedLabels(NamedTuple):
    """Encoded labels of each part of a data set.

    Attributes:
        names: Names of the classes or labels, in order.
        ys: Targets of each part: class indices ``[n]``; or, multi-label, ``[n, L]`` of 0 and 1 as uint8.
        task: ``"classification"`` or ``"multilabel"``.
    """

    names: tuple[str, ...]
    ys: list[np.ndarray]
    task: str


def read_labels(
    parts: Mapping[str, Any], label: str, class_names: tuple[str, ...], separator: str | None = None
) -> EncodedLabels:
    """Encode the labels of several tables with the same classes.

    The task is multi-label if the column contains lists, or strings that ``separator`` splits into labels. The classes
    are ``class_names``, or else the sorted values of all parts.

    Args:
        parts: pyarrow label column of each part, by the part's name in errors.
        label: Name of the label column.
        class_names: Class names for a column of integers; empty if there are none.
        separator: Separator between the labels of a row in a string column, or None.

    Raises:
        ConfigError: If a separator is set although the column contains lists.
        DataError: If a label is missing, fractional or unknown, or only some parts have lists.
    """
    lists = [is_list_type(column.type) for column in parts.values()]
    if any(lists) and separator is not None:
        raise ConfigError(f"The label column {label!r} contains lists, but label_separator requires a string column.")
    if any(lists) and not all(lists):
        names_of_parts = sorted(parts, key=lambda name: not is_list_type(parts[name].type))
        raise DataError(f"The label column {label!r} has lists in {' but not in '.join(names_of_parts)}.")
    if separator is None and not any(lists):
        names, ys = encode_labels([label_values(column, label, where) for where, column in parts.items()], class_names)
        return EncodedLabels(names, ys, "classification")
    raw = [label_lists(column, label, where, separator) for where, column in parts.items()]
    all_integers = all(values.dtype.kind in "iu" for _, values in raw if len(values))
    names, indices = encode_labels([values.astype(np.int64 if all_integers else str) for _, values in raw], class_names)
    if not names:
        raise DataError(f"No row has a label in the label column {label!r}.")
    ys = []
    for (where, column), (rows, _), index in zip(parts.items(), raw, indices, strict=True):
        if len(index) and (index.min() < 0 or index.max() >= len(names)):
            raise DataError(f"The label column {label!r} of {where} contains a number outside its {len(names)} labels.")
        y = np.zeros((len(column), len(names)), np.uint8)
        y[rows, index] = 1
        ys.append(y)
    return EncodedLabels(names, ys, "multilabel")


def warn_of_ignored_times(table: Any, label: str, classes: int, excluded: Collection[str]) -> None:
    """Warn of a classification of an event next to a column of times, which ignores that rows are censored.

    Args:
        table: Training rows.
        label: Name of the label column.
        classes: Number of classes.
        excluded: Columns that are not inputs.
    """
    if classes != 2 or not is_event_name(label):
        return
    for name in table.column_names:
        if name != label and name not in excluded and is_time_column(table.column(name), name):
            LOG.warning(
                "the label %s looks like the event of the times in %s; a classification ignores that rows are censored. Use "
                "task: survival with label: %s,%s, or exclude %s",
                *(label, name, name, label, name),
            )
            return


def read_targets(parts: Mapping[str, Any], columns: Sequence[str], task: Task) -> list[np.ndarray]:
    """Read columns of numbers to predict as float64 ``[n, T]``, for each part.

    Args:
        parts: pyarrow table of each part, by the part's name in errors.
        columns: Names of the target columns.
        task: Task, which reads the columns of ``coded_labels``.

    Raises:
        DataError: If a value is missing, infinite or not a number.
    """
    task.check_labels(columns)
    coded = [columns[index] for index in task.coded_labels]
    numbers = [column for column in columns if column not in coded]
    ys = []
    for where, part in parts.items():
        for column in numbers:
            kind = part.column(column).type
            if not is_numeric(kind):
                values = part.column(column).drop_null()
                reason = why_text(values) if is_string(kind) else None
                example = reason or (f"such as {values[0].as_py()}" if len(values) else "no values")
                order = f" Write label as {task.label_order}." if task.label_order and reason is None else ""
                raise DataError(
                    f"{where}: the target column {column!r} contains {kind} ({example}), but {task.name} requires numbers."
                    f"{order}"
                )
        targets = {column: part.column(column).cast(pa.float64(), safe=False).to_numpy() for column in numbers}
        for column, values in targets.items():
            bad = np.flatnonzero(~np.isfinite(values))
            if len(bad):
                raise DataError(
                    f"{where}: the target column {column!r} has {len(bad)} missing or infinite values (first: row {bad[0]}, "
                    "counted from 0). Remove those rows."
                )
        targets |= {name: task.encode_column(name, part.column(name).to_pylist(), where) for name in coded}
        ys.append(np.column_stack([targets[column] for column in columns]))
    return ys


def is_time_column(column: Any, name: str) -> bool:
    """Return whether a column looks like times until an event: its name, and many numbers of which none is negative.

    Args:
        column: Values of the column.
        name: Name of the column.
    """
    if not is_time_name(name) or not is_numeric(column.type) or pa.types.is_boolean(column.type):
        return False
    values = column.drop_null().cast(pa.float64(), safe=False).to_numpy()
    return bool(len(np.unique(values)) > FEWEST_TIMES and np.isfinite(values).all() and (values >= 0).all())


def is_list_type(kind: Any) -> bool:
    """Return whether a pyarrow type is a list."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def label_values(column: Any, label: str, where: str) -> np.ndarray:
    """Return a label column with one class per row as an array of integers or strings.

    Args:
        column: Values of the column.
        label: Name of the label column.
        where: Name of the data, for errors.

    Raises:
        DataError: If a label is missing, fractional or too large, or the column contains no classes.
    """
    if column.null_count:
        raise DataError(
            f"The label column {label!r} of {where} has {column.null_count} missing values. If each string may contain "
            "several labels or none, set label_separator."
        )
    kind = column.type
    if pa.types.is_nested(kind) or is_binary(kind):
        raise DataError(
            f"The label column {label!r} of {where} has type {kind}. It must contain one class or a list of labels "
            "per row."
        )
    values = plain_numbers(column).to_numpy()
    if values.dtype.kind == "O" and all(re.match(r"\s*\[.*\]\s*$", str(value)) for value in values):
        raise DataError(
            f"The label column {label!r} of {where} contains lists written as text, such as {values[0]!r}. Write the labels "
            "of a row with a separator, such as x;z, and set label_separator, or store lists in a parquet file."
        )
    if values.dtype.kind == "f":
        if not (np.isfinite(values) & (values == np.round(values))).all():
            raise DataError(
                f"The label column {label!r} of {where} contains fractions or NaN, but labels must be classes. "
                "To predict the number, use --task regression (task: regression)."
            )
        large = values[np.abs(values) >= 2.0**63]
        if len(large):
            raise DataError(
                f"The label column {label!r} of {where} contains the number {large[0]:.0f}, but numbers of classes must be "
                "below 2^63. Store larger ones as text."
            )
        return np.asarray(values.astype(np.int64))
    return np.asarray(values if values.dtype.kind in "iu" else values.astype(str))


def label_lists(column: Any, label: str, where: str, separator: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Flatten the labels of a column of lists, or of strings with a separator.

    In a string column, an empty or missing cell is a row without labels.

    Args:
        column: Values of the column.
        label: Name of the label column.
        where: Name of the data, for errors.
        separator: Separator between labels; None means that the column contains lists.

    Returns:
        The row of each label, and its value (an integer or a string).
    """
    if separator is not None:
        if pa.types.is_nested(column.type) or is_binary(column.type):
            raise DataError(
                f"The label column {label!r} of {where} has type {column.type}, but a separator requires strings."
            )
        column = pc.split_pattern(column.cast(pa.string()).fill_null(""), separator)
    elif column.null_count:
        raise DataError(
            f"The label column {label!r} of {where} has {column.null_count} missing values. Use an empty list for a "
            "row without labels."
        )
    array = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    rows, values = pc.list_parent_indices(array).to_numpy(), pc.list_flatten(array)
    if separator is not None:
        values = pc.utf8_trim_whitespace(values)
        not_empty = pc.not_equal(values, "").to_numpy(zero_copy_only=False)
        return rows[not_empty], values.to_numpy(zero_copy_only=False)[not_empty]
    t = pa.types
    if len(values) and not (t.is_integer(values.type) or t.is_string(values.type) or t.is_large_string(values.type)):
        raise DataError(
            f"The label column {label!r} of {where} has lists of {values.type}, but labels must be strings or integers."
        )
    if values.null_count:
        raise DataError(f"The label column {label!r} of {where} has {values.null_count} missing values in its lists.")
    return rows, values.to_numpy(zero_copy_only=False)


def encode_labels(raw: Sequence[np.ndarray], class_names: tuple[str, ...]) -> tuple[tuple[str, ...], list[np.ndarray]]:
    """Return class names and the class indices of each part.

    Args:
        raw: Labels of each part.
        class_names: Names of the classes; if empty, the sorted values of all parts are the classes.

    Raises:
        DataError: If two labels differ only by surrounding spaces or by the form of their accents.
    """
    if class_names and all(values.dtype.kind in "iu" for values in raw):
        return class_names, [values.astype(np.int64) for values in raw]
    values, index = np.unique(np.concatenate(raw), return_inverse=True)
    names = clean_names((str(value) for value in values), "The label column").values()
    return tuple(names), np.split(index.reshape(-1), np.cumsum([len(v) for v in raw])[:-1])
