"""Data frames and labels of text as ``Federation.from_arrays`` takes them: names of columns and classes are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from unskew.errors import DataError

Pair = tuple[Any, ...]


def is_frame(x: object) -> bool:
    """Return whether inputs are a data frame, as of pandas."""
    return hasattr(x, "columns") and hasattr(x, "to_numpy")


def frames_to_arrays(pairs: Sequence[Pair]) -> tuple[list[Pair], tuple[str, ...]]:
    """Return arrays in place of data frames, with the columns of the first one in its order, and their names.

    Args:
        pairs: Tuples ``(x, y)`` or ``(x, y, x_test, y_test)``.

    Raises:
        DataError: If frames have other columns, or a column is not numeric.
    """
    frames: list[Any] = [x for pair in pairs for x in pair[::2] if is_frame(x)]
    if not frames:
        return list(pairs), ()
    names = [str(name) for name in frames[0].columns]

    def array_of(x: Any) -> object:
        if not is_frame(x):
            return x
        columns = {str(name): name for name in x.columns}
        if sorted(columns) != sorted(names):
            raise DataError(f"The data frames have different columns: {', '.join(names)}, and {', '.join(columns)}.")
        for name in names:
            if not np.issubdtype(np.asarray(x[columns[name]]).dtype, np.number) and x[columns[name]].dtype != bool:
                raise DataError(
                    f"The column {name!r} is not numeric; encode or drop it, or use table: with categories."
                )
        return x[[columns[name] for name in names]].to_numpy(dtype=np.float64)

    return [tuple(array_of(table) if k % 2 == 0 else table for k, table in enumerate(pair)) for pair in pairs], tuple(
        names
    )


def encode_text_labels(pairs: Sequence[Pair], class_names: Sequence[str]) -> tuple[list[Pair], Sequence[str]]:
    """Return class indices in place of labels of text, and the names of the classes: sorted, unless they are given.

    Args:
        pairs: Inputs and labels of each part.
        class_names: Names of the classes; empty: those that occur.

    Raises:
        DataError: If only some labels are text, or one is not among ``class_names``.
    """

    def array_of(y: Any) -> np.ndarray[Any, Any] | None:
        try:
            return None if isinstance(y, Tensor) else np.asarray(y)
        except (TypeError, ValueError):  # ragged lists, for instance: the check of the pairs reports them
            return None

    labels = [array_of(y) for pair in pairs for y in pair[1::2]]
    text = [
        y is not None and y.ndim == 1 and y.dtype.kind in "OUS" and all(isinstance(v, str) for v in y) for y in labels
    ]
    if not any(text):
        return list(pairs), class_names
    if not all(text):
        raise DataError("Some labels are text and some are not; give all of them as text, or all as class indices.")
    label_values = sorted({str(value) for y in labels if y is not None for value in y})
    names = list(class_names) if isinstance(class_names, list | tuple) and class_names else label_values
    strange = [name for name in label_values if name not in names]
    if strange:
        raise DataError(f"The label {strange[0]!r} is not in class_names: {', '.join(names[:20])}.")
    index_of = {name: number for number, name in enumerate(names)}
    encoded = iter(np.array([index_of[str(value)] for value in y]) for y in labels if y is not None)
    return [tuple(next(encoded) if k % 2 else table for k, table in enumerate(pair)) for pair in pairs], names
