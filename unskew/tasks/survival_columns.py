"""Columns of survival times: values that mean an event, and names by which such columns are recognized."""

from __future__ import annotations

import re
from collections.abc import Collection

TIMES = r"time|days|months|years|duration|follow.?up|os|pfs|dfs|rfs"
EVENTS = r"event|status|dead|death|died|vital|relapse|recur|censor"
FEWEST_TIMES = 20
"""A column of times has more than this number of distinct values."""
MOST_HORIZONS = 100
"""Largest number of times at which a model reports risks."""

NO_EVENT = (
    r"0|n|no|none|false|alive|living|lived|censor(ed|ing)?|survived|(no|without) (event|death|relapse|recurrence)"
)
"""Values of an event column that mean no event."""


def value_text(value: object) -> str:
    """Return a value of an event column as a text; true is 1, and false is 0.

    >>> [value_text(value) for value in (True, 2.0, "Dead ", "false", "1.0")]
    ['1', '2', 'Dead', '0', '1']
    """
    text = str(value).strip()
    if text.lower() in ("true", "false"):
        return "1" if text.lower() == "true" else "0"
    try:
        return f"{float(text):.15g}"
    except ValueError:
        return text


def is_absence(value: str, event: str) -> bool:
    """Return whether a value of an event column is known to mean no event.

    Args:
        value: The value.
        event: Value that means the event.

    >>> is_absence("1", "2"), is_absence("alive", "Dead"), is_absence("dead", "Dead"), is_absence("no", "No")
    (True, True, False, False)
    """
    codes = {"0": "1", "2": "1"}  # a column of censoring, and the codes of R
    named = [re.fullmatch(NO_EVENT, text, re.I) is not None for text in (value, event)]
    return value == codes.get(event) or named == [True, False]


def is_time_name(name: str) -> bool:
    """Return whether a column is named like a time until an event; short words count only as a whole word.

    >>> [is_time_name(name) for name in ("days", "OS_MONTHS", "followUp", "pfs", "cost", "timezone")]
    [True, True, True, True, False, False]
    """
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
    return re.search(rf"(?<![^\W_])({TIMES})(?![^\W_])", words, re.I) is not None


def is_event_name(name: str) -> bool:
    """Return whether a column is named like an event indicator.

    >>> [is_event_name(name) for name in ("event", "vital_status", "censored", "recurrence", "stage")]
    [True, True, True, True, False]
    """
    return re.search(EVENTS, name, re.I) is not None


def event_value(name: str, values: Collection[str]) -> str | None:
    """Return the value of an event column that means the event, if it is not 1 or true; None if it is or is not known.

    Args:
        name: Name of the column.
        values: Its two values, from ``value_text``.

    >>> event_value("status", ["1", "2"]), event_value("vital", ["Alive", "Dead"]), event_value("pfs", ["free", "failed"])
    ('2', 'Dead', 'failed')
    >>> event_value("censored", ["0", "1"]), event_value("censored", ["no", "yes"]), event_value("censored", ["1", "2"])
    ('0', 'no', None)
    >>> event_value("uncensored", ["no", "yes"]), event_value("not_censored", ["0", "1"])
    ('yes', None)
    """
    known = sorted(values)
    absent = r".*free"
    if re.search(r"(?<!un)(?<!non)(?<!non.)(?<!not)(?<!not.)censor", name, re.I):
        absent = r"1|y|yes|censor\w*" if known != ["1", "2"] else "(?!)"
    elif known == ["1", "2"]:
        return "2"
    others = [value for value in known if not re.fullmatch(absent, value, re.I)]
    if len(others) == 1 < len(known):
        return others[0]
    died = [
        value for value in known if re.match(r"dead|deceased|died|death|yes|event|relapse|recur|progress", value, re.I)
    ]
    return died[0] if len(died) == 1 and others == known else None
