"""Cross products and residuals: sums over clients of what each computes from its centered rows."""

import numpy as np
import pytest
import torch

from unskew.errors import DataError
from unskew.sums.base import ClientRows, SumRequest
from unskew.sums.cross_products import columns_and_design
from unskew.sums.exchange import own_sums
from unskew.sums.registry import SUMS

ROWS = ClientRows(
    columns=("age", "a", "b"),
    numbers=np.array([[1.0, 10, 0.1], [2, 20, 0.1], [6, 60, 0.1]]),
    texts={"sex": np.array(["m", "f", "m"], object)},
)
ARGS = {"columns": ["a", "b"], "covariates": [["age", []], ["sex", ["f", "m"]]]}


def test_products_are_those_of_centered_rows():
    (own,) = own_sums(ROWS, [request := SumRequest("cross_products", ARGS)])
    SUMS["cross_products"].check(request, own)
    z = np.array([[-2, 1 / 3], [-1, -2 / 3], [3, 1 / 3]])
    np.testing.assert_allclose(own["covariates"], z.T @ z)
    np.testing.assert_allclose(own["columns"], z.T @ np.array([[-20.0, 0], [-10, 0], [30, 0]]), atol=1e-14)
    assert own["columns"][:, 1].tolist() == [0.0, 0.0]  # a constant column has no rounding error
    assert SUMS["cross_products"].describe(request) == (
        "sums of products of age, sex=m, minus their means at the site, with age, sex=m, a, b"
    )


def test_residuals_are_summed_and_squared_around_the_site_mean():
    beta = torch.tensor([[9.0, 0], [3, 0]], dtype=torch.float64)
    (own,) = own_sums(ROWS, [request := SumRequest("residuals", ARGS, {"beta": beta})])
    SUMS["residuals"].check(request, own)
    residuals = np.array([10 - 9 - 3, 20 - 18, 60 - 54 - 3.0])
    assert own["rows"].tolist() == [3]
    np.testing.assert_allclose(own["sums"], [residuals.sum(), 0.3])
    np.testing.assert_allclose(own["squares"], [np.square(residuals - 1).sum(), 0])


def test_rejects_missing_values_and_unknown_categories():
    for rows, name in (
        (ClientRows(("age", "a", "b"), np.array([[1, np.nan, 2.0]]), texts={"sex": np.array(["m"], object)}), "'a'"),
        (ClientRows(("age", "a", "b"), np.ones((1, 3)), texts={"sex": np.array(["x"], object)}), "'sex=m'"),
        (ClientRows(("age", "a", "b"), np.ones((1, 3)), texts={"sex": np.array([None], object)}), "'sex=m'"),
    ):
        with pytest.raises(DataError, match=f"{name} of the harmonization has no known value in 1 of 1 rows"):
            own_sums(rows, [SumRequest("cross_products", ARGS)])
    with pytest.raises(DataError, match="'c' of the harmonization does not exist"):
        columns_and_design(ROWS, ["c"], [])
