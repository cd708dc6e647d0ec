"""Survival of sites from sums is that of their rows up to the cells of time, with and without masks."""

import numpy as np
import pytest
import torch
from support.survival_rows import UNTIL, survival_table

from unskew.errors import DataError
from unskew.measurements.survival_tables import SurvivalTables
from unskew.sums.base import ClientRows, SumRequest
from unskew.sums.exchange import SimulatedExchange, own_sums
from unskew.sums.registry import SUMS
from unskew.sums.statistics import collect
from unskew.tasks.survival_evaluation import compare_rows

HORIZONS = (100.0, 250.0)


@pytest.fixture
def rows(tmp_path):
    """Rows of three clinics."""
    time, event, clinic, _ = survival_table(tmp_path / "patients.csv")
    y = np.stack([np.minimum(time, UNTIL), event & (time <= UNTIL)], 1)
    return [ClientRows(y=torch.from_numpy(y[clinic == k])) for k in range(3)]


def compared(rows, masked, hidden=()):
    """The comparison; some sites hide their counts."""
    statistic = SurvivalTables(UNTIL, HORIZONS, masked)
    first, second = collect(SimulatedExchange(lambda: rows), {"": statistic})[""]
    tables = {k: own_sums(own, statistic.first())[0]["counts"].numpy() for k, own in enumerate(rows)}
    tables = {k: counts * (k not in hidden) for k, counts in tables.items()}
    sizes = {k: own.num_rows for k, own in enumerate(rows)}
    return statistic.comparison(first, second, {} if masked else tables, sizes)


def test_sites_have_the_curves_and_the_test_of_their_rows(rows):
    found, exact = compared(rows, masked=False), compare_rows([own.y.numpy() for own in rows], HORIZONS)
    for mine, theirs in zip((*found["rows"], found["pooled"]), (*exact["rows"], exact["pooled"]), strict=True):
        assert mine["events"] == theirs["events"]
        # A cell is 2 days long; within it, the curve is linear instead of a step of at most two rows of 120.
        assert mine["survival"] == pytest.approx(theirs["survival"], abs=0.02)
    assert found["test"]["statistic"] == pytest.approx(exact["test"]["statistic"], rel=0.02)
    assert (found["test"]["df"], found["test"]["conservative"]) == (2, False)


def test_masks_leave_the_sums_and_a_conservative_test(rows):
    found, plain = compared(rows, masked=True), compared(rows, masked=False)
    assert found["rows"] == []
    assert found["pooled"] == plain["pooled"]
    assert 0.8 * plain["test"]["statistic"] < found["test"]["statistic"] < plain["test"]["statistic"]
    assert (found["test"]["df"], found["test"]["conservative"]) == (2, True)


def test_sites_that_hide_counts_have_no_curve_and_there_is_no_test(rows):
    found = compared(rows, masked=False, hidden=(1,))
    assert [row["events"] is None for row in found["rows"]] == [False, True, False]
    assert found["pooled"] == {"events": None, "survival": None}
    assert found["test"] is None


def test_few_events_of_all_sites_are_not_shown_with_masks():
    few = [ClientRows(y=torch.tensor([[10.0 + k, 1.0], [400.0, 0.0]], dtype=torch.float64)) for k in range(3)]
    assert compared(few, masked=True)["pooled"] == {"events": None, "survival": None}
    assert compared(few, masked=False)["pooled"]["events"] == 3


def test_a_term_needs_a_hazard_for_each_cell(rows):
    kind, args = SUMS["log_rank_term"], {"until": UNTIL, "cuts": []}
    with pytest.raises(DataError, match="no finite hazard"):
        kind.compute(rows[0], SumRequest(kind.name, args, {"hazard": torch.zeros(3, dtype=torch.float64)}))
    request = SumRequest(kind.name, args, {"hazard": torch.full((256,), 0.01, dtype=torch.float64)})
    kind.check(request, kind.compute(rows[0], request))
    assert kind.masked_only
    assert kind.once == ("hazard",)
