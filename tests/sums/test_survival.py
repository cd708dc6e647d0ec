"""Sums of survival times: what a client sends, and what is validated."""

import numpy as np
import pytest
import torch

from unskew.errors import DataError
from unskew.sums.base import ClientRows, SumRequest
from unskew.sums.registry import PERMISSIONS, SUMS
from unskew.tasks.survival_table import SurvivalTable, grid_edges, time_edges

Y = torch.tensor([[0.0, 0.0], [3.0, 1.0], [9.5, 0.0], [40.0, 1.0]], dtype=torch.float64)


def sums_of(kind, args, y=Y):
    request = SumRequest(kind, args)
    own = SUMS[kind].compute(ClientRows(y=y), request)
    SUMS[kind].check(request, own)
    return own


def test_times_are_counted_on_the_public_grid():
    counts = sums_of("survival_times", {})["counts"].numpy()
    assert counts.sum() == 4
    edges = time_edges()
    last = int(np.flatnonzero(counts)[-1])
    assert edges[last - 1] < 40 <= edges[last]
    assert counts[0] == 1


def test_events_and_exposure_are_those_of_the_table():
    args = {"until": 20.0, "cuts": [3.0, 20.0]}
    own, table = sums_of("survival", args), SurvivalTable.of(*Y.numpy().T, grid_edges(20.0, [3.0, 20.0]))
    for name in ("events", "censored", "ended", "exposure"):
        assert own[name].tolist() == getattr(table, name).tolist()
    assert int(own["events"].sum()) == 1
    assert int(own["clients"]) == 0
    assert int(sums_of("survival", args, Y[:1])["clients"]) == 1


def test_one_permission_covers_the_statistic():
    assert "survival" in PERMISSIONS
    kind = SUMS["survival_table"]
    assert kind.permission == "survival"
    assert SUMS["survival"].permission == SUMS["survival_times"].permission == ""
    counts = sums_of("survival_table", {"until": 20.0})["counts"]
    assert counts.sum() == 4
    first, second = (kind.grids(SumRequest("survival_table", {"until": until}), ClientRows()) for until in (20.0, 21.0))
    assert first != second


@pytest.mark.parametrize(
    "args", [{}, {"until": 0.0}, {"until": "20"}, {"until": 20.0, "rows": 1}, {"until": 20.0, "cuts": [-1.0]}]
)
def test_other_arguments_are_rejected(args):
    with pytest.raises(DataError, match="no valid cells"):
        sums_of("survival", args)


def test_other_labels_and_too_large_times_are_rejected():
    with pytest.raises(DataError, match="other labels"):
        sums_of("survival", {"until": 1.0}, torch.zeros(3))
    with pytest.raises(DataError, match="larger unit") as error:
        sums_of("survival_times", {}, torch.tensor([[123456789e12, 1.0]]))
    assert "123" not in str(error.value).replace(",", "")  # the site sends this text to the server
