"""Detection of the layout of CSV files: lines before the header, separator, decimal mark, encoding and column names."""

from __future__ import annotations

import codecs
import csv
import io
import logging
import re
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from unskew.data.csv_format import MARKS, CsvSpec
from unskew.data.readers.cell_types import COMMA_NUMBER, POINT_NUMBER, THOUSANDS, thousands_pattern
from unskew.data.readers.missing_values import PLACEHOLDERS
from unskew.errors import DataError, short_repr

LOG = logging.getLogger("unskew")
POINTS_OR_THOUSANDS = r"^\s*[+-]?[1-9]\d{0,2}(\.\d{3})?\s*$"
BLOCK = 1 << 20
"""Bytes read at a time; separator and decimal mark are detected in the first block."""
RECORDS = 500
CONTROL = {*range(32)} - {*b"\t\n\r\f"}
UNDEFINED = {0x81, 0x8D, 0x8F, 0x90, 0x9D}
"""Bytes that are undefined in cp1252."""
LETTER, SIGN = "[A-Za-zÀ-ÖØ-öø-ÿŒœŠšŽž]", "[¡-©¬-¯±-³¶¸-º¼-¿×÷ˆ˜‚ƒ„†‡‰‹›•™]"
NOT_WESTERN = re.compile(
    f"{LETTER}(?![ªº]){SIGN}{LETTER}|^[£¤¥§¬±¶¹²³¼½¾ˆ‚ƒ„†‡]{LETTER}{{3}}|{SIGN}{{2}}|[À-ÖØ-öø-ÿ]{{3}}|[ÐÝÞðýþŸ]"
)
"""Parts of words that hardly occur in Western European languages, but that other encodings read as cp1252 contain."""
NAMES = {"\t": "tab", " ": "space", "|": "pipe"}


class CsvLayout(NamedTuple):
    """Layout of one CSV file.

    Attributes:
        dialect: Options with separator, decimal mark and encoding set.
        skip: Number of lines before the header, or before the first row if the file has no header.
        header: Number of lines of the header; 0 if the file has none.
        names: Names of the columns; unnamed columns have the name ``""``.
    """

    dialect: CsvSpec
    skip: int
    header: int
    names: tuple[str, ...]


def csv_layout(path: Path, requested: CsvSpec) -> CsvLayout:
    """Return the layout of a CSV file, and log it if it is not comma-separated UTF-8 with decimal points.

    Args:
        path: Path of the file.
        requested: Format options of the user; fields that are None are detected.

    Raises:
        DataError: If the format is ambiguous, or the first line is not a header.
    """
    encoding = requested.encoding or detect_encoding(path)
    with path.open(encoding="utf-8-sig" if encoding == "utf-8" else encoding, errors="replace", newline="") as file:
        sample = file.read(BLOCK).removeprefix("\ufeff")
        cut = bool(file.read(1))
    named = re.match(r'"?sep=(.)"?\r?\n', sample, re.I)
    lines = list(io.StringIO(sample, newline=""))  # only \n and \r end lines
    skip = requested.skip if requested.skip is not None else 1 if named else 0
    while requested.skip is None and skip < len(lines) and not lines[skip].strip():
        skip += 1
    first = skip
    while requested.skip is None and lines[skip : skip + 2][1:] and lines[skip].startswith("#"):
        skip += 1
    body = "".join(lines[skip:])
    separator = requested.separator or (named[1] if named else detect_separator(path, body, cut))
    if skip > first and is_header(lines[skip - 1], body.split("\n", 1)[0], separator):
        skip -= 1  # the names of the columns begin with #
        body = "".join(lines[skip:])
    records = read_records(body, separator, cut)
    decimal = requested.decimal or detect_decimal_mark(path, records, separator, requested.thousands)
    dialect = replace(requested, separator=separator, decimal=decimal, encoding=encoding)
    shown = CsvSpec(separator, decimal, encoding)
    if shown not in (CsvSpec(",", ".", "utf-8"), CsvSpec(requested.separator, requested.decimal, requested.encoding)):
        mark = {",": "comma", ".": "point"}[decimal]
        LOG.info("%s: read as %s-separated, decimal %s, %s", path.name, NAMES.get(separator, separator), mark, encoding)
    if skip > first and requested.skip is None:
        LOG.info("%s: skipped %d lines before the header, the first: %s", path.name, skip, lines[first].strip()[:60])
    if requested.names:
        repeats = bool(records) and [cell.strip() for cell in records[0]] == list(requested.names)
        return CsvLayout(dialect, skip, int(repeats), requested.names)
    reader = csv.reader(lines[skip:], delimiter=separator)
    next(reader, None)
    return CsvLayout(dialect, skip, reader.line_num, column_names(path, records, skip, lines, separator))


