"""Detection of the separator, decimal mark and encoding of CSV files."""

from __future__ import annotations

import codecs
import csv
import io
import logging
import re
from itertools import islice
from pathlib import Path

from unskew.data.readers.column_roles import COMMA_NUMBER
from unskew.data.spec import MARKS, CsvSpec
from unskew.errors import DataError

LOG = logging.getLogger("unskew")
BLOCK = 1 << 20
"""Bytes read at a time; separator and decimal mark are detected in the first block."""
RECORDS = 500
CONTROL = {*range(32)} - {*b"\t\n\r\f"}
UNDEFINED = {0x81, 0x8D, 0x8F, 0x90, 0x9D}
"""Bytes that are undefined in cp1252."""
POINT_NUMBER = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"
THOUSANDS = r"^\s*[+-]?[1-9]\d{0,2}(,\d{3})+\s*$"
NAMES = {"\t": "tab", " ": "space", "|": "pipe"}


def csv_format(path: Path, requested: CsvSpec) -> CsvSpec:
    """Return the format of a CSV file, and log it if it is not comma-separated UTF-8 with decimal points.

    Args:
        path: Path of the file.
        requested: Format options of the user; fields that are None are detected.

    Raises:
        DataError: If the format is ambiguous.
    """
    encoding = requested.encoding or detect_encoding(path)
    with path.open(encoding="utf-8-sig" if encoding == "utf-8" else encoding, errors="replace", newline="") as file:
        sample = file.read(BLOCK)
        cut = bool(file.read(1))
    separator = requested.separator or detect_separator(path, sample, cut)
    decimal = requested.decimal or detect_decimal_mark(path, read_records(sample, separator, cut), separator)
    dialect = CsvSpec(separator, decimal, encoding)
    if dialect not in (CsvSpec(",", ".", "utf-8"), requested):
        mark = {",": "comma", ".": "point"}[decimal]
        LOG.info("%s: read as %s-separated, decimal %s, %s", path.name, NAMES.get(separator, separator), mark, encoding)
    return dialect


def detect_encoding(path: Path) -> str:
    """Return the first encoding of ``utf-8``, ``utf-16``, ``latin-1`` and ``cp1252`` that fits all bytes of a file.

    Args:
        path: CSV file.

    Raises:
        DataError: If the bytes are not text, or have another encoding.
    """
    strict, lenient = (codecs.getincrementaldecoder("utf-8")(errors) for errors in ("strict", "replace"))
    used: set[int] = set()
    valid, damaged, unicode = 0, 0, True
    with path.open("rb") as file:
        for block in iter(lambda: file.read(BLOCK), b""):
            if not used and block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                return "utf-16"
            used.update(block)
            if unicode:
                try:
                    strict.decode(block)
                except UnicodeDecodeError:
                    unicode = False
            text = lenient.decode(block)
            damaged += text.count("\ufffd")
            valid += len(text) - len(text.encode("ascii", "ignore"))
    if unicode:
        return "utf-8"
    remedy = f"Set csv.encoding (--set csv.encoding=...), or save {path.name} as UTF-8."
    if used & CONTROL or used & UNDEFINED or valid > 2 * damaged:
        what = "contains bytes that are not UTF-8" if valid > 2 * damaged else "is neither UTF-8 nor latin-1 text"
        raise DataError(f"{path} {what}. {remedy}")
    return "cp1252" if used & {*range(0x80, 0xA0)} else "latin-1"


def read_records(sample: str, separator: str, cut: bool) -> list[list[str]]:
    """Return the first records of a sample; an empty list if it cannot be read with this separator.

    Args:
        sample: Start of the file.
        separator: Character between fields.
        cut: Whether the file continues after the sample.
    """
    reader = csv.reader(io.StringIO(sample, newline=""), delimiter=separator)
    try:
        records = [record for record in islice(reader, RECORDS) if record]
    except csv.Error:
        return []
    return records[:-1] if cut and len(records) < RECORDS else records


def detect_separator(path: Path, sample: str, cut: bool) -> str:
    """Return the separator that gives every record the same number of fields, or else the most frequent in the header.

    Args:
        path: Path of the file, for errors.
        sample: Start of the file.
        cut: Whether the file continues after the sample.

    Raises:
        DataError: If several separators give every record the same number of fields.
    """
    lengths = {mark: {len(record) for record in read_records(sample, mark, cut)} for mark in ",;\t|"}
    regular = [mark for mark, sizes in lengths.items() if len(sizes) == 1 and sizes != {1}]
    if len(regular) > 1:
        names = " and ".join(NAMES.get(mark, mark) for mark in regular)
        raise DataError(
            f"{path} can be read with several separators: {names}. Set csv.separator to one of {', '.join(MARKS)} "
            "(--set csv.separator=semicolon)."
        )
    header = sample.split("\n", 1)[0]
    return regular[0] if regular else max(",;\t|", key=header.count)


def detect_decimal_mark(path: Path, rows: list[list[str]], separator: str) -> str:
    """Return the decimal mark of the numbers in a file; if the separator is a comma, it is the point.

    Args:
        path: Path of the file, for errors.
        rows: First records of the file.
        separator: Character between fields.

    Raises:
        DataError: If columns disagree, or commas may separate thousands.
    """
    if separator == "," or not rows:
        return "."
    from pyarrow.csv import ConvertOptions

    missing = {"", *ConvertOptions().null_values}
    with_comma, with_point, numbers = [], [], []
    for name, *values in zip(*rows, strict=False):
        present = [value for value in values if value.strip() not in missing]
        if any("," in value for value in present) and all(re.match(COMMA_NUMBER, value) for value in present):
            with_comma.append(name)
            numbers += [value for value in present if "," in value]
        elif any("." in value for value in present) and all(re.match(POINT_NUMBER, value) for value in present):
            with_point.append(name)
    remedy = "Set csv.decimal to comma or point (--set csv.decimal=comma)."
    if with_comma and with_point:
        raise DataError(f"{path} has decimal commas in {with_comma[0]!r}, but points in {with_point[0]!r}. {remedy}")
    if with_comma and all(re.match(THOUSANDS, value) for value in numbers):
        raise DataError(
            f"{path} has numbers such as {numbers[0]} in {with_comma[0]!r}, whose comma may be a decimal or a "
            f"thousands mark. {remedy}"
        )
    return "," if with_comma else "."
