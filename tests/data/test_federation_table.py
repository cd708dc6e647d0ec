"""Federations in notebooks: clients, classes and columns, with all text escaped."""

import numpy as np
import pytest
from support.html_cells import Cells

from unskew.data.federation import Federation
from unskew.data.federation_table import CLIENTS_SHOWN

X = np.zeros((10, 2), "float32")


def test_a_federation_shows_its_clients_and_classes():
    """A class may have the name of another column."""
    y = np.array([0, 1] * 5)
    test, names = (X, y), ("training", "<b>")
    fed = Federation.from_arrays(
        [(X, y), (X[:6], y[:6])], test, class_names=names, client_names=["a&b", "c"], holdout=0.5
    )
    page = Cells(fed._repr_html_())
    counts = fed.class_counts()
    assert page.paragraphs == [repr(fed)]
    assert page.rows == [
        ["client", "training", "held out", "class training", "class <b>"],
        ["a&b", "5", "5", *map(str, counts[0])],
        ["c", "3", "3", *map(str, counts[1])],
    ]


def test_a_federation_without_classes_shows_sizes():
    fed = Federation.from_arrays([(X, np.arange(10.0))], (X, np.arange(10.0)), task="regression")
    assert Cells(fed._repr_html_()).rows == [["client", "training", "held out"], ["client 0", "9", "1"]]


def test_a_table_shows_the_roles_of_its_columns():
    frame = pytest.importorskip("pandas").DataFrame({"age": np.arange(10.0), "<i>": np.arange(10.0)})
    y = np.array([0, 1] * 5)
    page = Cells(Federation.from_arrays([(frame, y)], (frame, y))._repr_html_())
    assert page.rows[-3:] == [["column", "role"], ["age", "input"], ["<i>", "input"]]


def test_many_clients_are_shortened_with_a_note():
    y = np.array([0, 1] * 5)
    page = Cells(Federation.from_arrays([(X, y)] * (CLIENTS_SHOWN + 1), (X, y))._repr_html_())
    assert len(page.rows) == 1 + CLIENTS_SHOWN
    assert page.paragraphs[1] == "The table has at most 20 clients and 20 classes."


def test_clients_that_load_their_data_are_only_counted():
    class Lazy:
        def __len__(self):
            return 3

        def __getitem__(self, client):
            raise AssertionError("a client was loaded")

    y = np.array([0, 1] * 5)
    test = Federation.from_arrays([(X, y)], (X, y)).test
    page = Cells(Federation(clients=Lazy(), test=test, classes=2)._repr_html_())
    assert page.rows == []
    assert "clients=3" in page.paragraphs[0]
