"""Tables of survival times on public cells, and the curves and bins that follow from them."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest

from unskew.tasks.survival_metrics import censoring_curve, curves_from_cells, kaplan_meier
from unskew.tasks.survival_table import CELLS, SurvivalTable, choose_cuts, grid_edges, most_bins, time_edges

TCGA = Path(os.environ.get("UNSKEW_SHARED_DATA", "/work/shared/data/natural")) / "tcga-brca"


def drawn(n, seed=0, unit=1.0):
    draws = np.random.default_rng(seed)
    died, left = draws.exponential(300, n), draws.uniform(0, 900, n)
    return np.ceil(np.minimum(died, left) / unit) * unit, died <= left


def test_a_table_counts_each_row_in_one_cell():
    """Time 0 belongs to the first cell, an event at an edge to the cell before it, and later rows are censored at the end."""
    time = np.array([0.0, 0.0, 10.0, 10.0, 15.0, 20.0, 30.0, 30.0, 31.0, 99.0])
    event = np.array([1, 0, 1, 0, 0, 1, 1, 0, 1, 0])
    table = SurvivalTable.of(time, event, np.array([0.0, 10.0, 20.0, 30.0]))
    assert table.events.tolist() == [2, 1, 1]
    assert table.censored.tolist() == [2, 1, 3]
    assert table.ended.tolist() == [1, 0, 3]
    assert table.exposure.tolist() == [80.0, 55.0, 40.0]
    assert table.at_risk.tolist() == [10, 6, 4]
    bins = table.bins([20.0, 30.0])
    assert bins.events.tolist() == [3, 1]
    assert bins.exposure.tolist() == [135.0, 40.0]
    assert bins.at_risk.tolist() == [10 - 3 / 2, 4.0]  # the row that ended at 10 did not pass the merged bin


@pytest.mark.parametrize("unit", [1e-9, 1.0])
def test_curves_of_cells_are_near_those_of_rows(unit):
    time, event = drawn(400, unit=unit)
    edges = grid_edges(700.0)
    observed = np.minimum(time, 700.0), event & (time <= 700.0)
    survival, uncensored = (curve.at(edges[:-1]) for curve in curves_from_cells(
        np.stack(SurvivalTable.of(time, event, edges)[1:3]), edges
    ))  # fmt: skip
    assert np.abs(survival - kaplan_meier(*observed).at(edges[:-1])).max() < 0.002
    late = censoring_curve(*observed).at(edges[:-1]) > 0.1
    assert np.abs(uncensored - censoring_curve(*observed).at(edges[:-1]))[late].max() < 0.004


def test_cells_are_public_and_contain_given_cut_points():
    edges = grid_edges(700.0, [365.0, 700.0])
    assert len(edges) == CELLS + 2
    assert edges[0] == 0
    assert edges[-1] == 700.0
    assert 365.0 in edges
    times = time_edges()
    assert len(times) == 1025
    assert times[[0, -1]].tolist() == [2.0**-20, 2.0**44]
    np.testing.assert_allclose(times[16:] / times[:-16], 2)


def test_cut_points_are_edges_with_equal_numbers_of_events():
    time, event = drawn(1000)
    table = SurvivalTable.of(time, event, grid_edges(900.0))
    cuts = choose_cuts(table, 5)
    assert {*cuts} <= {*table.edges.tolist()}
    events = table.bins(cuts).events
    assert events.sum() == event.sum()
    assert np.abs(events - event.sum() / 5).max() <= table.events.max()


def test_no_more_bins_than_cells_with_events_fit():
    table = SurvivalTable.of(np.array([1.0, 1.0, 1.0, 9.0, 5.0]), np.array([1, 1, 1, 1, 0]), grid_edges(10.0))
    assert most_bins(table, 7) == 2
    assert most_bins(SurvivalTable.of(np.array([5.0]), np.array([0]), grid_edges(10.0)), 7) == 1


@pytest.mark.skipif(not TCGA.is_dir(), reason="the data of TCGA-BRCA are not here")
def test_cells_give_the_survival_of_tcga_brca():
    """At 1, 3 and 5 years, 0.979653, 0.900361 and 0.819434 by the Kaplan-Meier curve of lifelines 0.30.3."""
    rows = []
    for name in ("train", "test"):
        with (TCGA / f"{name}.csv").open() as file:
            rows += [(float(row["days"]), float(row["event"])) for row in csv.DictReader(file)]
    time, event = np.array(rows).T
    assert (len(rows), int(event.sum()), int((time == 0).sum())) == (1088, 151, 12)
    years = np.array([365.0, 1095.0, 1825.0])
    edges = grid_edges(1826.0, years)
    survival, _ = curves_from_cells(np.stack(SurvivalTable.of(time, event, edges)[1:3]), edges)
    assert survival.at(years).tolist() == pytest.approx([0.979653, 0.900361, 0.819434], abs=3e-4)
    assert kaplan_meier(time, event > 0).at(years).tolist() == pytest.approx([0.979653, 0.900361, 0.819434], abs=1e-6)
