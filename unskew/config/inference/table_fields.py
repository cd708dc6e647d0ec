"""Fields of a configuration for a table, from the contents of its columns."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from unskew.config.inference.client_columns import (
    MOST_CATEGORIES,
    PERSON,
    ClientColumns,
    client_columns,
    kind_of_client,
)
from unskew.config.inference.image_fields import set_image_size, set_segmentation
from unskew.config.inference.inferred_config import InferredConfig
from unskew.config.inference.survival_fields import set_survival_labels, survival_labels, two_labels
from unskew.data.csv_format import csv_spec
from unskew.data.readers.arrow import pa
from unskew.data.readers.cell_types import ColumnUses, has_dates, why_text
from unskew.data.readers.class_names import names_in_metadata
from unskew.data.readers.column_roles import FILE, is_category_text, is_date, is_identifier, is_numeric, is_string
from unskew.data.readers.files import file_tables
from unskew.data.readers.image_folders import IMAGES
from unskew.data.readers.images import image_bytes, is_image
from unskew.data.readers.labels import is_list_type
from unskew.errors import LONGEST_LIST, ConfigError, DataError, unknown_name
from unskew.expressions import parse_names, quote, unquote

LABELS = r"(label|labels|class|target|y|outcome|diagnosis|species|category|result|survived|type)"
MASK = r"(^|[\W_])masks?($|[\W_])"
"""Names of columns with masks."""
GROUPS = r"(.*[_ .-])?(id|key|code)|[a-z]+Id|[a-z]+ID"
"""Names of columns that may identify a person or object with several rows."""
MOST_CLASSES = 100
"""Maximum number of distinct values of a numeric class label."""
CODES = 12
"""Integer columns with at most this many distinct values may be category codes."""
WORDS = 3
"""Minimum mean number of words per row of a text column."""
PATHS = 20
"""Number of values that are examined for paths of image files; minimum number of groups that are not split."""


def set_table_fields(
    inferred: InferredConfig, path: Path, data: str, label: str | None, clients: str | None, image: str | None
) -> None:
    """Set fields for a table from the contents of its columns.

    Args:
        inferred: Configuration to complete.
        path: File or folder of the table.
        data: Name of the data source.
        label: Label column, or None.
        clients: Column that names the clients, or None.
        image: Column with images or paths of image files, or None.

    Raises:
        ConfigError: If a column does not exist, or no label is found.
        DataError: If the label has missing values, or the table cannot be read.
    """
    csv = csv_spec(inferred.values.get("csv", {}))
    table = file_tables(path, csv)[0]
    dated = tuple(c for c in table.column_names if is_string(table.column(c).type) and has_dates(table.column(c)))
    if dated:  # as the experiment reads them if it lists them
        table = file_tables(path, csv, ColumnUses(dates=dated))[0]
    n, columns = table.num_rows, list(table.column_names)
    label, clients, image = (name and unquote(name) for name in (label, clients, image))
    chosen = two_labels(table, label)
    for name in filter(None, (None if chosen else label, clients, image)):
        if name not in columns:
            raise ConfigError(unknown_name("column", name, columns))
    folder = path if path.is_dir() else path.parent
    images = [c for c in columns if c == image or _has_images(table.column(c), folder)]
    images.sort(key=lambda c: (c != image, bool(re.search(MASK, c, re.I))))  # masks are inputs only if nothing else is
    nested = {c for c in columns if c in images or is_list_type(table.column(c).type)}
    distinct = {c: n if c in images else _distinct(table.column(c)) for c in columns}
    in_metadata = names_in_metadata(table.schema)
    named = [c for c in columns if c in in_metadata]
    files = FILE if path.is_dir() and FILE in columns else None  # the column with the names of the files
    never = {*nested, clients, files}
    complete = [c for c in columns if not table.column(c).null_count and c not in never]
    times = chosen or (None if label or named else survival_labels(table, complete, distinct))
    guessed = None if label else next(iter(named), None) or (times and times[1]) or _label(complete, distinct, n)
    guessed = guessed or (None if label else next((c for c in images[1:] if re.search(MASK, c, re.I)), None))
    label = times[1] if times else label or guessed
    if label is None:
        raise ConfigError(
            f"{path}: no column without missing values looks like a label (a few values that repeat). Set --label to "
            f"one of {', '.join(columns[:LONGEST_LIST])}{' ...' if len(columns) > LONGEST_LIST else '.'}"
        )
    if table.column(label).null_count:
        raise DataError(
            f"{path}: {table.column(label).null_count} of {n} rows have no value in the label column {label}. Remove "
            "these rows, or set --label to another column."
        )
    masks = label in images
    images = [c for c in images if c != label]
    if masks and not images:
        raise ConfigError(
            f"{path}: the label column {label} has images, the masks of a segmentation, but no other column has images. "
            "Set --image to their column, or --label to another column."
        )
    labels = times or (label,)
    never = {*labels, *nested, files}
    owners = client_columns(table, [c for c in columns if c not in never], distinct, clients)
    owners = owners._replace(chosen=owners.chosen or files)
    guess = ", chosen by its name or its few values; --label sets another" if guessed else ""
    gaps = [
        c for c in columns if guessed and table.column(c).null_count and distinct[c] <= 1 + min(MOST_CLASSES, n // 4)
    ]
    which = "" if times else f"; the label {label} has {distinct[label]} values{guess}"
    inferred.seen.append(f"{n} rows, {len(columns)} columns{which}")
    if gaps:
        inferred.seen.append(f"not considered as labels because of missing values: {', '.join(gaps)}")
    inferred.set("data", data)
    inferred.set("label", label, f"{distinct[label]} values; --label sets another column")
    if times:
        set_survival_labels(inferred, table, *times, guessed is not None)
    is_number = not times and label not in named and is_numeric(table.column(label).type)
    if is_number and (distinct[label] > MOST_CLASSES or (_numbers(table.column(label)) % 1 != 0).any()):
        inferred.set("task", "regression", "predict a number, not a class")
    if masks:
        inferred.set("task", "segmentation", "predict the class of each pixel")
    if images:
        inferred.set("image", images[0], "the inputs are the images in this column")
        column = table.column(images[0])
        paths = is_string(column.type) and not column.null_count
        contents = (blob for _, blob in image_bytes(column, str(path), folder))
        set_image_size(inferred, [folder / p for p in column.to_pylist()] if paths else [*map(io.BytesIO, contents)])
        _set_partition(inferred, owners, distinct, table)
        if masks:
            set_segmentation(inferred, image_bytes(table.column(label), str(path), folder))
        else:
            inferred.set("model", "cnn", "unskew models lists all models")
        return
    rest = [c for c in columns if c not in (*labels, owners.chosen, files)]
    constant = {c for c in rest if c not in nested and _distinct(table.column(c).drop_null()) <= 1}
    rest = [c for c in rest if c not in constant and c not in owners.unused]
    codes = [c for c in rest if c in owners.named and not is_string(table.column(c).type)]
    numbers = [c for c in rest if is_numeric(table.column(c).type) and c not in owners.named]
    texts = [c for c in rest if is_string(table.column(c).type)]
    categories = [c for c in texts if distinct[c] <= min(MOST_CATEGORIES, n // 4) and is_category_text(table.column(c))]
    dates = [c for c in rest if is_date(table.column(c).type)]
    text = max(texts, key=partial(_words, table), default=None)
    alone = {*rest} == {*texts, *codes} and {*categories} <= {*owners.named} and "task" not in inferred.values
    if text is not None and alone and _words(table, text) >= WORDS:
        inferred.set("text", text, "each text is tokenized into words and word bigrams")
        _set_partition(inferred, owners, distinct, table)
        inferred.set("model", "text-mlp", "without download; hf:NAME is a pretrained model")
        inferred.set("optimizer", "adam")
        return
    reasons = owners.unused | dict.fromkeys(constant, "the same value in every row")
    measured, unlisted = {*numbers}, {*texts} - {*categories}
    for c in [*rest, *owners.unused]:
        unusable = _why_text(table.column(c)) if c in unlisted else None
        if unusable is None and is_identifier(table.column(c), c):
            unusable = (
                f"an identifier, {distinct[c]} values in {n} rows" if distinct[c] < n else "different in every row"
            )
        elif c in measured and np.isinf(_numbers(table.column(c))).any():
            unusable = "infinite values"
        if unusable or (c in unlisted and c not in owners.unused):
            reasons[c] = unusable or "too many different strings"
    reasons = {c: reasons[c] for c in columns if c in reasons}
    if reasons:
        inferred.set("exclude", list(reasons), "for the reasons above")
        inferred.seen += [f"excluded: {c}: {reason}" for c, reason in reasons.items()]
    numbers = [c for c in numbers if c not in reasons]
    listed = {*categories, *codes}
    categories = [c for c in columns if c in listed and c not in reasons]
    if owned := [c for c in categories if c in owners.named]:
        inferred.seen.append(
            f"categories although their names are those of client columns: {', '.join(owned)}; to leave a column out, add it "
            "to exclude"
        )
    _report_codes(inferred, table, numbers)
    groups = [c for c in reasons if owners.named.get(c, PERSON if re.fullmatch(GROUPS, c, re.I) else None) == PERSON]
    group = next((c for c in groups if PATHS <= distinct[c] < n and not table.column(c).null_count), None)
    if group is not None:
        same = f"{n} rows with {distinct[group]} values; rows with the same value are never split"
        inferred.set("split_by", quote(group), same)
    if categories:
        inferred.set("categories", categories, "each value gets a weight" if times else "each value gets an embedding")
    if dates:
        inferred.set("dates", dates, "days since 1970")
    if any(table.column(c).null_count for c in [*numbers, *dates]):
        inferred.set(
            "missing", "indicator", "missing numbers are replaced by the mean and marked by an additional input"
        )
    _set_partition(inferred, owners, distinct, table)
    model = "proportional" if times else "table-mlp" if categories else "mlp"
    inferred.set("model", model, "unskew models lists all models")


def _set_partition(inferred: InferredConfig, owners: ClientColumns, distinct: Mapping[str, int], table: Any) -> None:
    """Set the partition: by the column that names clients if there is one, otherwise by label or iid.

    If there is a date column, a split by time is added as a comment.
    """
    owner = owners.chosen
    if owner is not None:
        values = f"one client for each of the {distinct[owner]} values of {owner}"
        inferred.set("partition", f"natural:{quote(owner)}", values)
    elif "task" in inferred.values:
        inferred.set("partition", "iid", "no column surely names the clients")
    else:
        inferred.set("partition", "dirichlet:0.3,min=2", "label skew; no column surely names the clients")
    if owner is None:
        inferred.set("clients", max(2, min(10, table.num_rows // 40)))
    label = inferred.values["label"]
    dates = [c for c in table.column_names if is_date(table.column(c).type) and c not in (label, *parse_names(label))]
    date = next((c for c in dates if distinct[c] > 1 and not table.column(c).null_count), None)
    if date is not None:
        group = inferred.values.get("split_by")
        after, split, why = "partition", f"time:{quote(date)}", "evaluates on the newest rows, not on random ones"
        if group:
            after, split, why = "split_by", f"{group},{split}", f"instead of the line above: {why}"
        inferred.commented[after] = {"split_by": split}, why
    if owners.others:
        gaps = {c: table.column(c).null_count for c in owners.others}
        listed = ", ".join(
            f"{c} ({distinct[c] - bool(gaps[c])} values{f', {gaps[c]} rows without one' if gaps[c] else ''})"
            for c in gaps
        )
        inferred.seen.append(
            f"may {'also ' if owner else ''}name the clients: {listed}; choose one with --clients COLUMN, or partition: "
            "natural:COLUMN"
        )


def _report_codes(inferred: InferredConfig, table: Any, numbers: Sequence[str]) -> None:
    """Report integer columns that may be category codes."""
    coded = []
    for column in numbers:
        codes = np.unique(_numbers(table.column(column)))
        codes = codes[np.isfinite(codes)]
        if 3 <= len(codes) <= CODES and not (codes % 1).any():
            coded.append(column)
    if coded:
        inferred.seen.append(
            f"integers with few values: {', '.join(coded)}; add the columns that contain codes, not amounts, to "
            f"categories: [{', '.join(coded)}]"
        )


def _has_images(column: Any, folder: Path) -> bool:
    """Return whether a column has encoded images, or paths of image files of which some exist."""
    if not is_string(column.type):
        return is_image(column.type)
    paths = column.drop_null()[:PATHS].to_pylist()
    return any(Path(path).suffix.lower() in IMAGES and (folder / path).is_file() for path in paths)


def _words(table: Any, column: str) -> float:
    """Return the mean number of words in a string column."""
    values = table.column(column).drop_null().to_pylist()
    return sum(len(value.split()) for value in values) / max(1, len(values))


def _distinct(column: Any) -> int:
    """Return the number of distinct values; for types that cannot be compared, such as lists, the number of rows."""
    try:
        return len(column.unique())
    except pa.ArrowNotImplementedError:
        return len(column)


def _why_text(column: Any) -> str | None:
    """Return why strings are not read as numbers, dates or images although most of them look like that; or None."""
    reason, texts = why_text(column), column.drop_null().to_pylist()
    if reason is None and 2 * sum(Path(text).suffix.lower() in IMAGES for text in texts) > len(column):
        return f"paths of images, but there is no file {texts[0]!r} in the folder of the table"
    return reason


def _numbers(column: Any) -> np.ndarray:
    return np.asarray(column.cast("float64", safe=False).drop_null())


def _label(columns: list[str], distinct: dict[str, int], n: int) -> str | None:
    """Return the most likely label column: the first with a typical name, or else the last with few values."""
    few = [c for c in columns if 2 <= distinct[c] <= max(2, min(MOST_CLASSES, n // 4))]
    named = [c for c in few if re.fullmatch(LABELS, c, re.I)]
    rest = [c for c in few if distinct[c] <= 20 and kind_of_client(c) is None]
    return named[0] if named else rest[-1] if rest else None
