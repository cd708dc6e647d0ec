"""Model inputs from files: tables (CSV, JSON lines, Parquet), images, and folders of images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from unskew.data.harmonized_source import site_names
from unskew.data.readers.arrow import pa, plain_numbers
from unskew.data.readers.arrow_io import date_cells, read_cells, read_typed, with_columns
from unskew.data.readers.cell_types import CellKind, ColumnUses, kind_of_names, type_columns
from unskew.data.readers.encoders import Encoder, impute, read_columns, to_texts
from unskew.data.readers.image_folders import IMAGES, is_image_file, path_column, visible_files
from unskew.data.readers.images import decode_column
from unskew.data.readers.masks import has_masks, mask_tables
from unskew.data.readers.text import encode_for_classification, pad_rows, row_texts
from unskew.data.readers.tokenization import make_tokenizer
from unskew.data.spec import TABLES
from unskew.errors import ConfigError, DataError, abbreviate, unknown_name
from unskew.runs.input_spec import InputSpec

REMEDY = "; the model needs a number in each row, so fill missing values or remove these rows."
FEW = 3


class UnknownCategories(NamedTuple):
    """Values of a categorical column that did not occur in training.

    Attributes:
        column: Name of the column.
        values: The distinct values, in order of occurrence.
        rows: Indices of the rows with these values.
    """

    column: str
    values: tuple[str, ...]
    rows: tuple[int, ...]

    def __str__(self) -> str:
        """Return a warning about the values."""
        rows = f"{len(self.rows)} row{'' if len(self.rows) == 1 else 's'}"
        return (
            f"The column {self.column!r} has values in {rows} that did not occur in training; they count as missing: "
            f"{abbreviate([repr(value) for value in self.values], FEW)}."
        )


class InputRows(NamedTuple):
    """Inputs of a model, read from files.

    Attributes:
        x: Inputs as ``Predictor.outputs`` expects them.
        names: Index of each row, from 0, or name of each image file.
        unknown: Categories that did not occur in training.
        table: The pyarrow table of the rows; None for images.
        cells: The same table with the cells of a CSV file, and the dates of other files, as written.
        images: pyarrow column of the encoded images or their paths; None for other inputs.
        folder: Folder of relative paths of images; None means the current folder.
    """

    x: Tensor
    names: Sequence[int | str]
    unknown: tuple[UnknownCategories, ...] = ()
    table: Any = None
    cells: Any = None
    images: Any = None
    folder: Path | None = None


def column_uses(inputs: InputSpec) -> ColumnUses:
    """Return the kinds of the columns that a model was trained on.

    Args:
        inputs: Input specification of the model.
    """
    texts = (*inputs.text, *((inputs.image,) if inputs.image else ()))
    kinds: dict[str, CellKind] = dict.fromkeys(texts, "text")
    kinds.update((name, "number") for name in inputs.features)
    for column in inputs.columns:
        kinds[column.name] = kind_of_names(column.values) if column.kind == "category" else column.kind
    if inputs.harmonization is not None:
        kinds[inputs.harmonization.site] = kind_of_names([*inputs.harmonization.sites])
    if inputs.label is not None and not inputs.objective.numeric_labels and inputs.label not in kinds:
        kinds[inputs.label] = kind_of_names(inputs.class_names)
    forms = tuple((column.name, column.form) for column in inputs.columns if column.form)
    return ColumnUses(kinds=tuple(kinds.items()), forms=forms)


def read_rows(path: Path, inputs: InputSpec, new_site: bool = False) -> InputRows:
    """Read the inputs of a model from a file or folder.

    Args:
        path: A .csv, .jsonl or .parquet file with the columns of the training data (further columns are ignored); an image
            file; or a folder of image files, searched recursively.
        inputs: Input specification of the model.
        new_site: Whether rows of sites without training rows are harmonized by their own rows.

    Raises:
        DataError: If the file cannot be read, or does not contain inputs of this model.
    """
    if not path.exists():
        raise DataError(f"There is no file or folder at {path}.")
    if path.suffix.lower() in TABLES:
        if path.suffix.lower() == ".csv":
            text = read_cells(path, inputs.csv.spec)
            table, cells = type_columns([text], column_uses(inputs))[0], text.cells
        else:
            cells = read_typed(path, inputs.csv.spec.missing)
            text = date_cells(path, cells, inputs.csv.spec, column_uses(inputs))
            table = with_columns(cells, type_columns([text], column_uses(inputs))[0])
        if not table.num_rows:
            raise DataError(f"{path} has no rows.")
        x = rows_of_table(table, path, inputs, new_site)
        images = table.column(inputs.image) if inputs.image else None
        unknown = unknown_categories(table, inputs)
        return InputRows(x, range(table.num_rows), unknown, table, cells, images, path.parent)
    if inputs.kind != "uint8":
        raise DataError(f"The model needs rows of a table (.csv, .jsonl or .parquet), but {path} is not one.")
    if inputs.objective.pixels and path.is_dir() and has_masks(path):
        table = pa.concat_tables([part for part in mask_tables(path) if part is not None], promote_options="permissive")
        images, names = (
            table.column("image"),
            [Path(name).relative_to(path).as_posix() for name in table["image"].to_pylist()],
        )
        return InputRows(
            decode_column(images, str(path), None, inputs.image_size), names, table=table, cells=table, images=images
        )
    files = [file for file in (visible_files(path) if path.is_dir() else [path]) if is_image_file(file)]
    if not files:
        raise DataError(f"{path} is neither an image nor a folder of images ({', '.join(IMAGES)}).")
    names = [file.relative_to(path).as_posix() if path.is_dir() else file.name for file in files]
    images = path_column(files)
    return InputRows(decode_column(images, str(path), None, inputs.image_size), names, images=images)


def file_columns(rows: InputRows, names: Sequence[str], path: Path) -> dict[str, list[Any]]:
    """Return columns of the file that rows were read from, by name; missing cells are None.

    Args:
        rows: Rows of the file.
        names: Names of the columns.
        path: Path of the file, for error messages.

    Raises:
        ConfigError: If the rows are not from a table.
        DataError: If there is no such column.
    """
    for name in names:
        if rows.table is None:
            raise ConfigError(f"--keep {name} names a column of a table, but {path} is not one.")
        if name not in rows.table.column_names:
            raise DataError(f"{path}: {unknown_name('column', name, rows.table.column_names)}")
    return {name: [json_value(value) for value in rows.cells.column(name).to_pylist()] for name in names}


def json_value(value: Any) -> int | float | str | None:
    """Return a cell as a value of JSON, which has no infinite numbers: None for a missing cell, otherwise a number or text.

    >>> json_value(None), json_value(float("nan")), json_value(0.5), json_value(float("inf"))
    (None, None, 0.5, 'inf')
    """
    if value is None or value != value:
        return None
    return value if isinstance(value, int | str) or (isinstance(value, float) and math.isfinite(value)) else str(value)


def rows_of_table(table: Any, path: Path, inputs: InputSpec, new_site: bool) -> Tensor:
    """Read the inputs from a table's columns.

    Args:
        table: Table in memory.
        path: Path of the file, for error messages.
        inputs: Input specification of the model.
        new_site: Whether rows of sites without training rows are harmonized by their own rows.
    """
    wanted = inputs.text or inputs.features or ((inputs.image,) if inputs.image else ())
    if not wanted and inputs.kind == "uint8":
        raise DataError(f"The model needs images, but {path} is a table. Use an image file or a folder of images.")
    if not wanted:
        raise DataError(
            f"The model was trained on arrays, so the input columns of {path} are unknown; "
            "load the model in Python and pass arrays."
        )
    existing = set(table.column_names)
    for column in wanted:
        if column not in existing:
            raise DataError(
                f"{path}: {unknown_name('column', column, table.column_names)} The model was trained on it."
            )
    if inputs.text:
        texts = row_texts(table, inputs.text, str(path))
        return pad_rows([encode_for_classification(texts, make_tokenizer(str(inputs.tokenizer)), inputs.block)])[0]
    if inputs.image:
        return decode_column(table.column(inputs.image), str(path), path.parent, inputs.image_size)
    encoders = inputs.encoders or tuple(Encoder(name) for name in inputs.features)
    values, fitted = read_columns(table, encoders, str(path), REMEDY), inputs.harmonization
    if fitted is not None:
        columns = {fitted.site: plain_numbers(table.column(fitted.site)).to_numpy()} if fitted.site in existing else {}
        sites = site_names(columns, fitted.site, f"The rows of {path}")
        values = fitted.harmonize(values, encoders, sites, str(path), new_site)
    return torch.from_numpy(impute(values, encoders))


def unknown_categories(table: Any, inputs: InputSpec) -> tuple[UnknownCategories, ...]:
    """Return values of categorical columns that did not occur in training.

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
