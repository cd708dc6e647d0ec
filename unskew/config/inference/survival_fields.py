"""Columns of survival times in a table: the time, and whether the event was observed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from unskew.config.inference.inferred_config import InferredConfig
from unskew.data.readers.arrow import pa
from unskew.data.readers.column_roles import is_numeric
from unskew.data.readers.labels import is_time_column
from unskew.expressions import parse_names, quote
from unskew.tasks.survival_columns import event_value, is_event_name, value_text


def two_labels(table: Any, label: str | None) -> tuple[str, str] | None:
    """Return the columns of time and event that the user chose; None if ``label`` is not two columns.

    Args:
        table: Rows of the data, a pyarrow table.
        label: Label columns, or None.
    """
    names = parse_names(label) if label is not None and label not in table.column_names else ()
    return (names[0], names[1]) if len(names) == 2 and {*names} <= {*table.column_names} else None


def survival_labels(table: Any, columns: Sequence[str], distinct: Mapping[str, int]) -> tuple[str, str] | None:
    """Return the columns that are named like time and event; None if there are none.

    Args:
        table: Rows of the data, a pyarrow table.
        columns: Columns without missing values.
        distinct: Number of distinct values of each column.
    """
    event = next((name for name in columns if distinct[name] == 2 and is_event_name(name)), None)
    time = next((name for name in columns if name != event and is_time_column(table.column(name), name)), None)
    return None if event is None or time is None else (time, event)


def set_survival_labels(inferred: InferredConfig, table: Any, time: str, event: str, guessed: bool) -> None:
    """Set task, label columns and the value that means the event, and suggest the last time in a comment.

    Args:
        inferred: Configuration to complete.
        table: Rows of the data.
        time: Column of times.
        event: Column of events.
        guessed: Whether the columns were chosen by their names.
    """
    values = [value_text(value) for value in table.column(event).drop_null().to_pylist()]
    meant = event_value(event, {*values})
    share = sum(value == (meant or "1") for value in values) / max(1, len(values))
    how = ", chosen by their names; --label sets others" if guessed else ""
    means = f"{event}={meant or 'true or 1'} means the event ({share:.0%} of the rows)"
    if meant is None and not {*values} <= {"0", "1"}:
        means = f"{event} tells the event, but not which value means it; set survival.event"
    inferred.seen.append(f"survival: {time} is the time, and {means}{how}")
    inferred.set("task", "survival", "predict the time until an event, with censored rows")
    inferred.set("label", f"{quote(time)},{quote(event)}", "time, then event")
    options: dict[str, Any] = {}
    if meant is not None:
        options["event"] = int(meant) if meant.isdigit() else meant
        inferred.set("survival", options, "value that means the event")
    longest = pa.compute.max(table.column(time)).as_py() if is_numeric(table.column(time).type) else None
    if longest and 0 < longest < math.inf:
        why = "without until, the largest time becomes known to all clients up to 4 %"
        last = "survival" if options else "task"
        inferred.commented[last] = {"survival": {**options, "until": round_up(float(longest))}}, why


def round_up(value: float) -> float:
    """Return a positive number rounded up to two significant digits; an integer if it is at least 10.

    >>> round_up(1022.0), round_up(0.123), round_up(99.5), round_up(1100.0)
    (1100, 0.13, 100, 1100)
    """
    power = math.floor(math.log10(value)) - 1
    digits = math.ceil(Decimal(repr(value)).scaleb(-power))
    return digits * 10**power if power >= 0 else float(Decimal(digits).scaleb(power))
