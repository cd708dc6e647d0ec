"""Reading of table files as pyarrow tables."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from unskew.data.readers.csv_dialect import csv_format
from unskew.data.spec import DETECTED, CsvSpec
from unskew.errors import DataError
from unskew.filesystem import check_regular

MOST_BYTES, MOST_EXPANSION, MOST_DEPTH = 2 << 30, 100, 64
"""Data may need this many bytes of memory, or this many times the size of their file; nesting depth of a JSON line."""
STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
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
    """Read a parquet file in batches, so that data larger than expected are noticed before they fill the memory."""
    import pyarrow as pa
    from pyarrow import parquet

    file, stored = parquet.ParquetFile(path), path.stat().st_size
    shape = file.metadata.num_rows, file.metadata.num_columns
    check_expansion(f"{path} ({shape[0]:,} rows and {shape[1]:,} columns)", 8 * shape[0] * shape[1], stored)
    batches, size = [], 0
    for batch in file.iter_batches(BATCH):
        size += batch.nbytes
        check_expansion(str(path), size, stored)
        batches.append(batch)
    return pa.Table.from_batches(batches, file.schema_arrow)


def read_file(path: Path, form: CsvSpec = DETECTED) -> Any:
    """Read a CSV, parquet or JSON lines file as a pyarrow table.

    Args:
        path: Path of the file.
        form: Format of CSV files.

    Raises:
        DataError: If the file cannot be read.
    """
    try:
        import pyarrow as pa
        from pyarrow import csv
        from pyarrow import json as lines
    except ImportError as error:
        raise DataError("Reading tables requires the package pyarrow: pip install 'unskew[hub]'.") from error
    kind = path.suffix.lower()
    try:
        check_regular(path)
        if kind == ".parquet":
            table = read_parquet(path)
        else:
            # One block, so that a column's type is inferred from all rows; empty and NA cells are missing values.
            block = min(max(path.stat().st_size + 1, 2**20), 2**30)
            if kind == ".jsonl":
                check_nesting(path)
                table = lines.read_json(path, read_options=lines.ReadOptions(block_size=block))
            else:
                form = csv_format(path, form)
                size = block if form.encoding == "utf-8" else min(3 * block, 2**30)  # longer when converted to UTF-8
                table = csv.read_csv(
                    path,
                    read_options=csv.ReadOptions(block_size=size, encoding=form.encoding),
                    parse_options=csv.ParseOptions(delimiter=form.separator),
                    convert_options=csv.ConvertOptions(strings_can_be_null=True, decimal_point=form.decimal),
                )
        table.validate(full=kind != ".csv")  # for the other formats, pyarrow does not check strings while reading
        names = table.column_names
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as a table: {error}") from error
    foreign = [field.name for field in table.schema if kind == ".csv" and pa.types.is_binary(field.type)]
    if foreign:
        raise DataError(
            f"{path} is not encoded in {form.encoding}: see the column {foreign[0]!r}. Remove csv.encoding, or set "
            "another encoding."
        )
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
    if twice:
        raise DataError(f"{path} has more than one column named {twice[0]!r}. Rename them.")
    return table
