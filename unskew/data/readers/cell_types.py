"""Types of the columns of CSV files, decided over all files of a table together.

A column is empty, or contains integers, numbers, truth values, dates or text. Text that looks like a number but would change
when it is written as one (leading zeros, more digits than 64 bits hold) is a code and stays text, unless it is an input.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from unskew.data.csv_format import CsvSpec
from unskew.data.readers.arrow import cast, pa, pc
from unskew.data.readers.missing_values import NOT_AVAILABLE, PLACEHOLDERS, is_number, without_missing
from unskew.data.readers.text_dates import as_dates, date_format, date_formats
from unskew.errors import DataError

LOG = logging.getLogger("unskew")
CellKind = Literal["number", "truth", "date", "text"]
TRUTH = {text: value for value in (True, False) for text in (str(value), str(value).lower(), str(value).upper())}
TRUTH |= {"1": True, "0": False}
CODE = r"^\+?\d+$"
CODE_WITH_E = r"^\d+[eE]\d+$"
WHOLE = r"^[+-]?\d+(\.0*)?$"
COMMA_NUMBER = r"^\s*[+-]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?([eE][+-]?\d+)?\s*$"
POINT_NUMBER = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"
THOUSANDS = r"^\s*[+-]?[1-9]\d{0,2}(,\d{3})+\s*$"
SHOWN, SAMPLE = 3, 100
CODES = "codes, such as 007 or 12E5; list it in categories, or in features to use the numbers"
"""Reason that ``why_text`` returns for a column of codes."""
STORED_AS_TEXT = "numbers stored as text; store them as numbers"
"""Reason that ``why_text`` returns for a column of numbers with decimal points, as other formats than CSV may have."""


@dataclass(frozen=True)
class ColumnUses:
    """Uses of columns that decide how their cells are read.

    Attributes:
        numbers: Columns that are read as numbers although they look like codes, because they are inputs or targets.
        labels: Columns with class labels, in which texts such as ``NA`` must be explained.
        names: Columns whose values are names, as of clients, groups and categories; different names stay different.
        dates: Columns that are read as dates if ``csv.dates`` is set, and if they are texts of other files than CSV files.
        kinds: Kinds of columns that are already known, as those of a trained model.
        forms: Formats of date columns that are already known.
    """

    numbers: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    dates: tuple[str, ...] = ()
    kinds: tuple[tuple[str, CellKind], ...] = ()
    forms: tuple[tuple[str, str], ...] = ()

    @property
    def date_columns(self) -> tuple[str, ...]:
        """Columns that are dates, or may be."""
        return (*self.dates, *(name for name, kind in self.kinds if kind == "date"))


NO_USES = ColumnUses()


class TextTable(NamedTuple):
    """Cells of a CSV file as text.

    Attributes:
        path: Path of the file.
        cells: pyarrow table of strings.
        dialect: Format of the file.
    """

    path: Path
    cells: Any
    dialect: CsvSpec


def type_columns(tables: Sequence[TextTable], uses: ColumnUses = NO_USES, training: int | None = None) -> list[Any]:
    """Convert the columns of text tables to the types that all of them together allow.

    If only a test file has text in a column, the training files decide, so that the text is noticed.

    Args:
        tables: Files of a table; a file may lack columns.
        uses: Uses of the columns.
        training: Number of training files, which come first; None means all.

    Returns:
        A pyarrow table for each file. The metadata ``dates`` contain the formats of dates that are not ISO 8601, as JSON.

    Raises:
        DataError: If ``csv.decimal`` contradicts the cells, or a label may be missing.
    """
    typed: list[dict[str, Any]] = [dict.fromkeys(table.cells.column_names) for table in tables]
    forms = dict(uses.forms)
    for name in dict.fromkeys(name for table in tables for name in table.cells.column_names):
        files = [k for k, columns in enumerate(typed) if name in columns]
        groups = type_column(name, tables, files, uses, training)
        for group in groups:
            values = group.values
            if values is None:
                check_text(group.cells)
                values = group.cells.written
            start = 0
            for k in group.files:
                typed[k][name] = values.slice(start, tables[k].cells.num_rows)
                start += tables[k].cells.num_rows
        cells, values = groups[0].cells, groups[0].values
        if (form := date_format(cells.trimmed, cells.dialect.dates, values)) is not None:
            forms[name] = form
    about = {"dates": json.dumps(forms)} if forms else None
    return [pa.table(columns).replace_schema_metadata(about) for columns in typed]


class TypedCells(NamedTuple):
    """Cells of one column in the files that are read with one type.

    Attributes:
        files: Positions of the files.
        cells: Their cells.
        values: The cells as numbers, truth values or dates; None if they are text.
    """

    files: list[int]
    cells: ColumnCells
    values: Any | None


def type_column(
    name: str, tables: Sequence[TextTable], files: list[int], uses: ColumnUses, training: int | None
) -> list[TypedCells]:
    """Return the typed cells of one column: in one group, or apart for training and test if only a test file has text.

    Args:
        name: Name of the column.
        tables: Files of the table.
        files: Positions of the files that have the column.
        uses: Uses of the columns.
        training: Number of training files, which come first; None means all.
    """
    kind, codes_are_numbers = dict(uses.kinds).get(name), name in uses.numbers
    if kind is None and name in uses.dates and tables[0].dialect.dates is not None:
        kind = "date"  # the format may consist of digits only
    cells = join_cells(name, [tables[k] for k in files], uses)
    values = typed_values(cells, kind, codes_are_numbers)
    first = [k for k in files if training is None or k < training]
    if values is not None or not 0 < len(first) < len(files):
        return [TypedCells(files, cells, values)]
    of_training = join_cells(name, [tables[k] for k in first], uses)
    training_values = typed_values(of_training, kind, codes_are_numbers)
    if training_values is None:
        return [TypedCells(files, cells, None)]
    rest = [k for k in files if k not in first]
    others = join_cells(name, [tables[k] for k in rest], uses)._replace(named=False)  # the training files decide
    like: CellKind = "date" if pa.types.is_temporal(training_values.type) else "number"
    return [
        TypedCells(first, of_training, training_values),
        TypedCells(rest, others, typed_values(others, like, codes_are_numbers=True)),
    ]


class ColumnCells(NamedTuple):
    """Cells of one column in several files, as chunked arrays of strings; empty cells are missing.

    Attributes:
        name: Name of the column.
        path: Path of the first file, for messages.
        dialect: Format of the first file.
        written: Cells as written.
        trimmed: Cells without surrounding spaces.
        plain: The same with decimal points and without thousands marks.
        named: Whether the values are names, of which different ones stay different.
        is_label: Whether the values are class labels.
    """

    name: str
    path: Path
    dialect: CsvSpec
    written: Any
    trimmed: Any
    plain: Any
    named: bool
    is_label: bool


def join_cells(name: str, tables: Sequence[TextTable], uses: ColumnUses) -> ColumnCells:
    """Return the cells of one column in several files.

    Args:
        name: Name of the column.
        tables: Files that have the column.
        uses: Uses of the columns.
    """
    columns: tuple[list[Any], ...] = [], [], []
    for table in tables:
        cells, dialect = table.cells.column(name), table.dialect
        trimmed = pc.utf8_trim_whitespace(cells)
        absent = pc.is_in(trimmed, pa.array(["", *(dialect.missing or ())], pa.string()))
        cells, trimmed = (pc.if_else(absent, None, texts) for texts in (cells, trimmed))
        for column, texts in zip(columns, (cells, trimmed, with_decimal_points(trimmed, dialect)), strict=True):
            column += texts.chunks
    written, trimmed, plain = (pa.chunked_array(chunks, pa.string()) for chunks in columns)
    dialect, is_label = tables[0].dialect, name in uses.labels
    if dialect.dates is None:
        dialect = replace(dialect, dates=dict(uses.forms).get(name))
    named = is_label or name in uses.names
    return ColumnCells(name, tables[0].path, dialect, written, trimmed, plain, named, is_label)


def typed_values(cells: ColumnCells, kind: CellKind | None, codes_are_numbers: bool) -> Any | None:
    """Return the cells of a column as numbers, truth values or dates; None if they are text.

    Args:
        cells: Cells of the column.
        kind: Kind of the column if it is known.
        codes_are_numbers: Whether codes such as 007 are numbers.
    """
    if kind == "text":
        return None
    if cells.trimmed.null_count == len(cells.trimmed):
        return pa.chunked_array([pa.nulls(len(cells.trimmed))])
    absent = pc.is_in(cells.trimmed, pa.array(sorted(PLACEHOLDERS)))
    attempts = [cells]
    if pc.all(pc.or_(absent, pc.is_null(cells.trimmed))).as_py():
        if kind is not None or not cells.named:
            return pa.chunked_array([pa.nulls(len(cells.trimmed))])
    elif pc.any(absent).as_py():
        trimmed, plain = (pc.if_else(absent, None, texts) for texts in (cells.trimmed, cells.plain))
        attempts.append(cells._replace(trimmed=trimmed, plain=plain))
    for present in attempts:
        values = None
        if kind in (None, "number"):
            values = as_numbers(present, codes_are_numbers or kind == "number")
        if values is None and kind != "date":
            values = as_truth(present.trimmed)
        if values is None and kind in (None, "date") and (kind or not cells.named):  # names stay as written
            values = as_dates(present.trimmed, cells.dialect.dates)
        if values is not None:
            unusual = set(pc.filter(cells.trimmed, absent).unique().to_pylist()) - NOT_AVAILABLE
            if present is not cells and unusual:
                shown, count = ", ".join(map(repr, sorted(unusual)[:SHOWN])), pc.sum(absent).as_py()
                LOG.info(
                    "%s: in the column %s, %s counts as a missing value, in %d of %d rows; csv.missing sets other texts",
                    cells.path.name, cells.name, shown, count, len(absent),
                )  # fmt: skip
            return values
    return None


def as_numbers(cells: ColumnCells, codes_are_numbers: bool) -> Any | None:
    """Return cells as integers or numbers; None if one is neither, or if all are codes.

    Args:
        cells: Cells of the column.
        codes_are_numbers: Whether digits that would change when written as numbers, such as 007, are numbers.
    """
    plain = cells.plain
    first = plain.slice(0, SAMPLE).drop_null().to_pylist()
    if first and not any(is_number(text) for text in first):
        return None
    digits = all(re.fullmatch(r"[+-]?\d+", text) for text in first)  # a failing conversion takes long
    numbers = cast(plain, pa.int64()) if digits else None
    if numbers is None or not pc.all(pc.equal(numbers.cast(pa.string()), plain)).as_py():
        numbers = cast(plain, pa.float64())
        if numbers is None:
            return None
        if has_codes(cells, numbers, digits):
            return numbers if codes_are_numbers else None
        numbers = pc.if_else(pc.is_nan(numbers), None, numbers)
    return without_missing(numbers, cells.name, cells.path, cells.dialect.missing)


def has_codes(cells: ColumnCells, numbers: Any, digits: bool) -> bool:
    """Return whether cells are codes: 007, 12E5 and, if they are names, versions such as 1.10 next to 1.1.

    Args:
        cells: Cells of the column.
        numbers: Their values as float64.
        digits: Whether the first cells are digits.
    """
    texts = cells.trimmed
    if (digits and every(texts, CODE)) or every(texts, CODE_WITH_E):
        return True
    if not cells.named:
        return False
    if every(texts, f"{CODE}|{CODE_WITH_E}"):
        return True
    integers = every(texts, WHOLE)
    if (integers and pc.max(pc.abs(numbers)).as_py() < 2.0**53) or (cells.is_label and not integers):
        return False
    return len(numbers.unique()) < len(texts.unique())


def as_truth(trimmed: Any) -> Any | None:
    """Return trimmed cells as truth values; None if one cell is not a truth value."""
    if not set(trimmed.slice(0, SAMPLE).drop_null().to_pylist()) <= TRUTH.keys():
        return None
    index = pc.index_in(trimmed, pa.array(list(TRUTH)), skip_nulls=True)
    return None if index.null_count > trimmed.null_count else pc.take(pa.array(list(TRUTH.values())), index)


def check_text(cells: ColumnCells) -> None:
    """Validate a column of text, in which options for numbers would have no effect.

    Args:
        cells: Cells of the column.

    Raises:
        DataError: If the decimal mark of the user contradicts the cells, or a label may be missing.
    """
    texts, name = cells.trimmed, cells.name
    with_point = pc.filter(texts, pc.match_substring(texts, "."))
    if cells.dialect.decimal == "," and len(with_point) and every(texts, POINT_NUMBER):
        raise DataError(
            f"{cells.path}: the decimal mark is a comma, but the column {name!r} has points, such as "
            f"{with_point[0].as_py()}. If they separate thousands, set csv.thousands to point; otherwise set csv.decimal "
            "to point, and csv.thousands to comma for numbers such as 5,123."
        )
    absent = pc.filter(texts, pc.is_in(texts, pa.array(sorted(NOT_AVAILABLE))))
    if cells.dialect.missing is not None or not len(absent):
        return
    text = absent[0].as_py()
    if cells.is_label:
        raise DataError(
            f"{cells.path}: the label column {name!r} has {text!r} in {len(absent)} of {len(texts)} rows. If it means a "
            f"missing label, set csv.missing to {text} and remove these rows; if it is a class, set csv.missing to []."
        )
    LOG.info(
        "%s: %r in %d of %d rows of the column %s is read as text; csv.missing sets texts that mean a missing value",
        cells.path.name, text, len(absent), len(texts), name,
    )  # fmt: skip


def kind_of_names(names: Collection[str]) -> CellKind:
    """Return how cells must be read so that their names can be compared with known names.

    >>> kind_of_names(["1", "2"]), kind_of_names(["false", "true"]), kind_of_names(["007", "1"])
    ('number', 'truth', 'text')
    """
    if names and all(re.fullmatch(r"-?(0|[1-9]\d*)", name) and abs(int(name)) < 2**63 for name in names):
        return "number"
    return "truth" if names and {name.lower() for name in names} <= {"false", "true"} else "text"


def may_be_number(text: str) -> bool:
    """Return whether a cell is a number with a decimal point or comma."""
    return is_number(text.strip()) or is_number(text.strip().replace(",", "."))


def with_decimal_points(cells: Any, dialect: CsvSpec) -> Any:
    """Return cells with decimal points and without thousands marks; other cells do not become numbers.

    Args:
        cells: Trimmed cells.
        dialect: Format of the file.
    """
    decimal, thousands = dialect.decimal or ".", dialect.thousands
    if thousands is not None:
        mark = thousands_pattern(thousands)
        grouped = rf"^[+-]?\d{{1,3}}({mark}\d{{3}})+({re.escape(decimal)}\d*)?$"
        without = pc.replace_substring_regex(cells, mark, "")
        cells = pc.if_else(pc.match_substring_regex(cells, grouped), without, cells)
    if decimal == ",":
        cells = pc.replace_substring(pc.replace_substring(cells, ".", "\0"), ",", ".")
    return cells


def thousands_pattern(mark: str) -> str:
    """Return a regular expression for a thousands mark and the characters that programs write instead of it."""
    return {" ": "[ \u00a0\u202f]", "'": "['\u2019]"}.get(mark, re.escape(mark))


def every(texts: Any, pattern: str) -> bool:
    """Return whether all texts that are not missing match a pattern.

    Args:
        texts: pyarrow column of strings.
        pattern: Regular expression.
    """
    return bool(pc.all(pc.match_substring_regex(texts, pattern)).as_py())


def has_dates(column: Any) -> bool:
    """Return whether a column of strings has only dates whose format is unambiguous, and missing values."""
    texts = pc.utf8_trim_whitespace(column.cast(pa.string())).drop_null()
    return len(texts) > 0 and as_dates(texts, None) is not None


def why_text(column: Any) -> str | None:
    """Return why a column of strings does not contain numbers or dates, although most or all of its values look like them.

    Args:
        column: Values of the column.

    Returns:
        The reason with its remedy; None if the column contains text.
    """
    texts = pc.utf8_trim_whitespace(column.cast(pa.string())).drop_null()
    if not len(texts):
        return None
    with_comma = pc.filter(texts, pc.match_substring(texts, ","))
    if every(texts, CODE) or every(texts, CODE_WITH_E):
        return CODES
    if len(with_comma) and every(texts, f"{COMMA_NUMBER}|{THOUSANDS}"):
        if every(with_comma, THOUSANDS):
            return f"numbers with thousands marks such as {with_comma[0].as_py()}, see csv.thousands"
        if pc.any(pc.match_substring(with_comma, ".")).as_py():
            return "numbers with decimal commas and points for thousands, see csv.thousands"
        return "numbers with decimal commas, see csv.decimal"
    if has_dates(column):
        return f"dates stored as text such as {texts[0].as_py()}, see dates"
    formats = date_formats(texts[0].as_py())
    if formats and all(date_formats(text) for text in texts.slice(0, 100).to_pylist()):
        return f"dates such as {texts[0].as_py()}, whose format is ambiguous or mixed; see csv.dates"
    strange = [row for row, text in enumerate(column.to_pylist()) if text is not None and not may_be_number(text)]
    if not strange:
        with_point = pc.filter(texts, pc.match_substring(texts, "."))
        if not len(with_comma):
            return STORED_AS_TEXT
        if not len(with_point):
            return "numbers with decimal commas, see csv.decimal"
        return (
            f"numbers with different decimal marks, such as {with_comma[0].as_py()} and {with_point[0].as_py()}; write "
            "them with the same mark"
        )
    if 2 * len(strange) >= len(texts):
        return None
    row = strange[0]
    return f"numbers, but {column[row].as_py()!r} in row {row}; correct it, or see csv.missing"
