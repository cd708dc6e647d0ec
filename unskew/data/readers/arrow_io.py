"""Reading of table files as pyarrow tables."""

from __future__ import annotations

import csv as csv_module
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from unskew.data.csv_format import DETECTED, CsvSpec
from unskew.data.readers.arrow import arrow_csv, arrow_json, pa, parquet, pc
from unskew.data.readers.cell_types import NO_USES, ColumnUses, TextTable, type_columns
from unskew.data.readers.column_roles import is_string
from unskew.data.readers.csv_dialect import CsvLayout, csv_layout
from unskew.data.readers.missing_values import without_missing
from unskew.data.readers.names import clean_name
from unskew.errors import DataError
from unskew.filesystem import check_regular
from unskew.progress import report_progress

MOST_BYTES, MOST_EXPANSION, MOST_DEPTH = 2 << 30, 100, 64
"""Data may need this many bytes of memory, or this many times the size of their file; nesting depth of a JSON line."""
STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
VIEWS = {"string_view": pa.string(), "binary_view": pa.binary()}
"""Types with which columns of view types are read, because not all functions of pyarrow take views."""
BATCH = 1 << 14
"""Number of rows of a parquet file that are decoded at once."""


def check_expansion(who: str, size: int, stored: int) -> None:
    """Validate that data do not need far more memory than their file, before they are decoded.

    Args:
        who: Name of the data, for the error.
        size: Number of bytes in memory.
        stored: Number of bytes of the file.

    Raises:
        DataError: If they need more than 2 GiB and more than 100 times the size of the file.
    """
    if size > max(MOST_BYTES, MOST_EXPANSION * stored):
        raise DataError(
            f"{who} would need {size / 1e9:.1f} GB of memory or more, from {stored / 1e6:.1f} MB of files: files that "
            f"expand more than {MOST_EXPANSION} times are read up to {MOST_BYTES >> 30} GiB only. If the data are right, "
            "store them with less compression, or use a part of them."
        )


def check_nesting(path: Path) -> None:
    """Validate that JSON lines are not nested so deeply that the parser would overflow its stack.

    Args:
        path: File of JSON lines.

    Raises:
        DataError: If a line is nested too deeply.
    """
    depth = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not depth and line.count(b"{") + line.count(b"[") == 1 and line.rstrip().endswith(b"}"):
                continue  # an object without lists and objects, as most lines are
            for bracket in re.findall(rb"[][{}]", STRINGS.sub(b"", line)):
                depth += 1 if bracket in b"[{" else -1
                if depth > MOST_DEPTH:
                    raise DataError(
                        f"Line {number} of {path} is nested more than {MOST_DEPTH} levels deep. Remove the line, or the "
                        "nested values: a table has one value per column."
                    )


def read_parquet(path: Path) -> Any:
    """Read a parquet file in batches, so that data larger than expected are noticed before they fill the memory.

    Columns of dictionaries, as pandas writes categories, get the type of their values.
    """
    file, stored = parquet.ParquetFile(path), path.stat().st_size
    shape = file.metadata.num_rows, file.metadata.num_columns
    check_expansion(f"{path} ({shape[0]:,} rows and {shape[1]:,} columns)", 8 * shape[0] * shape[1], stored)
    batches, size = [], 0
    for batch in map(without_dictionaries, file.iter_batches(BATCH)):
        size += batch.nbytes
        check_expansion(str(path), size, stored)
        batches.append(batch)
    schema = without_dictionaries(file.schema_arrow.empty_table()).schema
    table = pa.Table.from_batches(batches, schema)
    for position, field in enumerate(table.schema):
        if pa.types.is_binary(field.type) and (text := decoded(table.column(position))) is not None:
            table = table.set_column(position, field.name, text)
    return table


def without_dictionaries(rows: Any) -> Any:
    """Return a batch or a table of pyarrow in which columns of dictionaries have the type of their values."""
    for position, field in enumerate(rows.schema):
        if pa.types.is_dictionary(field.type):
            rows = rows.set_column(position, field.name, rows.column(position).cast(field.type.value_type))
    return rows


def decoded(column: Any) -> Any | None:
    """Return a binary column as strings if its values are UTF-8 text, as Hive and Impala write them; otherwise None."""
    first = column.slice(0, 100).drop_null()[:1]
    try:  # images differ from text in their first bytes
        first.cast(pa.string())
        return column.cast(pa.string()) if len(first) else None
    except pa.ArrowInvalid:
        return None


