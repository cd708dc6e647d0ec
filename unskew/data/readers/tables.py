"""Tables: what every source turns into, and how columns become inputs, labels and the rest."""

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
from unskew.data.readers.column_roles import (
    CATEGORY,
    DATE,
    DIVIDES,
    ColumnSelection,
    is_numeric,
    roles_next_to_images,
    select_inputs,
)
from unskew.data.readers.encoders import Encoder, distinct_values, read_columns
from unskew.data.readers.images import convert_channels, decode_column, is_binary, resize_images
from unskew.data.readers.labels import metadata_class_names, read_labels, read_targets
from unskew.data.spec import Split
from unskew.data.splits import check_no_shared_groups, test_row_mask
from unskew.data.validation import as_targets, check_classes, check_targets
from unskew.errors import ConfigError, DataError, unknown_name

FEW_CLASSES, MANY = 10, 100
"""Numbers as a label: with more than the first, a notice asks for regression; with more than the second, a value for nearly
every fourth row is an error."""
LOG = logging.getLogger("unskew")
SPLIT_SEED = 0  # the split into training and test rows is part of the data set, not of an experiment


@dataclass(frozen=True)
class SampleTable:
    """Samples, their labels and whatever else is known about them.

    Attributes:
        x: uint8 images ``[n, C, H, W]`` over channels-last memory, float32 features ``[n, f]``, or token ids ``[n, L]``.
        y: Class of each sample, ``[n]``; with several labels a sample, ``[n, L]`` of 0 and 1; or the next tokens ``[n, L]``.
        columns: Further columns by name, each ``[n]``: users, writers, domains.
    """

    x: Tensor
    y: Tensor
    columns: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.y)

    def rows(self, index: np.ndarray) -> SampleTable:
        """The table of the rows ``index``."""
        ids = torch.from_numpy(index)
        return SampleTable(
            take_rows(self.x, ids), self.y[ids], {name: values[index] for name, values in self.columns.items()}
        )


@dataclass(frozen=True)
class Source:
    """A data set with a training and a test part. Its arrays are shared: do not change them in place.

    ``columns`` says of a table what is done to each of its columns, and ``encoders`` how those that are inputs were read,
    where the clients' sums are yet to say what becomes of them; ``indicate`` marks missing numbers.
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

    def sized(self, size: int | None) -> Source:
        """The same with images of this side; inputs that are not images stay as they are."""
        if size is None or self.train.x.dim() != 4 or tuple(self.train.x.shape[2:]) == (size, size):
            return self
        train, test = (replace(part, x=resize_images(part.x, size, size)) for part in (self.train, self.test))
        return replace(self, train=train, test=test)

    def first(self, classes: int | None) -> Source:
        """The same with the samples of the first so many classes only.

        Raises:
            ConfigError: There are fewer classes, or a sample may have several.
            DataError: No sample is left.
        """
        if classes is None or classes == self.classes:
            return self
        if self.task != "classification":
            raise ConfigError(f"max_classes={classes} needs one class per sample; {self.name} has others.")
        if not 2 <= classes < self.classes:
            raise ConfigError(f"max_classes={classes} must be from 2 to the {self.classes} classes of {self.name}.")
        train, test = (p.rows(torch.nonzero(p.y < classes)[:, 0].numpy()) for p in (self.train, self.test))
        if not len(train) or not len(test):
            raise DataError(f"{self.name} has no samples to train or to test on in its first {classes} classes.")
        names = self.class_names[:classes]
        return replace(self, train=train, test=test, class_names=names, classes=classes)

    @cached_property
    def normalization(self) -> Normalization | None:
        """Statistics of the training inputs; computed once. None for token ids."""
        return fit_normalization(self.train.x)


def fit_normalization(x: Tensor) -> Normalization | None:
    """Statistics of inputs, unless they are token ids."""
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
    test_share: float = 0.2,
) -> Source:
    """Turn pyarrow tables into a source.

    Args:
        name: Name of the source.
        train: Training rows.
        test: Test rows; None splits ``test_share`` off the training rows, stratified by class where there is one each.
        label: Name of the label column; where it holds lists, the task is multi-label. Of numbers, also several names.
        image: Name of the column of encoded images; None takes numeric columns as features.
        label_separator: What stands between the labels of a row, in a column of text; then the task is multi-label.
        choice: Which columns are features; None where the columns are known and nothing is to be told of them.
        folder: Where relative paths in the image column start.
        size: Side to which images are brought.
        test_share: Share of the rows to test on when there is no test part.

    Raises:
        ConfigError: What is said of the columns does not fit together.
        DataError: A column is missing, empty, not numeric or holds missing values, or the rows have one class only.
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
    if label is None:
        raise DataError(f"Say which column of {name} holds the labels (label=): {', '.join(train.column_names)}.")
    if choice.regression:
        names, ys, task = read_targets({f"{name}, {where}": part for where, part in parts.items()}, labels)
    else:
        columns = {f"{name}, {where}": part.column(label) for where, part in parts.items()}
        names, ys, task = read_labels(columns, label, metadata_class_names(train, label), label_separator)
        check_not_continuous(name, label, train, len(names), task)
    check_classes(names, name, task)
    encoders: tuple[Encoder, ...] = ()
    if image is None:
        inputs, done = select_inputs(train, labels, choice, name)
        encoders = tuple(initial_encoder(train, column, done[column], choice) for column in inputs)
        read = {f"{name}, {where}": part for where, part in parts.items()}
        xs = [torch.from_numpy(read_columns(part, encoders, where)) for where, part in read.items()]
    else:
        done = roles_next_to_images(train, labels, image, choice, name) if was_chosen else {}
        xs = [decode_column(part.column(image), f"{name}, {where}", folder, size) for where, part in parts.items()]
        channels = max(x.shape[1] for x in xs)
        xs = [convert_channels(x, channels) for x in xs]
    if xs[0].shape[1:] != xs[-1].shape[1:]:
        raise DataError(
            f"The training images of {name} have shape {tuple(xs[0].shape[1:])}, its test images {tuple(xs[-1].shape[1:])}."
        )
    tables = []
    for (where, part), x, values in zip(parts.items(), xs, ys, strict=True):
        y = as_targets(values, f"{name}, {where}", task)
        check_targets(y, len(names), f"{name}, {where}")
        tables.append(SampleTable(x, y, metadata_columns(part, {*labels, image})))
    fitted = encoders if choice.mixed else ()
    indicate = choice.missing == "indicator"
    parts_of = train_test_tables(tables, test_share, Split(*choice.split) if choice.split else None)
    return Source(name, *parts_of, names, len(names), task, done, fitted, indicate)


