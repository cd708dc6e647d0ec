"""Kinds of sums that measure skew: their layout, and the sizes of the groups that a site may have to hide."""

import json

import numpy as np
import pytest
import torch

from unskew.errors import DataError
from unskew.sums.base import ClientRows, SumRequest
from unskew.sums.registry import SUMS

X = torch.tensor([[1.0, 1], [2, 1], [3, 2], [5, 2], [8, 0]])
Y = torch.tensor([0, 0, 1, 1, 3])
ROWS = ClientRows(
    x=X, y=Y, class_counts=lambda: Y.bincount(minlength=4), gradient=lambda: (torch.tensor([3.0, 4.0]), 2.0)
)
CODED = {"codes": [0, 3], "targets": 4}
FOUR = torch.full((4,), 0.25, dtype=torch.float64)
CENTER = torch.zeros(2, dtype=torch.float64)
REQUESTS = {
    "site_scalars": SumRequest("site_scalars", {"classes": 4}, {"shares": FOUR}),
    "class_means": SumRequest("class_means", {"classes": 4, "inputs": 2}),
    "class_scatter": SumRequest(
        "class_scatter", {"classes": 4, "inputs": 2}, {"means": torch.zeros(4, 2, dtype=torch.float64)}
    ),
    "gradient": SumRequest("gradient", {"parameters": 2}),
    "label_products": SumRequest("label_products", CODED, {"center": CENTER}),
    "label_scatter": SumRequest(
        "label_scatter",
        CODED,
        {"center": CENTER, "mean": FOUR, "coefficients": torch.zeros(5, 4, dtype=torch.float64)},
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_kind_declares_its_arguments_constants_and_groups(name):
    kind, request = SUMS[name], REQUESTS[name]
    own = kind.compute(ROWS, request)
    kind.check(request, own)
    assert kind.arguments.model_validate_json(json.dumps(request.args)).model_dump(mode="json") == dict(request.args)
    assert {*kind.constants} == {*request.tensors}
    sizes = kind.group_sizes(ROWS, request)
    assert {*sizes, *kind.cells(request)} == {*own}  # a site can hide each tensor
    assert all(size.shape[0] == own[tensor].shape[0] for tensor, size in sizes.items())


def test_class_means_leave_out_classes_with_one_sample():
    own = SUMS["class_means"].compute(ROWS, REQUESTS["class_means"])
    assert own["counts"].tolist() == [2, 2, 0, 0]
    assert own["clients"].tolist() == [1, 1, 0, 0]
    assert own["sums"].tolist() == [[3, 2], [8, 4], [0, 0], [0, 0]]
    assert own["scatter"].tolist() == [0.5, 2, 0, 0]
    # Of two rows, each one has a value of its own.
    assert SUMS["class_means"].group_sizes(ROWS, REQUESTS["class_means"])["sums"].tolist() == [
        [2, 1],
        [2, 1],
        [0, 0],
        [1, 1],
    ]


def test_products_are_those_of_one_the_inputs_and_the_targets():
    own = SUMS["label_products"].compute(ROWS, REQUESTS["label_products"])
    values = np.column_stack([np.ones(5), X[:, 0], np.eye(3)[X[:, 1].long()], np.eye(4)[Y]])
    np.testing.assert_array_equal(own["products"], values[:, :5].T @ values)
    assert own["squares"].tolist() == [2, 2, 0, 1]


def test_products_depend_on_the_smallest_group_of_a_code_and_a_class():
    kind, many = SUMS["label_products"], 12
    rows = ClientRows(x=X.repeat(many, 1), y=Y.repeat(many))
    assert set(kind.group_sizes(rows, REQUESTS["label_products"])["products"].tolist()) == {many}
    few = ClientRows(x=X[:4], y=Y[:4])  # fewer rows than inputs could be computed from the products
    assert set(kind.group_sizes(few, REQUESTS["label_products"])["products"].tolist()) == {1}
    numbers = SumRequest("label_products", {"codes": [0], "targets": 4}, {"center": CENTER[:1]})
    assert set(kind.group_sizes(rows, numbers)["products"].tolist()) == {many}  # of class 3


def test_numbers_on_labels_depend_on_the_smallest_class():
    sizes = SUMS["site_scalars"].group_sizes(ROWS, REQUESTS["site_scalars"])
    assert {*sizes["sizes"].tolist()} == {5}
    assert {*sizes["labels"].tolist()} == {1}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("class_means", {"x": X.long()}),
        ("class_means", {"x": X[:, :1]}),
        ("class_means", {"y": Y + 1}),
        ("class_scatter", {"y": None}),
        ("gradient", {"gradient": None}),
        ("gradient", {"gradient": lambda: (torch.zeros(3), 0.0)}),
        ("label_products", {"x": X[:, :1]}),
        ("label_products", {"y": torch.zeros(5, 2)}),
        ("site_scalars", {"class_counts": None}),
    ],
)
def test_requests_for_other_data_are_errors(name, changes):
    values = {"x": X, "y": Y, "class_counts": ROWS.class_counts, "gradient": ROWS.gradient, **changes}
    with pytest.raises(DataError):
        SUMS[name].compute(ClientRows(**values), REQUESTS[name])
