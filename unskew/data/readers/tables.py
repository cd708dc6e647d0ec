"""Sample tables and data sources, and their construction from pyarrow tables."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unskew.data.federation import take_rows
from unskew.data.normalization import Normalization
from unskew.data.readers.arrow import pa, plain_numbers
from unskew.data.readers.cell_types import CODES, STORED_AS_TEXT, why_text
from unskew.data.readers.class_names import metadata_class_names
from unskew.data.readers.column_roles import (
    CATEGORY,
    DATE,
    DIVIDES,
    ColumnSelection,
    is_numeric,
    is_string,
    roles_next_to_images,
    select_inputs,
)
from unskew.data.readers.encoders import Encoder, distinct_values, exact_columns, read_columns
from unskew.data.readers.images import convert_channels, decode_column, is_binary, resize_images
from unskew.data.readers.labels import read_labels, read_targets, warn_of_ignored_times
from unskew.data.readers.masks import classes_of_masks, decode_masks, mask_columns, resize_masks
from unskew.data.spec import Split
from unskew.data.splits import check_no_shared_groups, test_row_mask
from unskew.data.validation import as_targets, check_classes
from unskew.errors import ConfigError, DataError, unknown_name
from unskew.filesystem import parse_json
from unskew.tasks.base import Task
from unskew.tasks.registry import TASKS
from unskew.tasks.segmentation import Segmentation

FEW_CLASSES, MANY = 10, 100
"""Limits for numbers as class labels.

