"""Types of the columns of CSV files, decided over all files of a table together.

A column is empty, or contains integers, numbers, truth values, dates or text. Text that looks like a number but would change
when it is written as one (leading zeros, more digits than 64 bits hold) is a code and stays text, unless it is an input.
"""

from __future__ import annotations

import datetime
import logging
import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from unskew.data.spec import CsvSpec
from unskew.errors import DataError

LOG = logging.getLogger("unskew")
Kind = Literal["number", "truth", "date", "text"]
NOT_AVAILABLE = frozenset(
    ["#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"]
    + ["N/A", "NA", "NULL", "NaN", "n/a", "nan", "null"]
)
"""Usual texts for a missing value, as pandas and R write them."""
PLACEHOLDERS = NOT_AVAILABLE | {
    *"?.-*–—",
    "--",
    "...",
    "#DIV/0!",
    "#VALUE!",
    "#REF!",
    "(null)",
    "\\N",
    "NONE",
    "None",
    "none",
}
PLACEHOLDERS |= {"n.a.", "N.A.", "na", "n.d.", "unknown", "Unknown", "UNKNOWN", "missing", "Missing"}
"""Texts that mean a missing value in a column whose other cells are numbers, truth values or dates."""
TRUTH = {text: value for value in (True, False) for text in (str(value), str(value).lower(), str(value).upper())}
TRUTH |= {"1": True, "0": False}
SENTINELS = tuple(float(f"{sign}{nines}") for nines in ("99", "999", "9999", "99999") for sign in ("-", ""))
CODE = r"^\+?\d+$"
CODE_WITH_E = r"^\d+[eE]\d+$"
WHOLE = r"^[+-]?\d+(\.0*)?$"
COMMA_NUMBER = r"^\s*[+-]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?([eE][+-]?\d+)?\s*$"
POINT_NUMBER = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"
THOUSANDS = r"^\s*[+-]?[1-9]\d{0,2}(,\d{3})+\s*$"
CLOCK = ("", " %H:%M:%S", " %H:%M", "T%H:%M:%S", "T%H:%M")
SHOWN, SAMPLE = 3, 100


@dataclass(frozen=True)
class ColumnUses:
    """Uses of columns that decide how their cells are read.

    Attributes:
        numbers: Columns that are read as numbers although they look like codes, because they are inputs or targets.
        labels: Columns with class labels, in which texts such as ``NA`` must be explained.
        names: Columns whose values are names, as of clients, groups and categories; different names stay different.
        dates: Columns that are read as dates if ``csv.dates`` is set.
        kinds: Kinds of columns that are already known, as those of a trained model.
    """

    numbers: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    dates: tuple[str, ...] = ()
    kinds: tuple[tuple[str, Kind], ...] = ()


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


def type_columns(
    tables: Sequence[TextTable],
    uses: ColumnUses = NO_USES,
    training: int | None = None,
) -> list[Any]:
    """Convert the columns of text tables to the types that all of them together allow.

    If only a test file has text in a column, the training files decide, so that the text is noticed.

    Args:
        tables: Files of a table; a file may lack columns.
        uses: Uses of the columns.
        training: Number of training files, which come first; None means all.

    Returns:
        A pyarrow table for each file.

    Raises:
        DataError: If ``csv.decimal`` contradicts the cells, or a label may be missing.
    """
    import pyarrow as pa

    typed: list[dict[str, Any]] = [dict.fromkeys(table.cells.column_names) for table in tables]
    for name in dict.fromkeys(name for table in tables for name in table.cells.column_names):
        files = [k for k, columns in enumerate(typed) if name in columns]
        first = [k for k in files if training is None or k < training]
        kind, codes_are_numbers = dict(uses.kinds).get(name), name in uses.numbers
        if kind is None and name in uses.dates and tables[0].dialect.dates is not None:
            kind = "date"  # the format may consist of digits only
        is_label = name in uses.labels
        named = is_label or name in uses.names, is_label
        column = ColumnCells(name, [tables[k] for k in files], *named)
        groups = [(files, column, column.typed(kind, codes_are_numbers))]
        if groups[0][2] is None and 0 < len(first) < len(files):
            column, rest = ColumnCells(name, [tables[k] for k in first], *named), [k for k in files if k not in first]
            values = column.typed(kind, codes_are_numbers)
            if values is not None:
                further = ColumnCells(name, [tables[k] for k in rest])
                like: Kind = "date" if pa.types.is_temporal(values.type) else "number"
                groups = [(first, column, values), (rest, further, further.typed(like, True))]
        for members, cells, values in groups:
            if values is None:
                cells.check_text(name in uses.labels)
                values = cells.texts
            start = 0
            for k in members:
                typed[k][name] = values.slice(start, tables[k].cells.num_rows)
                start += tables[k].cells.num_rows
    return [pa.table(columns) for columns in typed]


