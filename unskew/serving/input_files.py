"""New rows from files as a model's inputs: tables, JSON lines, parquet, images and folders of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from unskew.data.readers.arrow_io import read_file
from unskew.data.readers.encoders import Encoder, impute, read_columns, to_texts
from unskew.data.readers.images import decode_column
from unskew.data.readers.text import encode_for_classification, pad_rows, row_texts
from unskew.data.readers.tokenization import make_tokenizer
from unskew.data.spec import TABLES
from unskew.errors import ConfigError, DataError, unknown_name
from unskew.runs.input_spec import InputSpec

REMEDY = "; the model needs a number in each row, so fill them or leave those rows out."
FEW = 3
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")


class UnknownCategories(NamedTuple):
    """Values of a category that nobody trained on.

    Attributes:
        column: Its name.
        values: Each of them once, as they come.
        rows: Where they are.
    """

    column: str
    values: tuple[str, ...]
    rows: tuple[int, ...]

    def __str__(self) -> str:
        """A sentence that says what becomes of them."""
        more = f" and {len(self.values) - FEW} more" if len(self.values) > FEW else ""
        rows = f"{len(self.rows)} row{'' if len(self.rows) == 1 else 's'}"
        return (
            f"The column {self.column!r} has values in {rows} that were not there in training, and counts as missing in "
            f"them: {', '.join(map(repr, self.values[:FEW]))}{more}."
        )


class InputRows(NamedTuple):
    """Inputs of a model.

    Attributes:
        x: As ``Predictor.outputs`` takes them.
        names: What each is called: the number of its row, from 0 on, or its file.
        unknown: Categories that nobody trained on.
        table: The pyarrow table that they are from; None for images.
    """

    x: Tensor
    names: Sequence[int | str]
    unknown: tuple[UnknownCategories, ...] = ()
    table: Any = None


def read_rows(path: Path, inputs: InputSpec) -> InputRows:
    """Inputs of a model, and what each of them is called.

    Args:
        path: A .csv, .jsonl or .parquet file with the columns that the model was trained on, and others or none; an image
            file; or a folder of image files, also in folders of their own.
        inputs: What the model expects.

    Raises:
        DataError: The file cannot be read, or does not contain inputs of this model.
    """
    if not path.exists():
        raise DataError(f"There is no file or folder {path}.")
    if path.suffix.lower() in TABLES:
        table = read_file(path, inputs.csv.spec)
        if not table.num_rows:
            raise DataError(f"{path} has no rows.")
        x = rows_of_table(table, path, inputs)
        return InputRows(x, range(table.num_rows), unknown_categories(table, inputs), table)
    if inputs.kind != "uint8":
        raise DataError(f"The model takes rows of a table (.csv, .jsonl or .parquet); {path} is none.")
    files = sorted(f for f in path.rglob("*") if f.suffix.lower() in IMAGES) if path.is_dir() else [path]
    if not files or (not path.is_dir() and path.suffix.lower() not in IMAGES):
        raise DataError(f"{path} is neither an image nor a folder of images ({', '.join(IMAGES)}).")
    import pyarrow as pa

    column = pa.chunked_array([pa.array([file.read_bytes() for file in files])])
    size = int(inputs.shape[1]) if inputs.shape[1] == inputs.shape[2] else None
    names = [file.relative_to(path).as_posix() if path.is_dir() else file.name for file in files]
    return InputRows(decode_column(column, str(path), None, size), names)


def file_columns(rows: InputRows, names: Sequence[str], path: Path) -> dict[str, list[Any]]:
    """Return columns of the file that rows are from, by name.

    Args:
        rows: Rows of the file.
        names: Names of the columns.
        path: The file, for errors.

    Raises:
        ConfigError: If the rows are not from a table, or a name has another meaning among predictions.
        DataError: If there is no such column.
    """
    for name in names:
        if rows.table is None or name in ("row", "label", "unknown"):
            what = "predictions have a column of this name, too" if rows.table is not None else f"{path} is not a table"
            raise ConfigError(f"--keep {name} cannot be used: {what}.")
        if name not in rows.table.column_names:
            raise DataError(f"{path}: {unknown_name('column', name, rows.table.column_names)}")
    return {
        name: [v if isinstance(v, int | float | str) else str(v) for v in rows.table.column(name).to_pylist()]
        for name in names
    }


def rows_of_table(table: Any, path: Path, inputs: InputSpec) -> Tensor:
    """The inputs in a table's columns.

    Args:
        table: Table in memory.
        path: The file, for errors.
        inputs: Input specification of the model.
    """
    wanted = inputs.text or inputs.features or ((inputs.image,) if inputs.image else ())
    if not wanted and inputs.kind == "uint8":
        raise DataError(f"The model takes images; {path} is a table. Give an image file, or a folder of images.")
    if not wanted:
        raise DataError(
            f"The model was trained on arrays, so nothing says which columns of {path} are its inputs; "
            "load it in Python and give it arrays."
        )
    there = set(table.column_names)
    for column in wanted:
        if column not in there:
            raise DataError(
                f"{path}: {unknown_name('column', column, table.column_names)} The model was trained on it."
            )
    if inputs.text:
        texts = row_texts(table, inputs.text, str(path))
        return pad_rows([encode_for_classification(texts, make_tokenizer(str(inputs.tokenizer)), inputs.block)])[0]
    if inputs.image:
        size = int(inputs.shape[1]) if inputs.shape[1] == inputs.shape[2] else None
        return decode_column(table.column(inputs.image), str(path), path.parent, size)
    encoders = inputs.encoders or tuple(Encoder(name) for name in inputs.features)
    return torch.from_numpy(impute(read_columns(table, encoders, str(path), REMEDY), encoders))


def unknown_categories(table: Any, inputs: InputSpec) -> tuple[UnknownCategories, ...]:
    """Return values of categorical columns that are neither missing nor known from training.

    Args:
        table: Table in memory.
        inputs: Input specification of the model.
    """
    unknown = []
    for column in inputs.columns:
        if column.kind == "category":
            values, known = to_texts(table.column(column.name)), {None, *column.values}
            rows = np.flatnonzero([value not in known for value in values])
            if len(rows):
                unknown.append(UnknownCategories(column.name, tuple(dict.fromkeys(values[rows])), tuple(rows.tolist())))
    return tuple(unknown)
