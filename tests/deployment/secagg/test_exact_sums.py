"""Exact sums of float64 numbers in integers, against rational arithmetic."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing import fuzz

from unskew.deployment.secagg.exact_sums import FRACTION, decode, encode, encoded_size, join, split
from unskew.sums.base import LARGEST, SumRequest

pytestmark = pytest.mark.fuzz

NUMBERS = st.floats(-LARGEST, LARGEST, allow_nan=False)
UNIT = Fraction(1, 2**FRACTION)


@fuzz(200)
@given(st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=9))
def test_the_sum_is_the_exact_sum_rounded_once(sites):
    """Summands are multiples of ``2^-96``, as all float64 numbers above ``2^-44`` are."""
    values = np.array(sites)
    values = np.array([[float(round(Fraction(v) / UNIT) * UNIT) for v in row] for row in values.tolist()])
    total = join(sum(split(row) for row in values))
    exact = [float(sum((Fraction(v) for v in column), Fraction(0))) for column in values.T.tolist()]
    assert total.tolist() == exact


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e49, -1e60, 1e100, 1e300])
def test_a_sum_with_an_undefined_summand_is_undefined(value):
    several = split(np.full(1000, value)).sum(0, keepdims=True)
    assert np.isnan(join(several + split(np.array([-LARGEST]))))
    assert join(split(np.array([1e46]))) == 1e46


def test_masks_of_64_bits_do_not_change_the_sum():
    """Pieces are added modulo ``2^64``; so a mask that one site adds and another subtracts cancels."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(2, 50)) * 10.0 ** rng.uniform(-20, 30, (2, 50))
    mask = rng.integers(0, 2**63, (50, 8), dtype=np.uint64) * np.uint64(3)
    one, other = (split(row).view(np.uint64) for row in values)
    masked = (one + mask) + (other - mask)
    assert join(masked.view(np.int64)).tolist() == join((one + other).view(np.int64)).tolist()


def test_counts_and_sums_of_several_requests_come_back_in_their_shapes():
    args = {"columns": ["a", "b"], "targets": ["t"]}
    mean = torch.zeros(3, dtype=torch.float64)
    requests = [SumRequest("moments", args), SumRequest("squares", args, {"mean": mean})]
    own = [
        {"counts": torch.tensor([3, 2**40, 0]), "sums": torch.tensor([0.1, -1e30, 0.0], dtype=torch.float64)},
        {"squares": torch.tensor([1e-9, 2.0, 1e38], dtype=torch.float64)},
    ]
    integers = encode(requests, own)
    assert len(integers) == encoded_size(requests) == 3 + 8 * 6
    back = decode(requests, (integers + integers).numpy())
    for mine, theirs in zip(back, own, strict=True):
        assert {name: t.tolist() for name, t in mine.items()} == {name: (2 * t).tolist() for name, t in theirs.items()}