class ColumnCells:
    """Cells of one column in all files of a table.

    Args:
        name: Name of the column.
        tables: Files of the table.
        named: Whether the values are names.
        is_label: Whether the values are class labels.
    """

    def __init__(self, name: str, tables: Sequence[TextTable], named: bool = False, is_label: bool = False) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc

        self.name, self.tables, self.named, self.is_label = name, tables, named, is_label
        texts, trimmed, plain = [], [], []
        for table in tables:
            cells, explicit = table.cells.column(name), table.dialect.missing or ()
            clean = pc.utf8_trim_whitespace(cells)
            absent = pc.is_in(clean, pa.array(["", *explicit], pa.string()))
            texts.append(pc.if_else(absent, pa.scalar(None, pa.string()), cells))
            trimmed.append(pc.if_else(absent, pa.scalar(None, pa.string()), clean))
            plain.append(with_decimal_points(trimmed[-1], table.dialect))
        self.texts, self.trimmed, self.plain = map(concatenate_columns, (texts, trimmed, plain))
        self.missing = tables[0].dialect.missing

    def typed(self, kind: Kind | None, codes_are_numbers: bool) -> Any | None:
        """Return the column as numbers, truth values or dates; None if it is text.

        Args:
            kind: Kind of the column if it is known.
            codes_are_numbers: Whether codes such as 007 are numbers.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        if kind == "text":
            return None
        if self.trimmed.null_count == len(self.trimmed):
            return pa.chunked_array([pa.nulls(len(self.trimmed))])
        readers = {"number": self.numbers, "truth": self.truth, "date": self.dates}
        if self.named:
            del readers["date"]  # names stay as written
        first: list[Callable[[Any, Any], Any]] = list(readers.values())
        if kind is not None:
            first = [self.numbers, self.truth] if kind == "number" else [readers.get(kind, self.dates)]
        absent = pc.is_in(self.trimmed, pa.array(sorted(PLACEHOLDERS)))
        attempts = [(self.trimmed, self.plain)]
        if pc.any(absent).as_py():
            nothing = pa.scalar(None, pa.string())
            attempts.append((pc.if_else(absent, nothing, self.trimmed), pc.if_else(absent, nothing, self.plain)))
        for cells, plain in attempts:
            if cells.null_count == len(cells):
                continue
            for read in first:
                values = read(cells, plain)
                if isinstance(values, Codes):
                    return values.numbers if codes_are_numbers or kind == "number" else None
                if values is not None:
                    if cells is not self.trimmed:
                        self._report_placeholders(pc.filter(self.trimmed, absent).unique().to_pylist(), absent)
                    return values
        return None

    def _report_placeholders(self, texts: list[str], absent: Any) -> None:
        """Log which texts count as missing values."""
        import pyarrow.compute as pc

        unusual = sorted(set(texts) - NOT_AVAILABLE)
        if unusual:
            many, rows = pc.sum(absent).as_py(), len(absent)
            LOG.info(
                "%s: in the column %s, %s counts as a missing value, in %d of %d rows; csv.missing sets other texts",
                self.tables[0].path.name, self.name, ", ".join(map(repr, unusual[:SHOWN])), many, rows,
            )  # fmt: skip

    def numbers(self, cells: Any, plain: Any) -> Any | Codes | None:
        """Return numbers, codes, or None if a cell is no number.

        Args:
            cells: Trimmed cells.
            plain: The same with decimal points and without thousands marks.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        first = plain.slice(0, SAMPLE).drop_null().to_pylist()
        if first and not any(is_number(text) for text in first):
            return None
        digits = all(re.fullmatch(r"[+-]?\d+", text) for text in first)  # a failing conversion takes long
        if digits:
            try:
                integers = plain.cast(pa.int64())
            except pa.ArrowInvalid:
                integers = None
            if integers is not None and pc.all(pc.equal(integers.cast(pa.string()), plain)).as_py():
                return self._without_missing(integers)
        try:
            numbers = plain.cast(pa.float64())
        except pa.ArrowInvalid:
            return None
        if self._has_codes(cells, numbers, digits):
            return Codes(numbers)
        return self._without_missing(pc.if_else(pc.is_nan(numbers), pa.scalar(None, pa.float64()), numbers))

    def _has_codes(self, cells: Any, numbers: Any, digits: bool) -> bool:
        """Return whether cells are codes: 007, 12E5 and, if they are names, versions such as 1.10 next to 1.1.

        Args:
            cells: Trimmed cells.
            numbers: Their values as float64.
            digits: Whether the first cells are digits.
        """
        import pyarrow.compute as pc

        def every(pattern: str) -> bool:
            return bool(pc.all(pc.match_substring_regex(cells, pattern)).as_py())

        if (digits and every(CODE)) or every(CODE_WITH_E):
            return True
        if not self.named:
            return False
        if every(f"{CODE}|{CODE_WITH_E}"):
            return True
        whole = every(WHOLE)
        if (whole and pc.max(pc.abs(numbers)).as_py() < 2.0**53) or (self.is_label and not whole):
            return False
        return len(numbers.unique()) < len(cells.unique())

    def _without_missing(self, numbers: Any) -> Any:
        """Replace numbers that ``csv.missing`` lists in another notation, and report numbers that may mean missing."""
        import pyarrow as pa
        import pyarrow.compute as pc

        listed = [float(text) for text in self.missing or () if is_number(text)]
        if listed:
            absent = pc.is_in(numbers.cast(pa.float64()), pa.array(listed, pa.float64()))
            return pc.if_else(absent, pa.scalar(None, numbers.type), numbers)
        extremes = pc.min_max(numbers).as_py()
        for value in {extremes["min"], extremes["max"]}.intersection(SENTINELS):
            others = pc.min_max(pc.filter(numbers, pc.not_equal(numbers, value))).as_py()
            times = pc.sum(pc.equal(numbers, value)).as_py()
            if times > 1 and others["min"] is not None:
                gap = min(abs(value - others["min"]), abs(value - others["max"]))
                if gap > 2 * (others["max"] - others["min"]):
                    LOG.info(
                        "%s: %g in %d of %d rows of the column %s may mean a missing value; if so, set csv.missing to it",
                        self.tables[0].path.name, value, times, len(numbers), self.name,
                    )  # fmt: skip
        return numbers

    def truth(self, cells: Any, _: Any) -> Any | None:
        """Return truth values, or None if a cell is none.

        Args:
            cells: Trimmed cells.
            _: Not used.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        if not set(cells.slice(0, SAMPLE).drop_null().to_pylist()) <= TRUTH.keys():
            return None
        index = pc.index_in(cells, pa.array(list(TRUTH)), skip_nulls=True)
        if index.null_count > cells.null_count:
            return None
        return pc.take(pa.array(list(TRUTH.values())), index)

    def dates(self, cells: Any, _: Any) -> Any | None:
        """Return dates, or None if a cell is none, or the order of day and month is ambiguous.

        Args:
            cells: Trimmed cells.
            _: Not used.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        present = cells.drop_null()
        if not re.match(r"\d{1,4}[./-]", present[0].as_py()) and self.tables[0].dialect.dates is None:
            return None
        given = self.tables[0].dialect.dates
        if given is not None and (parsed := parse_dates(cells, given)) is not None:
            return parsed
        for kind in (pa.date32(), pa.timestamp("s"), pa.timestamp("ns"), pa.timestamp("ns", "UTC")):
            try:
                return cells.cast(kind)
            except pa.ArrowInvalid:
                continue
        formats = [] if given is not None else date_formats(present[0].as_py())
        fitting = [parsed for form in formats if (parsed := parse_dates(cells, form)) is not None]
        if not fitting or any(not pc.all(pc.equal(fitting[0], other)).as_py() for other in fitting[1:]):
            return None
        return fitting[0]

    def check_text(self, is_label: bool) -> None:
        """Validate a column of text, in which options for numbers would have no effect.

        Args:
            is_label: Whether the column contains class labels.

        Raises:
            DataError: If the decimal mark of the user contradicts the cells, or a label may be missing.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        dialect, path = self.tables[0].dialect, self.tables[0].path
        with_point = pc.filter(self.trimmed, pc.match_substring(self.trimmed, "."))
        if (
            dialect.decimal == ","
            and len(with_point)
            and pc.all(pc.match_substring_regex(self.trimmed, POINT_NUMBER)).as_py()
        ):
            raise DataError(
                f"{path}: the decimal mark is a comma, but the column {self.name!r} has points, such as "
                f"{with_point[0].as_py()}. If they separate thousands, set csv.thousands to point; otherwise set csv.decimal "
                "to point, and csv.thousands to comma for numbers such as 5,123."
            )
        if self.missing is not None:
            return
        absent = pc.is_in(self.trimmed, pa.array(sorted(NOT_AVAILABLE)))
        if not pc.any(absent).as_py():
            return
        text, times = pc.filter(self.trimmed, absent)[0].as_py(), pc.sum(absent).as_py()
        if is_label:
            raise DataError(
                f"{path}: the label column {self.name!r} has {text!r} in {times} of {len(absent)} rows. If it means a "
                f"missing label, set csv.missing to {text} and remove these rows; if it is a class, set csv.missing to []."
            )
        LOG.info(
            "%s: %r in %d of %d rows of the column %s is read as text; csv.missing sets texts that mean a missing value",
            path.name, text, times, len(absent), self.name,
        )  # fmt: skip


@dataclass(frozen=True)
class Codes:
    """Digits that would change when written as numbers, such as 007; ``numbers`` are their values as float64."""

    numbers: Any


def kind_of_names(names: Collection[str]) -> Kind:
    """Return how cells must be read so that their names can be compared with known names.

    >>> kind_of_names(["1", "2"]), kind_of_names(["false", "true"]), kind_of_names(["007", "1"])
    ('number', 'truth', 'text')
    """
    if names and all(re.fullmatch(r"-?(0|[1-9]\d*)", name) and abs(int(name)) < 2**63 for name in names):
        return "number"
    return "truth" if names and {name.lower() for name in names} <= {"false", "true"} else "text"


def concatenate_columns(columns: Sequence[Any]) -> Any:
    """Return chunked arrays one after the other."""
    import pyarrow as pa

    return pa.chunked_array([chunk for column in columns for chunk in column.chunks], columns[0].type)


def is_number(text: str) -> bool:
    """Return whether a text with a decimal point is a number; underscores are not allowed."""
    try:
        return text.isascii() and "_" not in text and not math.isnan(float(text))
    except ValueError:
        return False


def with_decimal_points(cells: Any, dialect: CsvSpec) -> Any:
    """Return cells with decimal points and without thousands marks; other cells do not become numbers.

    Args:
        cells: Trimmed cells.
        dialect: Format of the file.
    """
    import pyarrow.compute as pc

    decimal, thousands = dialect.decimal or ".", dialect.thousands
    if thousands is not None:
        mark = {" ": "[ \u00a0\u202f]", "'": "['\u2019]"}.get(thousands, re.escape(thousands))
        grouped = rf"^[+-]?\d{{1,3}}({mark}\d{{3}})+({re.escape(decimal)}\d*)?$"
        without = pc.replace_substring_regex(cells, mark, "")
        cells = pc.if_else(pc.match_substring_regex(cells, grouped), without, cells)
    if decimal == ",":
        cells = pc.replace_substring(pc.replace_substring(cells, ".", "\0"), ",", ".")
    return cells


def date_formats(text: str) -> list[str]:
    """Return the formats of dates that a text may have, other than ISO 8601.

    >>> date_formats("05-02-2010")
    ['%d-%m-%Y', '%m-%d-%Y']
    """
    match = re.match(r"(\d{1,4})([./-])(\d{1,2}|[A-Za-z]{3})\2(\d{1,4})(.*)$", text)
    if match is None:
        return []
    first, mark, middle, last, clock = match.groups()
    month = "%b" if middle.isalpha() else "%m"
    orders = (
        [("%Y", month, "%d")]
        if len(first) == 4
        else [("%d", month, "%Y"), *([] if middle.isalpha() else [("%m", "%d", "%Y")])]
    )
    if len(first) != 4 and len(last) != 4:
        return []
    return [mark.join(order) + time for order in orders for time in (CLOCK[1:] if clock else CLOCK[:1])]


def parse_dates(cells: Any, form: str) -> Any | None:
    """Return dates in a format, or None if a cell has another.

    Args:
        cells: Trimmed cells.
        form: Format as for ``strptime``.
    """
    import pyarrow.compute as pc

    parsed = pc.strptime(cells, form, "s", error_is_null=True)
    if parsed.null_count > cells.null_count:
        return None
    early = (
        pc.filter(cells, pc.less_equal(pc.day(parsed), 3)).unique().to_pylist()
    )  # strptime turns 30 February into 1 March
    return None if any(is_impossible_day(text, form) for text in early if text is not None) else parsed


def is_impossible_day(text: str, form: str) -> bool:
    """Return whether a month has no such day.

    >>> is_impossible_day("30.02.2020", "%d.%m.%Y"), is_impossible_day("29.02.2020", "%d.%m.%Y")
    (True, False)
    """
    try:
        datetime.datetime.strptime(text, form)
    except ValueError as error:
        return "day" in str(error) and "range" in str(error)
    return False


def why_text(column: Any) -> str | None:
    """Return why a column of strings does not contain numbers or dates, although most of its values look like them.

    Args:
        column: Values of the column.

    Returns:
        The reason with its remedy; None if the column contains text.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    texts = pc.utf8_trim_whitespace(column.cast(pa.string())).drop_null()

    def every(pattern: str, values: Any = texts) -> bool:
        return bool(pc.all(pc.match_substring_regex(values, pattern)).as_py())

    if not len(texts):
        return None
    with_comma = pc.filter(texts, pc.match_substring(texts, ","))
    if every(CODE) or every(CODE_WITH_E):
        return "codes: digits with leading zeros, with an E, or too many; see categories, and features for numbers"
    if len(with_comma) and every(f"{COMMA_NUMBER}|{THOUSANDS}"):
        if every(THOUSANDS, with_comma):
            return f"numbers with thousands marks such as {with_comma[0].as_py()}, see csv.thousands"
        if pc.any(pc.match_substring(with_comma, ".")).as_py():
            return "numbers with decimal commas and points for thousands, see csv.thousands"
        return "numbers with decimal commas, see csv.decimal"
    formats = date_formats(texts[0].as_py())
    if formats and all(date_formats(text) for text in texts.slice(0, 100).to_pylist()):
        return f"dates such as {texts[0].as_py()}, whose format is ambiguous or mixed; see csv.dates"
    numbers = [is_number(text) for text in texts.to_pylist()]
    if 2 * sum(numbers) <= len(numbers):
        return None
    row = next(row for row, text in enumerate(column.to_pylist()) if text is not None and not is_number(text.strip()))
    return f"numbers, but {column[row].as_py()!r} in row {row}; correct it, or see csv.missing"
