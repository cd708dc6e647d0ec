"""Conversion of data frames and string labels for ``Federation.from_arrays``; column and class names are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from unskew.data.readers.column_roles import trim_names
from unskew.errors import DataError

Pair = tuple[Any, ...]


def is_frame(x: object) -> bool:
    """Return whether inputs are a data frame such as that of pandas."""
    return hasattr(x, "columns") and hasattr(x, "to_numpy")


def frames_to_arrays(pairs: Sequence[Pair]) -> tuple[list[Pair], tuple[str, ...]]:
    """Convert data frames to arrays with the columns in the order of the first frame.

    Args:
        pairs: Tuples ``(x, y)`` or ``(x, y, x_test, y_test)``.

    Returns:
        The tuples with arrays, and the column names (empty if there are no data frames).

    Raises:
        DataError: If the frames have different columns, or a column is not numeric.
    """
    frames: list[Any] = [x for pair in pairs for x in pair[::2] if is_frame(x)]
    if not frames:
        return list(pairs), ()
    names = trim_names([str(name) for name in frames[0].columns])

    def array_of(x: Any) -> object:
        if not is_frame(x):
            return x
        columns = {str(name).strip(): name for name in x.columns}
        if sorted(columns) != sorted(names):
            raise DataError(f"The data frames have different columns: {', '.join(names)}, and {', '.join(columns)}.")
        for name in names:
            if not np.issubdtype(np.asarray(x[columns[name]]).dtype, np.number) and x[columns[name]].dtype != bool:
                raise DataError(
                    f"The column {name!r} is not numeric. Encode or drop it, or load the data with table: and "
                    "categories."
                )
        return x[[columns[name] for name in names]].to_numpy(dtype=np.float64)

    return [tuple(array_of(table) if k % 2 == 0 else table for k, table in enumerate(pair)) for pair in pairs], tuple(
        names
    )


def encode_text_labels(pairs: Sequence[Pair], class_names: Sequence[str]) -> tuple[list[Pair], Sequence[str]]:
    """Convert string labels to class indices.

    Args:
        pairs: Tuples ``(x, y)`` or ``(x, y, x_test, y_test)``.
        class_names: Names of the classes; if empty, the label values that occur, sorted.

    Returns:
        The tuples with class indices, and the class names.

    Raises:
        DataError: If only some labels are strings, or a label is not in ``class_names``.
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
    if not any(text):
        return list(pairs), class_names
    if not all(text):
        raise DataError("Some labels are strings and some are not. Pass all as strings, or all as class indices.")
    label_values = sorted({str(value) for y in labels if y is not None for value in y})
    names = list(class_names) if isinstance(class_names, list | tuple) and class_names else label_values
    strange = [name for name in label_values if name not in names]
    if strange:
        raise DataError(f"The label {strange[0]!r} is not in class_names: {', '.join(names[:20])}.")
    index_of = {name: number for number, name in enumerate(names)}
    encoded = iter(np.array([index_of[str(value)] for value in y]) for y in labels if y is not None)
    return [tuple(next(encoded) if k % 2 else table for k, table in enumerate(pair)) for pair in pairs], names
