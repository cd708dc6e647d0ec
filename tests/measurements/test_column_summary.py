"""Summary of columns from sums, against NumPy on the pooled values."""

import numpy as np
import pytest

from unskew.measurements.column_summary import ColumnSummary, histogram_quantile
from unskew.sums.base import ClientRows
from unskew.sums.exchange import SimulatedExchange
from unskew.sums.statistics import collect

DRAWS = np.random.default_rng(0)
AGES = [np.round(DRAWS.normal(60, 10, n)) for n in (40, 70)]
AGES[0][:3] = np.nan


def clients():
    return [
        ClientRows(
            columns=("age",), numbers=ages[:, None], missing={"age": int(np.isnan(ages).sum()), "ward": k},
            target_names=("cost",), targets=2 * ages[:, None],
        )
        for k, ages in enumerate(AGES)
    ]  # fmt: skip


def summary(*allowed, ranges=None):
    statistic = ColumnSummary(("age", "ward"), ("age",), ("cost",), ranges or {}, allowed)
    (sums,) = collect(SimulatedExchange(clients), {"columns": statistic}).values()
    return {row.pop("column"): row for row in statistic.rows(*sums)}


def test_the_summary_equals_numpy_on_all_values():
    found = summary("missing", "moments", "histograms", ranges={"age": (0.0, 128.0)})
    values = np.concatenate(AGES)[3:]
    assert found["age"].pop("values") == len(values)
    expected = {"missing": 3, "mean": values.mean(), "std": values.std()}
    assert {name: found["age"][name] for name in expected} == pytest.approx(expected)
    for name, p in (("q25", 0.25), ("median", 0.5), ("q75", 0.75)):  # within a cell
        assert abs(found["age"][name] - np.quantile(values, p)) <= 128 / 64
    assert found["ward"] == {"missing": 1}


def test_only_allowed_statistics_are_asked_for():
    assert summary("missing") == {"age": {"missing": 3}, "ward": {"missing": 1}}
    assert summary("histograms") == {}
    assert {*summary("moments")["age"]} == {"values", "mean", "std"}


def test_quantiles_outside_the_range_are_unknown():
    assert histogram_quantile(np.array([6, 2, 2, 0]), 0.0, 1.0, 0.25) is None
    assert histogram_quantile(np.array([0, 0, 0, 0]), 0.0, 1.0, 0.5) is None
    assert histogram_quantile(np.array([1, 4, 4, 1]), 0.0, 10.0, 0.5) == 5.0
