"""Tables as they are read from files, before anything is made of their columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unskew.errors import DataError


def read_file(path: Path) -> Any:
    """A CSV, parquet or JSON lines file as a pyarrow table."""
    try:
        import pyarrow as pa
        from pyarrow import csv, parquet
        from pyarrow import json as lines
    except ImportError as error:
        raise DataError("Reading tables needs the package pyarrow: pip install 'unskew[hub]'.") from error
    kind = path.suffix.lower()
    try:
        if kind == ".parquet":
            table = parquet.read_table(path)
        else:
            # One block, so that a column's type is found from all of its rows; empty and NA cells are missing values.
            block = min(max(path.stat().st_size + 1, 2**20), 2**30)
            if kind == ".jsonl":
                table = lines.read_json(path, read_options=lines.ReadOptions(block_size=block))
            else:
                empty = csv.ConvertOptions(strings_can_be_null=True)
                table = csv.read_csv(path, read_options=csv.ReadOptions(block_size=block), convert_options=empty)
        table.validate(full=kind != ".csv")  # the other two are read without a look at their text
        names = table.column_names
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        check_separator(path, kind)
        raise DataError(f"{path} cannot be read as a table: {error}") from error
    if len(names) == 1:
        check_separator(path, kind)
    foreign = [field.name for field in table.schema if kind == ".csv" and pa.types.is_binary(field.type)]
    if foreign:
        raise DataError(
            f"{path} is not written in UTF-8: see the column {foreign[0]!r}. With pandas: pandas.read_csv({str(path)!r}, "
            f"encoding='latin-1').to_csv({str(path.with_name('utf-8.csv'))!r}, index=False)."
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{path} has more than one column named {twice[0]!r}; rename them.")
    return table


def check_separator(path: Path, kind: str) -> None:
    """Refuse a CSV file whose first line is divided by something else than commas.

    Raises:
        DataError: It is.
    """
    if kind != ".csv" or not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline(1 << 16)
    other = max(";\t|", key=first.count)
    if first.count(other) > first.count(","):
        shown = "tabs" if other == "\t" else repr(other)
        raise DataError(
            f"{path} is divided by {shown}, and columns must be divided by commas. With pandas: "
            f"pandas.read_csv({str(path)!r}, sep={other!r}).to_csv({str(path.with_name('with-commas.csv'))!r}, index=False); "
            "where numbers have decimal commas, with decimal=','."
        )
