"""Targets of survival analysis: times, and whether the event was observed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from unskew.errors import DataError, abbreviate
from unskew.tasks.survival_columns import FEWEST_TIMES, is_absence, value_text
from unskew.tasks.survival_metrics import number_text

LABEL_ORDER = "the column of times, then the column of events"
"""Order of the label columns."""
FEWEST_ROWS = 20
"""Number of rows from which times must have more than two values."""
LOG = logging.getLogger("unskew")


def read_times(y: Tensor, who: str) -> Tensor:
    """Return times and events, ``[n, 2]``, as float64.

    Args:
        y: Times, and 1 for an event or 0.
        who: Name of the data, for errors.

    Raises:
        DataError: If shape or values are not valid.
    """
    if y.dim() != 2 or y.shape[1] != 2:
        raise DataError(
            f"The targets of {who} have shape {tuple(y.shape)}. Survival requires [n, 2]: time, and 1 for an event or 0 "
            "if the row is censored."
        )
    y = y.to(torch.float64)
    time, event = y.unbind(1)
    swapped = bool(((time == 0) | (time == 1)).all()) and not bool(((event == 0) | (event == 1)).all())
    if len(y) >= FEWEST_ROWS and len({*time.tolist()}) == 2:
        raise DataError(
            f"The times of {who} have only two values, {number_text(float(time.min()))} and "
            f"{number_text(float(time.max()))}. Write the time first, then the event, as in label: days,event."
        )
    for bad, what in (
        (~time.isfinite(), "a time that is missing or infinite"),
        (time < 0, "a negative time"),
        (event.isnan(), "no event indicator"),
        ((event != 0) & (event != 1), f"the event indicator {'%g'}"),
    ):
        if rows := torch.nonzero(bad)[:, 0].tolist():
            value = what.replace("%g", f"{float(event[rows[0]]):g}")
            remedy = "Write the time first, then 1 for an event or 0" if swapped else "Correct or remove these rows"
            raise DataError(f"Row {rows[0]} (from 0) of {who} has {value} ({len(rows)} of {len(y)} rows). {remedy}.")
    return y.contiguous()


def encode_events(name: str, values: Sequence[object], where: str, event: str | None) -> np.ndarray:
    """Return 1 for each event and 0 for each other value of a column of events, ``[n]``.

    Args:
        name: Name of the column.
        values: Values of the column; None where one is missing.
        where: Name of the data, for errors.
        event: Value that means the event, as ``value_text`` writes it; None means 1 or true.

    Raises:
        DataError: If a value is missing, or the values are not an event and its absence.
    """
    missing = [row for row, value in enumerate(values) if value is None or value != value]
    if missing:
        raise DataError(
            f"{where}: the event column {name!r} has {len(missing)} missing values (first: row {missing[0]}, "
            "counted from 0). Remove those rows."
        )
    texts = [value_text(value) for value in values]
    known, shown = sorted({*texts}), abbreviate(sorted({*texts}))
    if len(known) > 2:
        rarest = min(known, key=Counter(texts).__getitem__)
        remedy = f"Write label as {LABEL_ORDER}."
        if len(known) <= FEWEST_TIMES:
            remedy = (
                f"Remove or recode the rows with other values. The rarest, {rarest!r}, is first in row "
                f"{texts.index(rarest)} (from 0)."
            )
        raise DataError(
            f"{where}: the event column {name!r} has more than two values: {shown}. It must say for each row whether the "
            f"event was observed. {remedy}"
        )
    if event is None and not {*known} <= {"0", "1"}:
        raise DataError(
            f"{where}: the event column {name!r} has the values {shown}. Set survival.event to the one that means the "
            "event."
        )
    if event is not None and event not in known and len(known) == 2:
        raise DataError(f"{where}: survival.event is {event!r}, but the event column {name!r} has the values {shown}.")
    if event is not None and event not in known and known and not is_absence(known[0], event):
        LOG.warning(
            "%s: no row has an event, because the event column %r has only the value %r, but survival.event is %r",
            *(where, name, known[0], event),
        )
    return np.array([text == (event or "1") for text in texts], np.float64)
