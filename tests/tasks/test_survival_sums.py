"""Metrics of survival from sums over sites are those of all rows, up to ranks within a cell."""

import numpy as np
import pytest

from unskew.tasks.survival_evaluation import SurvivalPredictions, metric_names
from unskew.tasks.survival_metrics import concordant_pairs
from unskew.tasks.survival_sums import RISKS, metrics_of_sums, survival_sums
from unskew.tasks.survival_table import CELLS, SurvivalTable, grid_edges

CUTS, HORIZONS, UNTIL = (100.0, 300.0, 600.0), (100.0, 250.0, 600.0), 600.0
EDGES = grid_edges(UNTIL)
NAMES = ("concordance", *metric_names(("uno", "ibs", "brier", "risk_gap"), HORIZONS))


def drawn(n, seed=0):
    """Times and events with random censoring, and predicted cumulative hazards, of which some are wrong."""
    random = np.random.default_rng(seed)
    log_hazard = 0.8 * random.normal(size=n)
    died, left = 300 * random.exponential(np.exp(-log_hazard)), random.uniform(0, 900, n)
    y = np.stack([np.minimum(died, left), died <= left], 1)
    predicted = np.exp(log_hazard + 0.3 * random.normal(size=n))
    return y, predicted[:, None] * np.array(CUTS) / 300


def predictions(y, hazards, rows=slice(None)):
    died = y[:, 1] * (y[:, 0] <= UNTIL)
    censoring = SurvivalTable.of(np.minimum(y[:, 0], UNTIL), died, EDGES).censoring()
    return SurvivalPredictions.of(y[rows], hazards[rows], CUTS, HORIZONS, censoring)


def from_sites(y, hazards, sites=3):
    every = predictions(y, hazards)
    parts = [survival_sums(predictions(y, hazards, slice(k, None, sites)), 2.0) for k in range(sites)]
    table, errors = sum(part[0] for part in parts), sum(part[1] for part in parts)
    return metrics_of_sums(table, errors, EDGES, HORIZONS, every.censoring, float(every.edges[-1])), table


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sums_over_sites_give_the_metrics_of_all_rows(seed):
    y, hazards = drawn(2000, seed)
    exact, (found, table) = predictions(y, hazards).metrics(NAMES), from_sites(y, hazards)
    assert table.shape == (CELLS + 1, RISKS, 2)
    assert table.sum() == 2000
    assert [*found] == [*NAMES]
    for name, value in found.items():
        # A cell of risk is a hundredth of the range, and one of time has about 6 of the 2,000 rows.
        sums = name == "ibs" or name.startswith("brier")
        assert value == pytest.approx(exact[name], abs=1e-12 if sums else 1e-3), name


def test_rows_in_separate_cells_give_the_exact_concordance():
    time = np.arange(1, 51) * UNTIL / 51
    y = np.stack([time, np.arange(50) % 3 > 0], 1)
    risk = np.random.default_rng(0).permutation(50) / 10 + 0.05
    hazards = risk[:, None] * np.array([0.2, 0.5, 1.0])
    found, table = from_sites(y, hazards)
    assert table.max() == 1
    ranks = np.minimum(RISKS * risk / (risk + 2.0), RISKS - 1).astype(int)
    concordant, comparable = concordant_pairs(time, y[:, 1] > 0, ranks)
    assert found["concordance"] == pytest.approx(concordant / comparable, abs=1e-12)


def test_sites_without_rows_send_zeros_and_metrics_are_undefined():
    y, hazards = drawn(30)
    table, errors = survival_sums(predictions(y, hazards, slice(0, 0)), 2.0)
    assert not table.any()
    assert not errors.any()
    found = metrics_of_sums(table, errors, EDGES, HORIZONS, predictions(y, hazards).censoring, 300.0)
    assert np.isnan(found["concordance"])