def read_tables(
    files: Sequence[Path], csv: CsvSpec = DETECTED, uses: ColumnUses = NO_USES, training: int | None = None
) -> list[Any]:
    """Read files; the type of a column of CSV files, or of a text column of dates, is decided over all of them together.

    Args:
        files: CSV, parquet or JSON lines files.
        csv: Format of CSV files; its ``missing`` and ``dates`` also apply to other files.
        uses: Uses of the columns.
        training: Number of training files, which come first; None means all.

    Returns:
        A pyarrow table for each file.

    Raises:
        DataError: If a file cannot be read.
    """
    tables = []
    for number, file in enumerate(files):
        report_progress("files read", number, len(files))
        tables.append(read_cells(file, csv) if file.suffix.lower() == ".csv" else read_typed(file, csv.missing))
    texts = [
        table if isinstance(table, TextTable) else date_cells(file, table, csv, uses)
        for file, table in zip(files, tables, strict=True)
    ]
    return [
        typed if isinstance(table, TextTable) else with_columns(table, typed)
        for table, typed in zip(tables, type_columns(texts, uses, training), strict=True)
    ]


def date_cells(path: Path, table: Any, csv: CsvSpec, uses: ColumnUses) -> TextTable:
    """Return the text columns of a parquet or JSON lines file that are read as dates, as cells of a CSV file.

    Args:
        path: Path of the file.
        table: Table of the file.
        csv: Format of CSV files.
        uses: Uses of the columns.
    """
    texts = {name: table.column(name) for name in table.column_names if name in uses.date_columns}
    cells = {name: column.cast(pa.string()) for name, column in texts.items() if is_string(column.type)}
    return TextTable(path, pa.table(cells), CsvSpec(missing=csv.missing, dates=csv.dates))


def with_columns(table: Any, columns: Any) -> Any:
    """Return a table in which the columns of another one replace those of the same name; metadata are joined.

    Args:
        table: Table of a file.
        columns: Table with some of its columns.
    """
    for name in columns.column_names:
        table = table.set_column(table.column_names.index(name), name, columns.column(name))
    metadata = {**(table.schema.metadata or {}), **(columns.schema.metadata or {})}
    return table.replace_schema_metadata(metadata or None)


def read_cells(path: Path, csv: CsvSpec = DETECTED) -> TextTable:
    """Read the cells of a CSV file as text, without empty rows and without empty columns that have no name.

    Args:
        path: Path of the file.
        csv: Format of the file.

    Raises:
        DataError: If the file cannot be read.
    """
    with readable(path):
        layout = csv_layout(path, csv)
        dialect, count = layout.dialect, len(layout.names)
        # One block, because pyarrow rejects a row that is longer than a block.
        block = min(max(path.stat().st_size + 1, 2**20), 2**30)
        size = block if dialect.encoding == "utf-8" else min(3 * block, 2**30)  # longer when converted to UTF-8
        positions = [str(number) for number in range(count)]
        if not count:
            raise DataError(f"{path} cannot be read as a table: it is empty.")
        try:
            above, strings = layout.skip + layout.header, dict.fromkeys(positions, pa.string())
            read = arrow_csv.ReadOptions(
                block_size=size, encoding=dialect.encoding, column_names=positions, skip_rows=above
            )
            parse = arrow_csv.ParseOptions(delimiter=dialect.separator)
            convert = arrow_csv.ConvertOptions(column_types=strings, strings_can_be_null=False)
            cells = arrow_csv.read_csv(path, read_options=read, parse_options=parse, convert_options=convert)
        except pa.ArrowInvalid as error:
            if "columns, got" not in str(error):
                raise
            cells = read_ragged(path, layout)
    names = checked_names(path, [name if name.strip() else None for name in layout.names], cells)
    cells = cells.select([positions[k] for k in names]).rename_columns(list(names.values()))
    empty = pa.repeat(True, cells.num_rows)
    for column in cells.columns:
        empty = pc.and_(empty, pc.equal(pc.utf8_trim_whitespace(column), ""))
        if not pc.any(empty).as_py():
            return TextTable(path, cells, dialect)
    return TextTable(path, cells.filter(pc.invert(empty)), dialect)