def is_header(line: str, row: str, separator: str) -> bool:
    """Return whether a line has as many fields as the row below it, which contains numbers.

    Args:
        line: Line that may be the header.
        row: Line below it.
        separator: Character between fields.
    """
    names, cells = line.strip().split(separator), row.strip().split(separator)
    return 1 < len(names) == len(cells) and any(re.match(POINT_NUMBER, cell) for cell in cells)


def column_names(path: Path, records: list[list[str]], skip: int, lines: list[str], separator: str) -> tuple[str, ...]:
    """Return the names in the header, completed if each row has one field more.

    Args:
        path: Path of the file, for errors.
        records: First records of the file, the header first.
        skip: Number of lines before the header.
        lines: First lines of the file.
        separator: Character between fields.

    Raises:
        DataError: If the first record is not a header.
    """
    if not records:
        return ()
    header, *rows = records
    most = Counter(map(len, rows)).most_common(1)[0][0] if rows else len(header)
    if len(header) + 1 == most and len(header) > 1 and all(len(row) == most for row in rows):
        at_end = not any(row[-1].strip() for row in rows)  # otherwise R's names of rows
        return (*header, "") if at_end else ("", *header)
    filled = Counter(max((k for k, cell in enumerate(row, 1) if cell.strip()), default=0) for row in rows)
    most = filled.most_common(1)[0][0] if rows else len(header)
    if len(header) < most:
        start = next(
            number for number, line in enumerate(lines) if len(next(csv.reader([line], delimiter=separator))) >= most
        )
        raise DataError(
            f"Line {skip + 1} of {path} does not look like a header: it has {len(header)} values "
            f"({short_repr(','.join(header))}), but most lines have {most}. If the header is in line {start + 1}, set "
            f"csv.skip to {start} (--set csv.skip={start})."
        )
    numbers = [name for name in header if re.match(POINT_NUMBER, name) or re.match(COMMA_NUMBER, name)]
    repeated = [
        name
        for name, *values in zip(*(row for row in records if len(row) == len(header)), strict=False)
        if name.strip() and name not in numbers and name in values
    ]
    if numbers and (repeated or len({*numbers}) < len(numbers)):
        raise DataError(
            f"Line {skip + 1} of {path} does not look like a header, but like data: {short_repr(','.join(header))}. Add a "
            "line with the names of the columns, or list the names in csv.names."
        )
    return tuple(header)


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
    strange: str | None = None
    with path.open("rb") as file:
        for block in iter(lambda: file.read(BLOCK), b""):
            if not used and block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                return "utf-32" if block.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)) else "utf-16"
            if not used and (match := re.match(rb"([^\0]\0){4}|(\0[^\0]){4}", block)):
                return "utf-16-le" if match[1] else "utf-16-be"
            used.update(block)
            if unicode:
                try:
                    strict.decode(block)
                except UnicodeDecodeError:
                    unicode = False
            text = lenient.decode(block)
            damaged += text.count("\ufffd")
            valid += len(text) - len(text.encode("ascii", "ignore"))
            if not unicode and strange is None:
                strange = not_western_word(block)
    if unicode:
        return "utf-8"
    remedy = f"Set csv.encoding (--set csv.encoding=...), or save {path.name} as UTF-8."
    if used & CONTROL or used & UNDEFINED or valid > 2 * damaged:
        what = "contains bytes that are not UTF-8" if valid > 2 * damaged else "is neither UTF-8 nor latin-1 text"
        raise DataError(f"{path} {what}. {remedy}")
    if strange is not None:
        raise DataError(
            f"The encoding of {path} is not UTF-8 and cannot be detected: as Western European text, it contains words such "
            f"as {strange!r}. {remedy} Usual encodings are cp1250 (Central Europe), cp1251 (Cyrillic), cp1254 (Turkey), "
            "gb18030 (China), cp932 (Japan) and cp949 (Korea)."
        )
    return "cp1252" if used & {*range(0x80, 0xA0)} else "latin-1"


