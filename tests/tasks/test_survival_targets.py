"""Times and events of survival analysis that are read or rejected."""

import numpy as np
import pytest
import torch
from support.survival_sums import rows

from unskew.errors import DataError
from unskew.tasks import survival_targets
from unskew.tasks.registry import TASKS
from unskew.tasks.survival import Survival

KINDS = ("piecewise", "discrete")


@pytest.mark.parametrize(
    ("event", "value", "warned"),
    [("Dead", "dead", True), ("Dead", "Y", True), ("Dead", "Alive", False), ("2", "1", False), ("1", "0", False),
     ("0", "1", False), ("yes", "No", False), ("2", "0", False), ("Dead", "Dead", False)],
)  # fmt: skip
def test_an_event_that_never_occurs_warns_unless_the_value_means_no_event(monkeypatch, event, value, warned):
    logged = []
    monkeypatch.setattr(survival_targets.LOG, "warning", lambda text, *values: logged.append(text % values))
    coded = Survival(event=event).encode_column("status", [value] * 3, "hospital B")
    assert coded.tolist() == [float(event == value)] * 3
    assert logged == [
        f"hospital B: no row has an event, because the event column 'status' has only the value '{value}', but "
        f"survival.event is '{event}'"
    ] * warned  # fmt: skip


@pytest.mark.parametrize(
    ("time", "event", "message"),
    [
        (-1.0, 1.0, r"Row 1 \(from 0\) of a has a negative time"),
        (np.nan, 1.0, r"Row 1 \(from 0\) of a has a time that is missing"),
        (np.inf, 1.0, "missing or infinite"), (1.0, 2.0, r"Row 1 \(from 0\) of a has the event indicator 2"),
        (1.0, np.nan, r"Row 1 \(from 0\) of a has no event indicator"),
    ],
)  # fmt: skip
def test_times_and_events_are_validated(time, event, message):
    with pytest.raises(DataError, match=message):
        TASKS["survival"].read(torch.tensor([[1.0, 0.0], [time, event]]), "a")


def test_swapped_columns_are_rejected():
    y, _ = rows(50)
    with pytest.raises(DataError, match=r"only two values, 0 and 1\. Write the time first"):
        TASKS["survival"].read(y.flip(1), "a")
    with pytest.raises(DataError, match=r"\[n, 2\]"):
        TASKS["survival"].read(y[:, 0], "a")


@pytest.mark.parametrize(
    ("values", "event", "expected"),
    [
        ([0, 1, 1], None, [0, 1, 1]), ([False, True], None, [0, 1]), (["true", "FALSE"], None, [1, 0]),
        ([1, 2], "2", [0, 1]), ([1.0, 2.0], "2", [0, 1]), (["Dead", "Alive "], "Dead", [1, 0]), ([1, 1], None, [1, 1]),
        ([0, 1], "0", [1, 0]),
    ],
)  # fmt: skip
def test_events_may_be_written_in_several_ways(values, event, expected):
    assert Survival(event=event).encode_column("status", values, "a").tolist() == expected


@pytest.mark.parametrize(
    ("values", "event", "message"),
    [
        ([0, 1, 1, 0, 2], None, "more than two values: 0, 1, 2.*Remove or recode.*'2', is first in row 4"),
        ([*range(30)], None, "Write label as the column of times, then the column of events"),
        ([1, 2], None, "has the values 1, 2. Set survival.event"),
        (["a", "b"], "c", "survival.event is 'c', but"),
        ([1, None], None, "1 missing values .first: row 1, counted from 0"),
        ([1.0, float("nan")], None, "1 missing values"),
    ],
)  # fmt: skip
def test_unclear_events_are_rejected(values, event, message):
    with pytest.raises(DataError, match=message):
        Survival(event=event).encode_column("status", values, "a")
