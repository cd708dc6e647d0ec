"""Reading of table files as pyarrow tables."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from unskew.data.readers.csv_dialect import csv_format
from unskew.data.spec import DETECTED, CsvSpec
from unskew.errors import DataError
from unskew.filesystem import check_regular


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
        from pyarrow import csv, parquet
        from pyarrow import json as lines
    except ImportError as error:
        raise DataError("Reading tables requires the package pyarrow: pip install 'unskew[hub]'.") from error
    kind = path.suffix.lower()
    try:
        check_regular(path)
        if kind == ".parquet":
            table = parquet.read_table(path)
        else:
            # One block, so that a column's type is inferred from all rows; empty and NA cells are missing values.
            block = min(max(path.stat().st_size + 1, 2**20), 2**30)
            if kind == ".jsonl":
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
