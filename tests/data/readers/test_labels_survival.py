"""Label columns of survival times in tables: reading, errors, and warnings."""

import numpy as np
import pytest

import unskew
from unskew.data.readers import labels
from unskew.errors import ConfigError, DataError

pytest.importorskip("pyarrow")


def table(tmp_path, event=lambda k: k % 3 > 0, **columns):
    """A table of 60 rows with times and an event column, and two inputs."""
    draws = np.random.default_rng(0)
    rows = {
        "age": draws.normal(60, 10, 60).round(2), "dose": draws.normal(size=60).round(3),
        "days": draws.exponential(300, 60).round(1), "vital": [event(k) for k in range(60)], **columns,
    }  # fmt: skip
    lines = [",".join(rows), *(",".join(map(str, row)) for row in zip(*rows.values(), strict=True))]
    (tmp_path / "patients.csv").write_text("\n".join(lines))
    return {"data": f"table:{tmp_path / 'patients.csv'}", "task": "survival", "partition": "iid", "clients": 3}


@pytest.mark.parametrize(
    ("values", "options"),
    [
        ((True, False), {}), ((1, 0), {}), ((2, 1), {"event": 2}), (("Dead", "Alive"), {"event": "Dead"}),
        ((0, 1), {"event": 0}), ((1, 0), {"event": True}),
    ],
)  # fmt: skip
def test_events_of_a_table_may_be_written_in_several_ways(values, options, tmp_path):
    given = table(tmp_path, lambda k: values[0] if k % 3 else values[1])
    federation = unskew.load_federation(**given, label="days,vital", survival={"until": 900, **options})
    event = np.concatenate([client.y[:, 1].numpy() for client in federation.clients])
    assert event.sum() == pytest.approx(len(event) * 2 / 3, abs=4)
    assert [name for name, role in federation.columns.items() if role == "label"] == ["days", "vital"]
    assert federation.objective.cuts[-1] == 900
    assert federation.classes == len(federation.names) == len(federation.objective.cuts)


@pytest.mark.parametrize(
    ("label", "options", "error", "message"),
    [
        ("days", {}, ConfigError, "needs two label columns, but label is days"),
        ("days,vital,age", {}, ConfigError, "needs two label columns"),
        ("vital,days", {}, DataError, "more than two values"),
        ("days,dose", {}, DataError, "more than two values"),
        ("days,vital", {"event": "Dead"}, DataError, "survival.event is 'Dead', but .* has the values 0, 1"),
        ("days,vital", {"bins": 40}, ConfigError, "survival.bins=40 leaves a bin without an event"),
        ("days,vital", {"bins": [3, 2]}, ConfigError, "increasing cut points"),
        ("days,vital", {"until": 10, "horizons": [20]}, ConfigError, "after 10, the last time"),
        ("days,vital", {"rates": [0.1]}, ConfigError, "survival.rates needs one number per bin"),
        ("days,vital", {"cutpoints": 3}, ConfigError, "survival.cutpoints"),
    ],
)  # fmt: skip
def test_labels_and_options_are_validated(label, options, error, message, tmp_path):
    given = table(tmp_path, lambda k: int(k % 3 > 0))
    with pytest.raises(error, match=message):
        unskew.load_federation(**given, label=label, survival=options)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("days", [-1.0, *range(1, 60)], r"Row 0 \(from 0\) of .* has a negative time"),
        ("days", ["", *range(1, 60)], "'days' has 1 missing or infinite values .first: row 0, counted from 0"),
        ("days", ["soon", *range(1, 60)], r"survival requires numbers\.$"),
        ("days", ["soon", "late"] * 30, r"Write label as the column of times, then the column of events\.$"),
        ("days", [1, 2] * 30, "only two values, 1 and 2"),
        ("vital", ["", *([1, 0] * 29), 1], "event column 'vital' has 1 missing values .first: row 0"),
        ("vital", [0] * 60, "No training row has an event"),
    ],
)  # fmt: skip
def test_values_are_validated(column, values, message, tmp_path):
    given = table(tmp_path, **{column: values})
    with pytest.raises(DataError, match=message):
        unskew.load_federation(**given, label="days,vital", survival={"until": 900})


def test_options_of_another_task_are_rejected(tmp_path):
    given = {**table(tmp_path, lambda k: int(k % 3 > 0)), "task": "auto"}
    with pytest.raises(ConfigError, match="survival has options of another task"):
        unskew.load_federation(**given, label="vital", survival={"bins": 3})
    with pytest.raises(ConfigError, match="classification has none"):
        unskew.Federation.from_arrays(
            [(np.zeros((4, 1)), np.arange(4) % 2)], (np.zeros((2, 1)), np.arange(2)), options={"a": 1}
        )


def test_a_classification_of_the_event_next_to_a_time_warns(tmp_path, monkeypatch):
    logged = []
    monkeypatch.setattr(labels.LOG, "warning", lambda text, *values: logged.append(text % values))
    given = {**table(tmp_path, lambda k: int(k % 3 > 0)), "task": "auto"}
    unskew.load_federation(**given, label="vital")
    assert "ignores that rows are censored" in logged[0]
    assert "label: days,vital" in logged[0]
    unskew.load_federation(**{**given, "exclude": "days"}, label="vital")