def not_western_word(block: bytes) -> str | None:
    """Return the first word that is implausible in Western European languages, or None.

    Args:
        block: Bytes of a text that is not UTF-8.
    """
    for match in re.finditer(rb"[A-Za-z\x80-\xff]*[\x80-\xff][A-Za-z\x80-\xff]*", block):
        word = match[0].decode("cp1252", "replace")
        if NOT_WESTERN.search(word):
            return word[:20]
    return None


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
    """Return the separator that gives every record the same number of fields, or else the most records.

    Args:
        path: Path of the file, for errors.
        sample: Start of the file.
        cut: Whether the file continues after the sample.

    Raises:
        DataError: If several separators give every record the same number of fields.
    """
    lengths = {mark: Counter(map(len, read_records(sample, mark, cut))) for mark in ",;\t|"}
    regular = [mark for mark, sizes in lengths.items() if len(sizes) == 1 and 1 not in sizes]
    if len(regular) > 1:
        names = " and ".join(NAMES.get(mark, mark) for mark in regular)
        raise DataError(
            f"{path} can be read with several separators: {names}. Set csv.separator to one of {', '.join(MARKS)} "
            "(--set csv.separator=semicolon)."
        )
    header = sample.split("\n", 1)[0]

    def fit(mark: str) -> tuple[int, int]:
        return max((times for size, times in lengths[mark].items() if size > 1), default=0), header.count(mark)

    return regular[0] if regular else max(",;\t|", key=fit)


def detect_decimal_mark(path: Path, rows: list[list[str]], separator: str, thousands: str | None) -> str:
    """Return the decimal mark of the numbers in a file; if the separator is a comma, it is the point.

    Args:
        path: Path of the file, for errors.
        rows: First records of the file.
        separator: Character between fields.
        thousands: Thousands mark that is configured, or None.

    Raises:
        DataError: If columns disagree, or commas may separate thousands.
    """
    if thousands == "," or separator == "," or not rows:
        return "."
    with_comma, with_point, numbers, doubtful = [], [], [], []
    for name, *values in zip(*rows, strict=False):
        present = [value for value in values if value.strip() and value.strip() not in PLACEHOLDERS]
        if thousands is not None:
            present = [without_thousands(value.strip(), thousands) for value in present]
        if any("," in value for value in present) and all(re.match(COMMA_NUMBER, value) for value in present):
            with_comma.append(name)
            numbers += [value for value in present if "," in value]
        elif any("." in value for value in present) and all(re.match(POINT_NUMBER, value) for value in present):
            with_point.append(name)
            if thousands is None and all(re.match(POINTS_OR_THOUSANDS, value) for value in present):
                doubtful.append(next(value for value in present if "." in value))
    remedy = "Set csv.decimal to comma or point (--set csv.decimal=comma)."
    if with_comma and with_point:
        raise DataError(f"{path} has decimal commas in {with_comma[0]!r}, but points in {with_point[0]!r}. {remedy}")
    if with_comma and thousands is None and all(re.match(THOUSANDS, value) for value in numbers):
        raise DataError(
            f"{path} has numbers such as {numbers[0]} in {with_comma[0]!r}, whose comma may be a decimal or a "
            f"thousands mark. {remedy} For a thousands mark, also set csv.thousands to comma."
        )
    if doubtful and len(doubtful) == len(with_point):
        LOG.info(
            "%s: %s in the column %s is read with a decimal point; if points separate thousands, set csv.thousands to point",
            path.name, doubtful[0].strip(), with_point[0],
        )  # fmt: skip
    return "," if with_comma else "."


def without_thousands(text: str, mark: str) -> str:
    """Return a number without its thousands marks; other texts are returned unchanged.

    Args:
        text: Trimmed cell.
        mark: Thousands mark.

    >>> without_thousands("1 234,5", " "), without_thousands("New York 123", " ")
    ('1234,5', 'New York 123')
    """
    pattern = thousands_pattern(mark)
    return re.sub(pattern, "", text) if re.match(rf"[+-]?\d{{1,3}}({pattern}\d{{3}})+([.,]\d*)?$", text) else text
