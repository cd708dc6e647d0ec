"""Conversion of data frames and labels for ``Federation.from_arrays``; column and class names are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unskew.data.readers.names import clean_name, clean_names
from unskew.data.validation import as_targets
from unskew.errors import DataError, abbreviate

Pair = tuple[Any, ...]


def is_frame(x: object) -> bool:
    """Return whether inputs are a data frame such as that of pandas."""
    return hasattr(x, "columns") and hasattr(x, "to_numpy")


def check_same_index(x: Any, y: Any, who: str) -> None:
    """Validate that inputs and labels have the same index if both are pandas objects, because rows are paired by position.

    Args:
        x: Inputs.
        y: Labels.
        who: Name of the data, for the error.

    Raises:
        DataError: If the indices differ.
    """
    index: Any = getattr(x, "index", None)
    other: Any = getattr(y, "index", None)
    if hasattr(index, "equals") and hasattr(other, "equals") and not index.equals(other):
        raise DataError(
            f"The inputs and the labels of {who} have different pandas indices, so their rows may not belong together. "
            "Align them with y = y.loc[x.index], or if they are in the same order, call reset_index(drop=True) on both."
        )


def frames_to_arrays(pairs: Mapping[str, Pair]) -> tuple[list[Pair], tuple[str, ...]]:
    """Convert data frames to arrays with the columns in the order of the first frame.

    Args:
        pairs: Tuples ``(x, y)`` or ``(x, y, x_test, y_test)`` by the name of the data.

    Returns:
        The tuples with arrays, and the column names (empty if there are no data frames).

    Raises:
        DataError: If the frames have different columns or another index than their labels, or a column is not numeric.
    """
    frames: list[Any] = [x for pair in pairs.values() for x in pair[::2] if is_frame(x)]
    if not frames:
        return list(pairs.values()), ()
    for who, pair in pairs.items():
        for x, y in zip(pair[::2], pair[1::2], strict=True):
            check_same_index(x, y, who)
    clean_of = clean_names((str(name) for name in frames[0].columns), "The data frame")
    names = [clean_of[str(name)] for name in frames[0].columns]

    def array_of(x: Any) -> object:
        if not is_frame(x):
            return x
        columns = [clean_name(str(name)) for name in x.columns]
        if sorted(columns) != sorted(names):
            raise DataError(f"The data frames have different columns: {', '.join(names)}, and {', '.join(columns)}.")
        return select_columns(x, names)

    arrays = [
        tuple(array_of(table) if k % 2 == 0 else table for k, table in enumerate(pair)) for pair in pairs.values()
    ]
    return arrays, tuple(names)


def select_columns(frame: Any, names: Sequence[str]) -> np.ndarray[Any, Any]:
    """Return columns of a data frame as float64 ``[n, f]``; further columns are ignored.

    Args:
        frame: Data frame.
        names: Clean names of the columns.

    Raises:
        DataError: If a column does not exist, exists twice, or is not numeric.
    """
    written = [str(name) for name in frame.columns]
    clean = [clean_name(name) for name in written]
    missing = [name for name in names if name not in clean]
    if missing:
        raise DataError(
            f"The model was trained on the column {' and the column '.join(map(repr, missing))}, which the data frame does "
            f"not have. Its columns are {abbreviate(written)}."
        )
    columns = []
    for name in names:
        if clean.count(name) > 1:
            raise DataError(f"The data frame has more than one column named {name!r}. Rename them.")
        column = frame[frame.columns[clean.index(name)]]
        if not np.issubdtype(np.asarray(column).dtype, np.number) and column.dtype != bool:
            raise DataError(
                f"The column {name!r} is not numeric. Encode or drop it, or load the data with table: and categories."
            )
        columns.append(np.asarray(column, np.float64))
    return np.column_stack(columns)


def encode_text_labels(pairs: Sequence[Pair], class_names: Sequence[str]) -> tuple[list[Pair], Sequence[str]]:
    """Convert strings and boolean labels to class indices.

    Args:
        pairs: Tuples ``(x, y)`` or ``(x, y, x_test, y_test)``.
        class_names: Names of the classes; if empty, the label values that occur, sorted.

    Returns:
        The tuples with class indices, and the class names.

    Raises:
        DataError: If only some labels are strings, two differ only by surrounding spaces or by the form of their accents, or
            a label is not in ``class_names``.
    """

    def array_of(y: Any) -> np.ndarray[Any, Any] | None:
        try:
            return None if isinstance(y, Tensor) else np.asarray(y)
        except (TypeError, ValueError):  # for instance ragged lists; validate_pair reports them
            return None

    labels = [array_of(y) for pair in pairs for y in pair[1::2]]
    text = [
        y is not None and y.ndim == 1 and y.dtype.kind in "OUS" and all(isinstance(v, str) for v in y) for y in labels
    ]
    unnamed = isinstance(class_names, list | tuple) and not class_names
    if not any(text) and not (unnamed and all(y is not None and y.ndim == 1 and y.dtype == bool for y in labels)):
        return list(pairs), class_names
    if any(text) and not all(text):
        raise DataError("Some labels are strings and some are not. Pass all as strings, or all as class indices.")
    label_values = sorted({str(value) for y in labels if y is not None for value in y})
    clean_names(label_values, "The labels")
    names = list(class_names) if isinstance(class_names, list | tuple) and class_names else label_values
    strange = [name for name in label_values if name not in names]
    if strange:
        raise DataError(f"The label {strange[0]!r} is not in class_names: {', '.join(names[:20])}.")
    index_of = {name: number for number, name in enumerate(names)}
    encoded = iter(np.array([index_of[str(value)] for value in y]) for y in labels if y is not None)
    return [tuple(next(encoded) if k % 2 else table for k, table in enumerate(pair)) for pair in pairs], names


def encode_classes(ys: Sequence[Tensor], class_names: tuple[str, ...]) -> tuple[list[Tensor], tuple[str, ...], int]:
    """Convert labels that are not class indices from 0: the classes are the values that occur, in order.

    Args:
        ys: Labels of each part, ``[n]``.
        class_names: Names of the classes; if all labels are indices of this list, they stay unchanged.

    Returns:
        The class indices of each part, the names of the classes (empty if the labels are indices without names), and
        the number of classes.
    """
    values = np.unique(np.concatenate([np.unique(y.numpy()) for y in ys]))
    if len(class_names) > 1 and values[0] >= 0 and values[-1] < len(class_names):
        return list(ys), class_names, len(class_names)
    if values[0] == 0 and values[-1] == len(values) - 1:
        return list(ys), class_names, len(values)
    indices = [torch.from_numpy(np.searchsorted(values, y.numpy())) for y in ys]
    return indices, class_names or tuple(map(str, values.tolist())), len(values)


def read_classes(labels: Sequence[object], who: str) -> tuple[list[Tensor], tuple[str, ...]]:
    """Return the class indices of several parts, and the names of the classes: the values that occur, in order.

    Args:
        labels: Labels of each part.
        who: Name of the data, for errors.
    """
    pairs, text_names = encode_text_labels([(None, y) for y in labels], ())
    ys, names, classes = encode_classes([as_targets(y, who) for _, y in pairs], tuple(text_names))
    return ys, names or tuple(map(str, range(classes)))
