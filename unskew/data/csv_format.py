"""Format of CSV files, as it is configured."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import pydantic
from pydantic import Field

from unskew.config_fields import Section, as_value_error
from unskew.errors import ConfigError, short_repr, unknown_name
from unskew.expressions import parse_names

THOUSANDS_MARKS = {"comma": ",", "point": ".", "space": " ", "apostrophe": "'"}
"""Names of thousands marks."""
MARKS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|", "space": " "}
"""Names of separators, for use where the character is hard to write."""


@dataclass(frozen=True)
class CsvSpec:
    """Format of CSV files; fields that are None are detected for each file.

    Attributes:
        separator: Character between columns, or its name: comma, semicolon, tab, pipe or space.
        decimal: Decimal mark: point or comma.
        encoding: Character encoding, such as ``latin-1``.
        thousands: Thousands mark: point, comma, space or apostrophe. If it is None, numbers have no thousands marks.
        missing: Texts that mean a missing value, such as ``-999``, in addition to an empty cell. Among numbers and dates,
            ``NA``, ``?`` and other usual placeholders are missing values, too; among text, they are text. Also used for
            ``.parquet`` and ``.jsonl`` files.
        dates: Format of dates for ``strptime``, such as ``%d.%m.%Y``, in addition to ISO 8601. If it is None, formats
            whose order of day and month is unambiguous are detected. Also used for dates in text columns of ``.parquet``
            and ``.jsonl`` files.
        skip: Number of lines before the header. If it is None, ``sep=``, empty lines and lines that start with ``#`` are
            skipped.
        names: Names of the columns of files without a header.

    Raises:
        ConfigError: If a value is not valid.
    """

    separator: str | None = None
    decimal: str | None = None
    encoding: str | None = None
    thousands: str | None = None
    missing: tuple[str, ...] | None = None
    dates: str | None = None
    skip: int | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("separator", "decimal", "encoding", "thousands", "dates"):
            if not isinstance(value := getattr(self, name), str | None):
                raise ConfigError(f"csv.{name} must be a string, not {short_repr(value)}.")
        missing: Any = self.missing
        if missing is not None:  # numbers in YAML are texts of the file
            listed = list(missing) if isinstance(missing, list | tuple) else [missing]
            odd = [text for text in listed if isinstance(text, bool) or not isinstance(text, str | int | float)]
            if odd:
                raise ConfigError(
                    f"csv.missing must be a list of texts, not {short_repr(odd[0])}. Write texts in quotes."
                )
            object.__setattr__(self, "missing", tuple(str(text).strip() for text in listed))
        if self.names:
            object.__setattr__(self, "names", parse_names(self.names))
        if isinstance(self.skip, bool) or not isinstance(self.skip, int | None) or (self.skip or 0) < 0:
            raise ConfigError(f"csv.skip must be a number of lines, at least 0, not {short_repr(self.skip)}.")
        if self.dates is not None and "%" not in self.dates:
            raise ConfigError(f"csv.dates must be a format such as '%d.%m.%Y', not {self.dates!r}.")
        separator = MARKS.get(self.separator or "", self.separator)
        decimal = {"comma": ",", "point": "."}.get(self.decimal or "", self.decimal)
        if separator is not None and (len(separator) != 1 or not separator.isascii() or separator in '\r\n"\0'):
            raise ConfigError(f"csv.separator must be one character, or one of {', '.join(MARKS)}, not {separator!r}.")
        if decimal not in (None, ".", ","):
            raise ConfigError(f"csv.decimal must be point or comma, not {decimal!r}.")
        try:
            encoding = None if self.encoding is None else codecs.lookup(self.encoding)
            if encoding is not None and not encoding._is_text_encoding:
                raise ConfigError(f"csv.encoding={self.encoding!r} is not a text encoding.")
        except (LookupError, ValueError):
            raise ConfigError(f"csv.encoding={self.encoding!r} is not an encoding known to Python.") from None
        thousands = THOUSANDS_MARKS.get(self.thousands or "", self.thousands)
        if thousands not in (None, *THOUSANDS_MARKS.values()):
            raise ConfigError(f"csv.thousands must be one of {', '.join(THOUSANDS_MARKS)}, not {self.thousands!r}.")
        if thousands is not None and thousands == (decimal or (None if thousands == "." else ".")):
            raise ConfigError(
                f"csv.thousands and csv.decimal are both {thousands!r}. Set csv.decimal to the other mark."
            )
        if encoding is not None and encoding.name == "utf-8":
            object.__setattr__(self, "encoding", "utf-8")
        object.__setattr__(self, "separator", separator)
        object.__setattr__(self, "decimal", "," if thousands == "." else decimal)
        object.__setattr__(self, "thousands", thousands)


DETECTED = CsvSpec()


def csv_spec(values: Mapping[str, Any]) -> CsvSpec:
    """Return the CSV format that a mapping describes.

    Args:
        values: Fields of ``CsvSpec`` by name.

    Raises:
        ConfigError: If the mapping has an unknown key, or a value is not valid.
    """
    for name in values:
        if name not in CsvConfig.model_fields:
            raise ConfigError(unknown_name("option", str(name), CsvConfig.model_fields, "csv"))
    return CsvSpec(**values)


class CsvConfig(Section):
    """Format of CSV files; fields that are not set are detected for each file."""

    separator: str | None = None
    """Character between columns, or its name: ``comma``, ``semicolon``, ``tab``, ``pipe`` or ``space``; detected if None."""
    decimal: str | None = None
    """Decimal mark: ``point`` or ``comma``; detected if None."""
    encoding: str | None = None
    """Character encoding, such as ``latin-1``; detected if None."""
    thousands: str | None = None
    """Thousands mark: ``comma``, ``point``, ``space`` or ``apostrophe``; None means that there is none."""
    missing: str | int | float | tuple[str | int | float, ...] | None = None
    """Texts that mean a missing value, such as ``-999``, in addition to empty cells, and ``NA`` or ``?`` among numbers; also
    in ``.parquet`` and ``.jsonl`` files."""
    dates: str | None = None
    """Format of dates, such as ``%d.%m.%Y``, in addition to ISO 8601; unambiguous formats are detected; also for text in
    ``.parquet`` and ``.jsonl`` files."""
    skip: Annotated[int, Field(ge=0)] | None = None
    """Number of lines before the header; if None, ``sep=;``, empty lines and lines with ``#`` are skipped."""
    names: str | tuple[str, ...] = ()
    """Names of the columns of files without a header."""

    @property
    def spec(self) -> CsvSpec:
        """Format as a ``CsvSpec`` for the readers."""
        return CsvSpec(**dict(self))

    @pydantic.model_validator(mode="after")
    def _is_valid(self) -> CsvConfig:
        with as_value_error():
            self.spec  # noqa: B018
        return self