def check_not_continuous(name: str, label: str, train: Any, classes: int, task: str) -> None:
    """Refuse numbers that nearly every row has another one of: whoever names them as the label means to predict the number.

    Args:
        name: Name of the data, for the error.
        label: Name of the label column.
        train: Rows of the training part.
        classes: Number of classes.
        task: Name of the task.

    Raises:
        DataError: Nearly every row has another number as its label.
    """
    if (
        task == "classification"
        and classes > MANY
        and 4 * classes > train.num_rows
        and is_numeric(train.column(label).type)
    ):
        raise DataError(
            f"{name}: the label {label!r} holds {classes} different numbers in {train.num_rows} rows, and each would be a "
            "class. --task regression (task: regression) predicts the number; names of classes are better "
            "written as text."
        )
    numbers = is_numeric(train.column(label).type) and not metadata_class_names(train, label)
    if task == "classification" and classes > FEW_CLASSES and numbers:
        sentence = "the label %r has %d different numbers, and each is a class; --task regression predicts the number"
        LOG.warning(sentence, label, classes)


def initial_encoder(train: Any, column: str, done: str, choice: ColumnSelection) -> Encoder:
    """Return the encoder of a column before any global statistics are known.

    Args:
        train: Rows of the training part.
        column: Name of the column.
        done: Its role.
        choice: Column selection of the user.
    """
    kind = done.removesuffix(f", and {DIVIDES}")
    if kind == CATEGORY:
        return Encoder(column, "category", distinct_values([train.column(column)]))
    return Encoder(column, "date" if kind == DATE else "number", fills=choice.missing != "error")


def train_test_tables(
    tables: Sequence[SampleTable], share: float, split: Split | None = None
) -> tuple[SampleTable, SampleTable]:
    """A training and a test table: those of ``tables``, or the one there is without ``share`` of its rows, and these.

    Args:
        tables: One table, or a training and a test table.
        share: Share of test rows.
        split: Groups and times of the split, or None.
    """
    train, *test = tables
    if test:
        if split is not None:
            check_no_shared_groups(train.columns, test[0].columns, split)
        return train, test[0]
    if split is not None:
        chosen = test_row_mask(train.columns, split, len(train), share, SPLIT_SEED)
        return train.rows(np.flatnonzero(~chosen)), train.rows(np.flatnonzero(chosen))
    strata = train.y if train.y.dim() == 1 else train.y.new_zeros(len(train))
    rows, test_rows = split_rows(strata.numpy(), share)
    return train.rows(rows), train.rows(test_rows)


def split_rows(labels: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Training and test rows, stratified by class and always the same; every class keeps a training row.

    Args:
        labels: Labels, ``[n]``.
        share: Share of test rows.

    >>> keep, held = split_rows(np.array([0] * 10 + [1] * 5), 0.2)
    >>> len(keep), len(held)
    (12, 3)
    """
    if not 0 < share < 1:
        raise DataError(f"test_share must be a share between 0 and 1, not {share}.")
    rng = np.random.default_rng(SPLIT_SEED)
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    sorted_labels = labels[order]
    spare = order[1:][sorted_labels[1:] == sorted_labels[:-1]]  # all but the first row of each class
    count = min(max(1, round(len(labels) * share)), len(spare))
    if count == 0:
        raise DataError("No test rows can be split off: every class has a single row. Provide test data.")
    # Every (1/share)-th row of the rows sorted by class.
    taken = np.diff(np.arange(len(spare) + 1) * count // len(spare)) == 1
    test_rows = np.sort(spare[taken])
    return np.setdiff1d(np.arange(len(labels)), test_rows), test_rows


def metadata_columns(table: Any, skip: set[str | None]) -> dict[str, np.ndarray]:
    """Every column with one plain value per row, by name; the rest (lists, structs, bytes) is left out.

    Args:
        table: Rows of the data.
        skip: Columns that are left out.
    """
    import pyarrow as pa

    return {
        field.name: table.column(field.name).to_numpy()
        for field in table.schema
        if field.name not in skip and not pa.types.is_nested(field.type) and not is_binary(field.type)
    }
