"""Kinds of sums over the columns of a table, against loops over single values."""

import numpy as np
import pytest
import torch

from unskew.errors import DataError
from unskew.sums.base import ClientRows, SumRequest
from unskew.sums.columns import CELLS
from unskew.sums.exchange import SimulatedExchange
from unskew.sums.registry import SUMS

ROWS = [
    ClientRows(columns=("age",), numbers=np.array([[0.0], [np.nan], [50.0], [100.0]]), missing={"age": 1, "drug": 2}),
    ClientRows(columns=("age",), numbers=np.array([[-1.0], [100.5], [1.5625], [1.56]]), missing={"age": 0, "drug": 3}),
]


def asked(request, rows=ROWS):
    return SimulatedExchange(lambda: rows)([request])[0]


def test_a_histogram_counts_each_value_once_with_what_lies_outside():
    counts = asked(SumRequest("histogram", {"column": "age", "range": [0, 100]}))["counts"].tolist()
    expected = [0] * (CELLS + 2)
    for value in (0.0, 50.0, 100.0, -1.0, 100.5, 1.5625, 1.56):
        inside = [n for n in range(CELLS) if n * 100 / CELLS <= value < (n + 1) * 100 / CELLS]
        expected[0 if value < 0 else CELLS if value == 100 else CELLS + 1 if value > 100 else inside[0] + 1] += 1
    assert counts == expected


def test_missing_values_are_counted_by_column():
    assert asked(SumRequest("missing", {"columns": ["age", "drug"]}))["counts"].tolist() == [1, 5]


@pytest.mark.parametrize(
    "request_",
    [
        SumRequest("histogram", {"column": "dose", "range": [0, 1]}),
        SumRequest("moments", {"columns": ["dose"]}),
        SumRequest("squares", {"columns": ["age"]}),
        SumRequest("squares", {"columns": ["age"]}, {"mean": torch.tensor([float("nan")], dtype=torch.float64)}),
        SumRequest("categories", {"columns": ["ward"]}),
        SumRequest("missing", {"columns": ["ward"]}),
        SumRequest("classes", {"classes": 2}),
    ],
)
def test_a_client_without_what_is_requested_says_so(request_):
    with pytest.raises(DataError):
        asked(request_)


def test_requests_with_equal_content_have_equal_digests_and_others_differ():
    mean = torch.tensor([1.0, 2.0], dtype=torch.float64)
    one = SumRequest("squares", {"columns": ["a", "b"], "targets": []}, {"mean": mean})
    assert one.digest == SumRequest("squares", {"targets": [], "columns": ["a", "b"]}, {"mean": mean.clone()}).digest
    others = [
        SumRequest("moments", one.args, one.tensors),
        SumRequest("squares", {"columns": ["b", "a"], "targets": []}, one.tensors),
        SumRequest("squares", one.args, {"mean": mean + 1}),
        SumRequest("squares", one.args, {"mean": mean[:, None]}),
    ]
    assert len({one.digest, *(other.digest for other in others)}) == 5


def test_a_name_that_looks_like_the_content_of_another_tensor_gives_another_digest():
    mean, more = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([5.0], dtype=torch.float64)
    glued = "mean" + f" {mean.dtype} {[2]}" + mean.numpy().tobytes().decode("latin1") + "more"
    assert (
        SumRequest("squares", {}, {"mean": mean, "more": more}).digest
        != SumRequest("squares", {}, {glued: more}).digest
    )


@pytest.mark.parametrize("name", sorted(SUMS))
def test_every_kind_describes_itself_for_an_administrator(name):
    assert len(type(SUMS[name]).__doc__) > 10
    assert SUMS[name].name == name