With more distinct numbers than the first, a warning suggests regression. With more than the second, and more than one
distinct number per four rows, the label is rejected.
"""
LOG = logging.getLogger("unskew")
TEST_SHARE = 0.2
SPLIT_SEED = 0  # the split into training and test rows is part of the data set, not of an experiment


@dataclass(frozen=True)
class SampleTable:
    """Samples with their targets and metadata columns.

    Attributes:
        x: uint8 images ``[n, C, H, W]`` in channels-last memory format, float32 features ``[n, f]``, or token ids ``[n,
            L]``.
        y: Class of each sample, ``[n]``; for multi-label tasks, ``[n, L]`` of 0 and 1; regression targets ``[n, T]``;
            or next tokens ``[n, L]``.
        columns: Other columns by name, each ``[n]``: users, writers, domains.
        texts: Index of each row's text, ``[n]``, if a text was cut into several rows; otherwise None. No split or partition
            separates the rows of a text.
    """

    x: Tensor
    y: Tensor
    columns: dict[str, np.ndarray]
    texts: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.y)

    def rows(self, index: np.ndarray) -> SampleTable:
        """Return the table with only the rows ``index``, in this order."""
        ids = torch.from_numpy(index)
        return SampleTable(
            take_rows(self.x, ids),
            self.y[ids],
            {name: values[index] for name, values in self.columns.items()},
            None if self.texts is None else self.texts[index],
        )


@dataclass(frozen=True)
class Source:
    """Data set with a training and a test part. Its arrays are shared, so do not change them in place.

    Attributes:
        name: Name in messages and reports.
        train: Training samples.
        test: Test samples.
        class_names: Names of the classes, in the order of their numbers.
        classes: Number of classes, labels, tokens or regression targets.
        task: Task: ``classification``, ``multilabel``, ``language`` or ``regression``.
        columns: Role of each column of a table; empty for other data.
        encoders: Initial encoders of a table's input columns, if they must still be fitted with client sums.
        indicate: Whether additional inputs mark missing numbers of these columns.
        trained_for: Task with options of the configuration; None means the plain task. Read it through ``objective``.
    """

    name: str
    train: SampleTable
    test: SampleTable
    class_names: tuple[str, ...]
    classes: int
    task: str = "classification"
    columns: Mapping[str, str] = field(default_factory=dict)
    encoders: tuple[Encoder, ...] = ()
    indicate: bool = False
    trained_for: Task | None = None

    @property
    def objective(self) -> Task:
        """Task of the data, before it is fitted to them."""
        return TASKS[self.task] if self.trained_for is None else self.trained_for

    def sized(self, size: int | None) -> Source:
        """Return the source with square images of this side length; inputs that are not images stay unchanged."""
        if size is None or self.train.x.dim() != 4 or tuple(self.train.x.shape[2:]) == (size, size):
            return self
        train, test = (replace(part, x=resize_images(part.x, size, size)) for part in (self.train, self.test))
        if self.objective.pixels:
            train, test = (replace(part, y=resize_masks(part.y, (size, size))) for part in (train, test))
        return replace(self, train=train, test=test)

    def described(self) -> Source:
        """Return the source with the columns of ``mask_columns`` if its targets are masks; columns of the user are kept."""
        if not self.objective.pixels:
            return self
        train, test = (
            replace(part, columns={**mask_columns(part.y, self.class_names), **part.columns})
            for part in (self.train, self.test)
        )
        return replace(self, train=train, test=test)

    def first(self, classes: int | None) -> Source:
        """Return the source with only the samples of the first ``classes`` classes.

        Args:
            classes: Number of classes to keep; None for all.

        Raises:
            ConfigError: If there are fewer classes, or the task is not classification.
            DataError: If no training or no test samples remain.
        """
        if classes is None or classes == self.classes:
            return self
        if "one_class" not in TASKS[self.task].provides:
            raise ConfigError(
                f"max_classes={classes} requires one class per sample, but {self.name} has other targets."
            )
        if not 2 <= classes < self.classes:
            raise ConfigError(
                f"max_classes={classes} must be from 2 to {self.classes}, the number of classes of {self.name}."
            )
        train, test = (p.rows(torch.nonzero(p.y < classes)[:, 0].numpy()) for p in (self.train, self.test))
        if not len(train) or not len(test):
            raise DataError(f"{self.name} has no training or no test samples in its first {classes} classes.")
        names = self.class_names[:classes]
        return replace(self, train=train, test=test, class_names=names, classes=classes)

    @cached_property
    def normalization(self) -> Normalization | None:
        """Normalization fitted on the training inputs, cached; None for token ids."""
        return fit_normalization(self.train.x)


def fit_normalization(x: Tensor) -> Normalization | None:
    """Fit a normalization to inputs; None for token ids."""
    return None if x.dtype == torch.int64 else Normalization.fit(x)


def source_from_tables(
    name: str,
    train: Any,
    test: Any | None,
    *,
    label: str | None,
    image: str | None = None,
    label_separator: str | None = None,
    choice: ColumnSelection | None = None,
    folder: Path | None = None,
    size: int | None = None,
    masks: Segmentation | None = None,
) -> Source:
    """Build a source from pyarrow tables.

    Args:
        name: Name of the source.
        train: Training rows.
        test: Test rows; None splits :data:`TEST_SHARE` off the training rows, stratified by class if each row has
            one class.
        label: Name of the label column; if it contains lists, the task is multi-label. For regression, one or more
            comma-separated names.
        image: Name of the column of encoded images; None means that the inputs are columns of the table.
        label_separator: Separator between the labels of a row in a string column; the task is then multi-label.
        choice: Column selection of the user; None for built-in data sets, whose columns are not reported.
        folder: Folder of relative paths in the image column.
        size: Side length to which images are resized.
        masks: Segmentation with configured classes, if the label is a column of masks.

    Raises:
        ConfigError: If options of the columns contradict each other.
        DataError: If a column does not exist, is empty, not numeric or has missing values, or there is only one class.
    """
    choice, was_chosen = choice or ColumnSelection(), choice is not None
    labels = () if label is None else choice.labels(label, train.column_names)
    parts = {"the training rows": train} | ({} if test is None else {"the test rows": test})
    for where, part in parts.items():
        for column in (*labels, image):
            if column is not None and column not in part.column_names:
                raise DataError(f"{name}, {where}: {unknown_name('column', column, part.column_names)}")
        if part.num_rows == 0:
            raise DataError(f"{name}: {where} are empty.")
        check_plain(part, (choice.divides, *choice.split), name)
    if label is None:
        raise DataError(f"Set label to the label column of {name}: one of {', '.join(train.column_names)}.")
    objective: Task | None = None
    ys: list[Any]
    if masks is not None:
        if image is None:
            raise DataError(
                f"Set image to the column with the images of {name}: one of {', '.join(train.column_names)}."
            )
        decoded = {
            f"{name}, {where}": decode_masks(part.column(label), part.column(image), f"{name}, {where}", folder, size)
            for where, part in parts.items()
        }
        gray = {where: values for where, (values, _) in decoded.items()}
        ys, objective = classes_of_masks(gray, masks, lambda where, row: decoded[where][1][row])
        names, task = objective.names, objective.name
    elif choice.objective is not None and choice.numeric:
        names, task = labels, choice.task
        ys = read_targets({f"{name}, {where}": part for where, part in parts.items()}, labels, choice.objective)
    else:
        columns = {f"{name}, {where}": part.column(label) for where, part in parts.items()}
        names, ys, task = read_labels(columns, label, metadata_class_names(train, label), label_separator)
        check_not_continuous(name, label, train, len(names), task)
        if was_chosen:
            warn_of_ignored_times(train, label, len(names), choice.exclude)
    check_classes(names, name, task)
    encoders: tuple[Encoder, ...] = ()
    if image is None:
        inputs, roles = select_inputs(train, labels, choice, name)
        encoders = tuple(initial_encoder(train, column, roles[column], choice) for column in inputs)
        read = {f"{name}, {where}": part for where, part in parts.items()}
        arrays: list[np.ndarray] = []
        for where, part in read.items():  # the training rows, which come first, also decide about the test rows
            exact = exact_columns(arrays[0], encoders) if arrays else ()
            arrays.append(read_columns(part, encoders, where, exact=exact))
        xs = [torch.from_numpy(array) for array in arrays]
    else:
        roles = roles_next_to_images(train, labels, image, choice, name) if was_chosen else {}
        xs = [decode_column(part.column(image), f"{name}, {where}", folder, size) for where, part in parts.items()]
        channels = max(x.shape[1] for x in xs)
        xs = [convert_channels(x, channels) for x in xs]
    if xs[0].shape[1:] != xs[-1].shape[1:]:
        raise DataError(
            f"The training images of {name} have shape {tuple(xs[0].shape[1:])}, but its test images have shape "
            f"{tuple(xs[-1].shape[1:])}."
        )
    tables = []
    for (where, part), x, values in zip(parts.items(), xs, ys, strict=True):
        y = as_targets(values, f"{name}, {where}", task)
        TASKS[task].check(y, len(names), f"{name}, {where}", x)
        tables.append(SampleTable(x, y, metadata_columns(part, {*labels, image})))
    fits = choice.mixed or choice.harmonized or any(x.dtype == torch.float64 for x in xs)
    fitted = encoders if fits else ()
    indicate = choice.missing == "indicator"
    parts_of = train_test_tables(tables, Split(*choice.split) if choice.split else None)
    return Source(name, *parts_of, names, len(names), task, roles, fitted, indicate, objective)


def check_plain(part: Any, columns: Sequence[str | None], name: str) -> None:
    """Validate that columns have one plain value per row, if they exist.

    Args:
        part: Rows of the data.
        columns: Names of the columns.
        name: Name of the data, for the error.

    Raises:
        DataError: If a column contains lists, structs or bytes that are not text.
    """
    for column in set(columns).intersection(part.column_names):
        kind = part.schema.field(column).type
        if not is_plain(kind):
            raise DataError(
                f"{name}: the column {column!r} contains {kind}, but it must have one name, number or date per row. Store "
                "names as UTF-8 text."
            )


def is_plain(kind: Any) -> bool:
    """Return whether values of a pyarrow type are plain: no lists, structs or bytes."""
    return not (pa.types.is_nested(kind) or is_binary(kind) or pa.types.is_fixed_size_binary(kind))


def check_not_continuous(name: str, label: str, train: Any, classes: int, task: str) -> None:
    """Validate that a class label has few distinct values; otherwise regression is probably intended.

    Args:
        name: Name of the data, for the error.
        label: Name of the label column.
        train: Training rows.
        classes: Number of classes.
        task: Name of the task.

    Raises:
        DataError: If there are many distinct values, more than one per four rows, or numbers in an unusual notation.
    """
    column = train.column(label)
    if "one_class" not in TASKS[task].provides or metadata_class_names(train, label):
        return
    reason = why_text(column) if is_string(column.type) else None
    if reason not in (None, CODES, STORED_AS_TEXT) and classes > FEW_CLASSES:
        raise DataError(
            f"{name}: the label {label!r} contains {reason}. Each of the {classes} different values would be a class. To "
            "predict the number, use --task regression (task: regression)."
        )
    if classes > MANY and 4 * classes > train.num_rows:
        what = "numbers" if is_numeric(column.type) else "values"
        raise DataError(
            f"{name}: the label {label!r} has {classes} different {what} in {train.num_rows} rows, and each would be a "
            "class. To predict a number, use --task regression (task: regression). Otherwise choose a label whose classes "
            "have several rows."
        )
    if classes > FEW_CLASSES and is_numeric(column.type):
        sentence = "the label %r has %d different numbers, each a class; to predict the number, use --task regression"
        LOG.warning(sentence, label, classes)


def initial_encoder(train: Any, column: str, role: str, choice: ColumnSelection) -> Encoder:
    """Return the encoder of a column before any global statistics are known.

    Args:
        train: Training rows.
        column: Name of the column.
        role: Role of the column.
        choice: Column selection of the user.
    """
    kind = role.removesuffix(f", and {DIVIDES}")
    if kind == CATEGORY:
        return Encoder(column, "category", distinct_values(train.column(column), f"The column {column!r}"))
    if kind == DATE:
        forms = parse_json((train.schema.metadata or {}).get(b"dates", b"{}"))
        return Encoder(column, "date", fills=choice.missing != "error", form=forms.get(column, ""))
    return Encoder(column, fills=choice.missing != "error")


def train_test_tables(tables: Sequence[SampleTable], split: Split | None = None) -> tuple[SampleTable, SampleTable]:
    """Return a training and a test table; :data:`TEST_SHARE` of a single table are test rows.

    Args:
        tables: One table, or a training and a test table.
        split: Columns of the split, or None.
    """
    train, *test = tables
    if test:
        if split is not None:
            check_no_shared_groups(train.columns, test[0].columns, split)
        return train, test[0]
    if split is not None or train.texts is not None:
        classes = train.y.numpy() if train.y.dim() == 1 else None
        chosen = test_row_mask(
            train.columns, split or Split(), len(train), TEST_SHARE, SPLIT_SEED, classes, train.texts
        )
        return train.rows(np.flatnonzero(~chosen)), train.rows(np.flatnonzero(chosen))
    strata = train.y if train.y.dim() == 1 else train.y.new_zeros(len(train))
    rows, test_rows = split_rows(strata.numpy())
    return train.rows(rows), train.rows(test_rows)


def split_rows(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split rows into training and test rows, stratified by class with a fixed seed; every class keeps a training row.

    Args:
        labels: Labels, ``[n]``.

    >>> keep, held = split_rows(np.array([0] * 10 + [1] * 5))
    >>> len(keep), len(held)
    (12, 3)
    """
    rng = np.random.default_rng(SPLIT_SEED)
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    sorted_labels = labels[order]
    spare = order[1:][sorted_labels[1:] == sorted_labels[:-1]]  # all but the first row of each class
    count = min(max(1, round(len(labels) * TEST_SHARE)), len(spare))
    if count == 0:
        raise DataError("No test rows can be split off, because every class has a single row. Provide test data.")
    # Take every fifth of the rows sorted by class.
    taken = np.diff(np.arange(len(spare) + 1) * count // len(spare)) == 1
    test_rows = np.sort(spare[taken])
    return np.setdiff1d(np.arange(len(labels)), test_rows), test_rows


def metadata_columns(table: Any, skip: set[str | None]) -> dict[str, np.ndarray]:
    """Return every column with one plain value per row, by name; columns of lists, structs or bytes are skipped.

    Args:
        table: Rows of the data.
        skip: Further columns to skip.
    """
    return {
        field.name: plain_numbers(table.column(field.name)).to_numpy()
        for field in table.schema
        if field.name not in skip and is_plain(field.type)
    }
