"""Dates in text: their formats, and the formats that fit all cells of a column."""

from __future__ import annotations

import datetime
import re
from typing import Any

from unskew.data.readers.arrow import cast, pa, pc

CLOCK = ("", " %H:%M:%S", " %H:%M", "T%H:%M:%S", "T%H:%M")


def as_dates(trimmed: Any, form: str | None) -> Any | None:
    """Return trimmed cells as dates, or None if one is none, or the order of day and month is ambiguous.

    Args:
        trimmed: Trimmed cells, not all of which are missing.
        form: Format of the user for ``strptime``, or None.
    """
    example = trimmed.drop_null()[0].as_py()
    if not re.match(r"\d{1,4}[./-]", example) and form is None:
        return None
    if form is not None and (dates := parse_dates(trimmed, form)) is not None:
        return dates
    for kind in (pa.date32(), pa.timestamp("s"), pa.timestamp("ns"), pa.timestamp("ns", "UTC")):
        if (dates := cast(trimmed, kind)) is not None:
            return dates
    formats = [] if form is not None else date_formats(example)
    fitting = [dates for f in formats if (dates := parse_dates(trimmed, f)) is not None]
    return fitting[0] if fitting and all(pc.all(pc.equal(fitting[0], dates)).as_py() for dates in fitting) else None


def date_format(trimmed: Any, form: str | None, values: Any) -> str | None:
    """Return the format of dates that are not ISO 8601; None for other columns.

    Args:
        trimmed: Trimmed cells.
        form: Format of the user for ``strptime``, or None.
        values: The cells with their type, or None.
    """
    if values is None or not pa.types.is_temporal(values.type) or cast(trimmed, pa.timestamp("ns")) is not None:
        return None
    dates = pc.if_else(values.is_valid(), trimmed, None)  # without placeholders, such as ?
    formats = [form] if form else date_formats(dates.drop_null()[0].as_py())
    return next((fitting for fitting in formats if parse_dates(dates, fitting) is not None), None)


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


def parse_dates(trimmed: Any, form: str) -> Any | None:
    """Return trimmed cells as dates in a format, or None if a cell has another.

    Args:
        trimmed: Trimmed cells.
        form: Format as for ``strptime``.
    """
    dates = pc.strptime(trimmed, form, "s", error_is_null=True)
    if dates.null_count > trimmed.null_count:
        return None
    early = pc.filter(trimmed, pc.less_equal(pc.day(dates), 3)).unique()  # strptime turns 30 February into 1 March
    return None if any(is_impossible_day(text, form) for text in early.to_pylist() if text is not None) else dates


def is_impossible_day(text: str, form: str) -> bool:
    """Return whether a month has no such day.

    Args:
        text: Date.
        form: Format as for ``strptime``.

    >>> is_impossible_day("30.02.2020", "%d.%m.%Y"), is_impossible_day("29.02.2020", "%d.%m.%Y")
    (True, False)
    """
    try:
        datetime.datetime.strptime(text, form)
    except ValueError as error:
        return "day" in str(error) and "range" in str(error)
    return False
