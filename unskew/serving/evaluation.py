"""Metrics of a trained model on labeled files, overall and per value of a column, such as the site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from unskew.data.readers.class_names import metadata_class_names
from unskew.data.readers.image_folders import SPLITS
from unskew.data.readers.labels import read_labels, read_targets
from unskew.data.readers.masks import classes_of_masks, decode_masks, resize_masks
from unskew.data.readers.names import clean_name
from unskew.errors import ConfigError, DataError, unknown_name
from unskew.runs.input_spec import InputSpec
from unskew.serving.input_files import InputRows
from unskew.tasks.classification import MOST_RECALLS
from unskew.tasks.intervals import colliding_end, interval_fields, metric_interval
from unskew.tasks.segmentation import Segmentation

ALL, MISSING = "all", "(missing)"
"""Groups of all rows, and of the rows without a value in the column of the groups."""


def evaluate_rows(
    outputs: np.ndarray, rows: InputRows, inputs: InputSpec, path: Path, by: str | None = None, intervals: bool = True
) -> list[dict[str, Any]]:
    """Compute the metrics over all rows, and over the rows of each value of a column.

    If the run kept the rows of a patient or another group together (``split_by``) and the file has that column, intervals
    come from resampled groups.

    Args:
        outputs: Probabilities ``[n, C]``, or predicted numbers ``[n, T]``.
        rows: Rows of the predictions.
        inputs: Input specification of the model.
        path: File of the rows.
        by: Column whose values form groups, or None.
        intervals: Whether to compute intervals.

    Returns:
        Dictionaries with ``group``, ``rows``, ``support/CLASS`` for each class, and for each metric its value and the ends
        of its 95 % interval, ``NAME_low`` and ``NAME_high``; None if they are not defined.

    Raises:
        ConfigError: If images have no column ``by``, or an end of an interval has the name of another metric.
        DataError: If labels are missing, or have a class that the model does not know, or intervals need groups of rows that
            are missing.
    """
    y, task = encode_row_labels(rows, inputs, path), inputs.objective.of_other_rows
    groups = [(ALL, np.arange(len(y)))]  # pairs: a site may be called like the group of all rows
    if by is not None:
        if rows.table is None:
            raise ConfigError(f"--by {by} names a column of a table, but {path} is not one.")
        if by not in rows.table.column_names:
            raise DataError(f"{path}: {unknown_name('column', by, rows.table.column_names)}")
        values = np.array([MISSING if value is None else value for value in names_of_rows(rows, by, inputs)])
        groups += [(str(value), np.flatnonzero(values == value)) for value in np.unique(values)]
    column = inputs.split_group
    units: np.ndarray | None = None
    if intervals and column is not None and rows.table is not None and column in rows.table.column_names:
        named = names_of_rows(rows, column, inputs)
        if None in named:
            raise DataError(
                f"{path}: the column {column!r} has {named.count(None)} missing values, but intervals resample its values as "
                "a whole (split_by). Fill them, or use --no-intervals (intervals=False)."
            )
        units = np.array(named)
    evaluated = []
    for name, own in groups:
        row: dict[str, Any] = {"group": name, "rows": len(own)}
        if "counts" in task.provides and inputs.classes <= MOST_RECALLS:
            counts = task.named_counts(torch.from_numpy(y[own]), inputs.names)
            row |= {f"support/{label}": count for label, count in counts.items()}
        measured = nan_to_none(task.metrics_of_outputs(y[own], outputs[own], inputs.metrics))
        if intervals and (collision := colliding_end([*measured], measured)):
            raise ConfigError(
                f"The lower or upper end of the interval of {collision[0]} is written as {collision[1]}, which is also the "
                "metric of another class. Use --no-intervals (intervals=False), or rename the class and repeat the run."
            )
        for metric, value in measured.items():
            row[metric] = value
            if intervals:
                dependent = None if units is None else units[own]
                interval = metric_interval(metric, task, y[own], outputs[own], inputs.metrics, dependent)
                row |= interval_fields(metric, None if value is None else interval)
        evaluated.append(row)
    return evaluated


def names_of_rows(rows: InputRows, column: str, inputs: InputSpec) -> list[str | None]:
    """Return the values of a column as names; None for missing ones.

    Args:
        rows: Rows of a table.
        column: Name of the column.
        inputs: Input specification of the model, which lists further texts that mean a missing value.
    """
    absent = {"", *(inputs.csv.spec.missing or ())}
    names = [None if value is None else clean_name(str(value)) for value in rows.cells.column(column).to_pylist()]
    return [None if name is None or name.strip() in absent else name for name in names]


def encode_row_labels(rows: InputRows, inputs: InputSpec, path: Path) -> np.ndarray:
    """Return the labels of rows as class indices ``[n]``, binary labels ``[n, L]``, or the numbers of the task.

    Args:
        rows: Rows of the file.
        inputs: Input specification of the model.
        path: Path of the file, for error messages.

    Raises:
        ConfigError: If the run does not name a label column.
        DataError: If a column is missing, or the model does not know a class.
    """
    task = inputs.objective
    if task.pixels:
        return masks_of_rows(rows, inputs, path)
    if rows.table is None:  # images are in one folder per class
        folders = [str(name).split("/")[0] if "/" in str(name) else path.absolute().name for name in rows.names]
        folders = [clean_name(folder) for folder in folders]
        label_names, ys = np.unique(folders, return_inverse=True)
        names, labels = tuple(label_names.tolist()), ys.reshape(-1)
    else:
        for name in inputs.label_columns:
            if name is None:
                raise ConfigError(
                    "The run does not record a label column: it was trained on arrays or by an older version. "
                    "Run it again with --label to evaluate files."
                )
            if name not in rows.table.column_names:
                raise DataError(
                    f"{path}: {unknown_name('column', name, rows.table.column_names)} The label column is required."
                )
        if task.numeric_labels:
            (numbers,) = read_targets({str(path): rows.table}, [str(name) for name in inputs.label_columns], task)
            return np.asarray(task.read(torch.from_numpy(numbers), str(path)))
        label, column = str(inputs.label), rows.table.column(str(inputs.label))
        known = metadata_class_names(rows.table, label)
        names, (labels,), _ = read_labels({str(path): column}, label, known, inputs.label_separator)
    strange = [name for name in names if name not in inputs.names]
    if strange:
        choose = f" Evaluate one of its parts, such as {path / strange[0]}." if strange[0] in SPLITS else ""
        raise DataError(
            f"{path} has the class {strange[0]!r}, but the model was trained on {', '.join(inputs.names[:20])}.{choose}"
        )
    index_of = np.array([inputs.names.index(name) for name in names])
    if labels.ndim == 1:
        return index_of[labels]
    wide = np.zeros((len(labels), inputs.classes), np.uint8)
    wide[:, index_of] = labels
    return wide


def masks_of_rows(rows: InputRows, inputs: InputSpec, path: Path) -> np.ndarray:
    """Return the masks of rows as classes, ``[n, *sides]``.

    Args:
        rows: Rows of a table, or images with masks.
        inputs: Input specification of the model.
        path: Path of the file or folder, for error messages.

    Raises:
        DataError: If there are no masks, or a mask has a gray value without a class.
    """
    label = inputs.label or "mask"
    if rows.table is None or label not in rows.table.column_names:
        raise DataError(
            f"{path} has no masks. Pass a folder with the folders images and masks, or a table with the column {label!r}."
        )
    who, task = str(path), Segmentation().with_constants(inputs.constants, inputs.classes).named(inputs.names)
    gray, names = decode_masks(rows.table.column(label), rows.images, who, rows.folder, inputs.image_size)
    (y,), _ = classes_of_masks({who: resize_masks(gray, inputs.shape[1:])}, task, lambda _, row: names[row], False)
    return y.numpy()


def nan_to_none(values: dict[str, float]) -> dict[str, float | None]:
    """Replace non-finite values by None."""
    return {name: float(value) if np.isfinite(value) else None for name, value in values.items()}
