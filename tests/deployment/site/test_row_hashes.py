"""Hashes by which a site recognizes changed rows."""

import numpy as np
import pytest
import torch

from unskew.config.loader import experiment
from unskew.data.readers.tables import SampleTable, Source
from unskew.deployment.site.config import SiteConfig
from unskew.deployment.site.data import SiteData, load_site_data
from unskew.deployment.site.row_hashes import count_changes, hash_rows, row_values

KEY = bytes(32)


def changes(before, now):
    return count_changes(hash_rows(before, KEY), hash_rows(now, KEY))


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ([1, 2, 3], [3, 1, 2], 0),
        ([1, 2, 3], [1.0, 2.0, 3.0], 0),
        ([1, 2, 3], ["1", "2", "3"], 0),  # one word among numbers makes a column of texts
        ([1, None], [1.0, float("nan")], 0),
        ([1, 2, 3], [1, 2], 1),
        ([1, 2], [1, 2, 2], 1),
        ([1, 2, 3], [1, 2, 4], 1),
        ([1, 2, 3], [4, 5], 3),
        (["a", "b"], ["a", "c"], 1),
        ([b"a", b"a\0"], [b"a", b"a"], 1),
    ],
)
def test_changed_rows_are_counted(before, now, expected):
    assert changes({"x": before}, {"x": now}) == {"x": expected, "all columns": expected}


def test_values_that_are_exchanged_between_rows_are_changes_of_rows():
    found = changes({"x": [1, 2], "y": [1, 2]}, {"x": [1, 2], "y": [2, 1]})
    assert found == {"x": 0, "y": 0, "all columns": 2}


def test_only_common_columns_are_compared():
    assert changes({"x": [1, 2], "y": [1, 2]}, {"y": [1, 2], "z": [5, 6]}) == {"y": 0, "all columns": 0}
    assert changes({"x": [1, 2]}, {"z": [5, 6, 7]}) == {"all columns": 1}


CSV = "age,ward,code,outcome\n" + "".join(
    f"{30 + k},{'ab'[k % 2]},{k % 7},{'yes' if k % 3 else 'no'}\n" for k in range(60)
)


def table(folder, text, **own):
    folder.mkdir(exist_ok=True)
    (folder / "data.csv").write_text(text)
    data = {"source": "table:data.csv", "label": "outcome", "features": ["age", "ward"], **own}
    site = SiteConfig.model_validate({"name": "a", "client": 0, "data": data})
    agreed = {"data": "digits", "clients": 2, "categories": ["ward"], "missing": "mean", "model": "logistic"}
    return row_values(load_site_data(site, experiment(agreed), folder))


@pytest.mark.parametrize(
    ("row", "changed"),
    [
        ("44,a,3,yes", 1),
        ("70000000,a,3,no", 1),  # the table is then read as float64
        ("44,aa,3,yes", 1),  # a new category, the second one in order
        ("44,a,3,maybe", 1),  # a new class, the first one in order
        (",a,3,yes", 1),
    ],
)
def test_one_more_row_of_a_table_is_one_change_whatever_else_it_changes(row, changed, tmp_path):
    """The random division into training and held-out rows changes as well."""
    before, now = table(tmp_path / "a", CSV), table(tmp_path / "b", f"{CSV}{row}\n")
    assert {*before} == {"age", "ward", "outcome"}
    assert len(before["age"]) == 60
    assert set(changes(before, now).values()) == {changed}


def test_experiments_with_other_columns_are_compared_on_the_common_ones(tmp_path):
    before = table(tmp_path / "a", CSV)
    now = table(tmp_path / "b", f"{CSV}44,a,3,yes\n", features=["age", "code"])
    assert changes(before, now) == {"age": 1, "outcome": 1, "all columns": 1}


def samples(x, y, task="classification", names=("cat", "dog")):
    part = SampleTable(x, y, {})
    source = Source("some", part, part.rows(np.arange(0)), names, len(names), task)
    return row_values(SiteData(0, 2, "a site", source.train, source.test, source))


def test_images_are_compared_by_their_pixels():
    images = torch.arange(5 * 3 * 4 * 4).reshape(5, 3, 4, 4).to(torch.uint8)
    labels = torch.tensor([0, 1, 0, 1, 1])
    other = images.clone()
    other[2, 0, 0, 0] += 1
    assert changes(samples(images, labels), samples(images.contiguous(memory_format=torch.channels_last), labels)) == {
        "inputs": 0,
        "label": 0,
        "all columns": 0,
    }
    assert changes(samples(images, labels), samples(other, labels)) == {"inputs": 1, "label": 0, "all columns": 1}


def test_padding_of_texts_and_the_numbers_of_classes_do_not_matter():
    short = torch.tensor([[4, 5, -1], [6, 7, 8]])
    padded = torch.tensor([[4, 5, -1, -1], [6, 7, 8, -1]])
    before = samples(short, torch.tensor([0, 1]))
    assert set(changes(before, samples(padded, torch.tensor([1, 2]), names=("ant", "cat", "dog"))).values()) == {0}


def test_several_labels_and_targets_are_compared():
    x = torch.zeros(2, 1)
    labels = torch.tensor([[1.0, 0], [1, 1]])
    wider = torch.tensor([[0.0, 1, 0], [0, 1, 1]])
    names = ("ant", "cat", "dog")
    assert set(changes(samples(x, labels, "multilabel"), samples(x, wider, "multilabel", names)).values()) == {0}
    targets = samples(x, torch.tensor([[1.5, 2], [3, 4]]), "regression", ("dose", "weight"))
    assert (targets["dose"], targets["weight"]) == ([1.5, 3], [2, 4])
