"""Names of classes in parquet files of the Hugging Face Hub, whose columns contain numbers of classes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from unskew.data.readers.arrow import pa
from unskew.data.readers.column_roles import is_numeric
from unskew.data.readers.labels import is_list_type
from unskew.data.readers.names import clean_names
from unskew.errors import DataError, abbreviate
from unskew.filesystem import parse_json

KEY = b"huggingface"
"""Key of the Hub's metadata."""
UNLABELED = -1
"""Number of the Hub for rows without a class."""


def metadata_class_names(table: Any, label: str) -> tuple[str, ...]:
    """Return the clean class names of a label column from the Hub's metadata; empty if there are none.

    Args:
        table: Rows of the data.
        label: Name of the label column.

    Raises:
        DataError: If the metadata are corrupted, or two names differ only by spaces or the form of their accents.
    """
    names = names_in_metadata(table.schema).get(label, ())
    clean_of = clean_names(names, f"The label column {label!r}")
    return tuple(clean_of[name] for name in names)


def names_in_metadata(schema: Any) -> dict[str, tuple[str, ...]]:
    """Return the class names of each column that has some in the Hub's metadata.

    Args:
        schema: pyarrow schema of a table.

    Raises:
        DataError: If the metadata are corrupted.
    """
    found = {column: class_feature(feature) for column, feature in features(hub_metadata(schema)).items()}
    return {column: tuple(feature["names"]) for column, feature in found.items() if feature is not None}


def hub_metadata(schema: Any) -> Any:
    """Return the Hub's metadata of a pyarrow schema; None if there are none."""
    metadata = (schema.metadata or {}).get(KEY)
    try:
        return None if metadata is None else parse_json(metadata)
    except ValueError as error:
        raise DataError(f"The metadata 'huggingface' of the table is corrupted: {error}.") from error


def features(metadata: Any) -> dict[str, Any]:
    """Return the description of each column in the Hub's metadata."""
    for name in ("info", "features"):
        metadata = metadata.get(name) if isinstance(metadata, dict) else None
    return metadata if isinstance(metadata, dict) else {}


def class_feature(feature: Any) -> dict[str, Any] | None:
    """Return the part of a column's description with the class names; None if there are none."""
    if isinstance(feature, dict) and isinstance(feature.get("feature"), dict):
        feature = feature["feature"]
    names = feature.get("names") if isinstance(feature, dict) else None
    return feature if names and isinstance(names, list) and all(isinstance(name, str) for name in names) else None


def with_common_class_names(tables: Sequence[Any], files: Sequence[Path]) -> list[Any]:
    """Return tables in which the same number means the same class: the names of the first file come first.

    Args:
        tables: Table of each file.
        files: Paths of the files, for errors.

    Raises:
        DataError: If only some files have names for the numbers of a column, or a number has no name.
    """
    out = list(tables)
    named = [names_in_metadata(table.schema) for table in tables]
    for column in dict.fromkeys(chain.from_iterable(named)):
        coded = [i for i, table in enumerate(tables) if column in table.column_names and has_numbers(table, column)]
        names_of = {files[i]: named[i].get(column, ()) for i in coded}
        check_named(column, names_of)
        if len({*names_of.values()}) <= 1:
            continue
        clean_of = clean_names(chain.from_iterable(names_of.values()), f"The column {column!r}")
        common = list(dict.fromkeys(clean_of.values()))
        for i in coded:
            numbers = [common.index(clean_of[name]) for name in named[i][column]]
            out[i] = renumbered(out[i], column, {**dict(enumerate(numbers)), UNLABELED: UNLABELED}, common, files[i])
    return out


def check_named(column: str, names_of: Mapping[Path, tuple[str, ...]]) -> None:
    """Validate that all or none of several files have names for the classes of a column.

    Args:
        column: Name of the column.
        names_of: Class names of each file; empty if it has none.

    Raises:
        DataError: If only some have names.
    """
    with_names = [file for file, names in names_of.items() if names]
    without = next((file for file, names in names_of.items() if not names), None)
    if with_names and without is not None:
        raise DataError(
            f"The column {column!r} contains numbers of classes, which {with_names[0]} names "
            f"({abbreviate(names_of[with_names[0]])}), but {without} does not. Store the names in the metadata of each file, "
            "or write the names instead of the numbers in all files."
        )


def check_same_class_names(schemas: Sequence[Any], files: Sequence[Path]) -> None:
    """Validate that the class names in the Hub's metadata are the same in all files.

    Args:
        schemas: pyarrow schema of each file.
        files: Paths of the files, for the error.

    Raises:
        DataError: If they differ.
    """
    first, *others = [names_in_metadata(schema) for schema in schemas]
    for file, names in zip(files[1:], others, strict=True):
        for column in dict.fromkeys((*first, *names)):
            check_named(column, {files[0]: first.get(column, ()), file: names.get(column, ())})
            if first[column] != names[column]:
                raise DataError(
                    f"The column {column!r} has the classes {abbreviate(first[column])} in {files[0]}, but "
                    f"{abbreviate(names[column])} in {file}. Write the same names in the same order in all files."
                )


def has_numbers(table: Any, column: str) -> bool:
    """Return whether a column contains numbers, or lists of numbers.

    Args:
        table: Table of a file.
        column: Name of the column.
    """
    kind = table.schema.field(column).type
    while is_list_type(kind):
        kind = kind.value_type
    return is_numeric(kind)


def renumbered(table: Any, column: str, numbers: Mapping[int, int], names: list[str], file: Path) -> Any:
    """Return a table with other numbers of the classes of a column, and their names in its metadata.

    Args:
        table: Table of a file.
        column: Name of the column.
        numbers: New number of each class by its number in the file.
        names: Name of each new number.
        file: Path of the file, for the error.

    Raises:
        DataError: If the column contains a number without a name.
    """

    def renumber(value: Any) -> Any:
        if value is None or isinstance(value, list):
            return value if value is None else [renumber(part) for part in value]
        if value not in numbers:
            raise DataError(
                f"The column {column!r} of {file} contains the number {value}, but has names for the classes 0 to "
                f"{len(numbers) - 2} only. Correct the number, or add names to the metadata."
            )
        return numbers[value]

    def type_of(kind: Any) -> Any:
        return pa.list_(type_of(kind.value_type)) if is_list_type(kind) else pa.int64()

    values = pa.array(renumber(table.column(column).to_pylist()), type_of(table.schema.field(column).type))
    metadata = hub_metadata(table.schema)
    feature = class_feature(features(metadata)[column])
    if feature is not None:
        feature["names"] = names
    table = table.set_column(table.column_names.index(column), column, pa.chunked_array([values]))
    return table.replace_schema_metadata({**table.schema.metadata, KEY: json.dumps(metadata).encode()})