def checked_names(path: Path, names: Sequence[str | None], cells: Any) -> dict[int, str]:
    """Return the names of the columns by their positions; columns without a name and without values have none.

    Args:
        path: Path of the file, for errors.
        names: Names in the header; None for an unnamed column.
        cells: Columns of the file.

    Raises:
        DataError: If two columns have the same name.
    """
    stored: dict[int, str] = {}
    seen: set[str] = set()
    for position, name in enumerate(names):
        if name is None and not pc.any(pc.not_equal(pc.utf8_trim_whitespace(cells.column(position)), "")).as_py():
            continue
        clean = "" if name is None else clean_name(name)
        if clean in seen:
            remedy = "Rename them" if clean else "Name them"
            raise DataError(
                f"{path} has more than one column named {clean!r}. {remedy}; if the first line is not a header, list the "
                "names in csv.names."
            )
        stored[position] = clean
        seen.add(clean)
    return stored


def read_ragged(path: Path, layout: CsvLayout) -> Any:
    """Read a CSV file in which some rows end with additional separators.

    Args:
        path: Path of the file.
        layout: Layout of the file.

    Raises:
        DataError: If a row has another number of values than the header.
    """
    encoding, count = str(layout.dialect.encoding), len(layout.names)
    columns: list[list[str]] = [[] for _ in range(count)]
    with path.open(encoding="utf-8-sig" if encoding == "utf-8" else encoding, newline="") as file:
        for _ in range(layout.skip + layout.header):
            file.readline()
        reader = csv_module.reader(file, delimiter=str(layout.dialect.separator))
        before, last = layout.skip + layout.header, 0
        for row in reader:
            first, last = last + 1, reader.line_num
            if not any(cell.strip() for cell in row):
                continue
            if len(row) < count or any(cell.strip() for cell in row[count:]):
                quote = f" A quotation mark in it is not closed before line {before + last}." if last > first else ""
                raise DataError(
                    f"Line {before + first} of {path} has {len(row)} values, but the header has {count}: "
                    f"{str(layout.dialect.separator).join(row)[:80]!r}.{quote} Correct this line, or set csv.separator, or "
                    "csv.skip if lines before the header do not belong to the table."
                )
            for column, cell in zip(columns, row, strict=False):
                column.append(cell)
    return pa.table({str(position): pa.array(column, pa.string()) for position, column in enumerate(columns)})


def columns_beyond_64_bits(table: Any) -> list[str]:
    """Return the columns of a table with float64 values that may have been integers of more than 63 bits."""
    floats = [field.name for field in table.schema if pa.types.is_float64(field.type)]
    return [name for name in floats if (pc.max(pc.abs(table.column(name))).as_py() or 0) >= 2.0**63]


def read_typed(path: Path, missing: Sequence[str] | None = None) -> Any:
    """Read a parquet or JSON lines file as a pyarrow table.

    Args:
        path: Path of the file.
        missing: Texts that mean a missing value, also as numbers.

    Raises:
        DataError: If the file cannot be read.
    """
    with readable(path):
        if path.suffix.lower() == ".parquet":
            table = read_parquet(path)
        else:
            check_nesting(path)
            # One block, so that a column's type is inferred from all rows.
            block = min(max(path.stat().st_size + 1, 2**20), 2**30)
            read = arrow_json.ReadOptions(block_size=block)
            table = arrow_json.read_json(path, read_options=read)
            for name in columns_beyond_64_bits(table):
                options = arrow_json.ParseOptions(explicit_schema=pa.schema([(name, pa.decimal128(38, 0))]))
                with suppress(pa.ArrowInvalid):  # numbers with a fraction stay float64
                    exact = arrow_json.read_json(path, read_options=read, parse_options=options).column(name)
                    table = table.set_column(table.column_names.index(name), name, exact)
        table.validate(full=True)  # pyarrow does not check strings while reading
    names = list(checked_names(path, table.column_names, table).values())
    for position, field in enumerate(table.schema):
        column = table.column(position)
        if str(field.type) in VIEWS:
            column = column.cast(VIEWS[str(field.type)])
        table = table.set_column(position, field.name, without_missing(column, names[position], path, missing))
    return table.rename_columns(names).replace_schema_metadata(table.schema.metadata)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Context manager that raises errors of reading a table as ``DataError``."""
    limit = csv_module.field_size_limit(MOST_BYTES)
    try:
        check_regular(path)
        yield
    except (pa.ArrowException, OSError, UnicodeError) as error:
        raise DataError(f"{path} cannot be read as a table: {error}") from error
    finally:
        csv_module.field_size_limit(limit)
