"""The model of a round on many nodes: its page says what the script says, and its parts behave as they must."""

import json

import pytest

from speed.cluster import constants, costs, overhead_table, settings_table
from speed.scaling import (
    MODELS,
    RESULTS,
    Constants,
    constants_of,
    filled,
    limit,
    page_of,
    parts,
    scaling_tables,
    seconds,
)


def test_the_pages_have_the_tables_of_what_was_measured():
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else None
    for name, tables in (("scaling", scaling_tables(kept)), ("speed", {"costs": costs(kept)})):
        text = page_of(name).read_text()
        assert filled(text, tables) == text
    other = scaling_tables({"constants": {"store": 9e9, "task": 0.1}})
    assert filled(page_of("scaling").read_text(), other) != page_of("scaling").read_text()
    assert constants_of({"constants": {"store": 9e9}}) == Constants(store=9e9)


@pytest.mark.parametrize("size", MODELS.values())
def test_more_nodes_shorten_training_and_nothing_else(size):
    few, many = (parts(Constants(), nodes, size, 1000, 16, 10.0) for nodes in (2, 8))
    assert few["training"] == 4 * many["training"] - 10.0 * (4 * 8 - 32)
    assert all(few[name] <= many[name] for name in few if name != "training")
    assert seconds(few) >= few["training"]


def test_a_part_that_grows_becomes_the_limit():
    assert limit(parts(Constants(), 100, 62_000, 1000, 16, 10.0)) == "training"
    assert limit(parts(Constants(), 100, 110_000_000, 1000, 16, 10.0)) == "link"
    assert limit(parts(Constants(task=1.0), 100, 62_000, 1000, 16, 10.0)) == "tasks"
    assert limit(parts(Constants(), 100, 62_000, 1000, 16, 10.0, clients=10**10)) == "drawing"


def test_constants_are_the_line_through_what_was_measured():
    rows = [
        {"part": "overhead", "engine": engine, "parameters": d, "cohort": 10, "workers": 2, "seconds": s, "own_seconds": s,
         "megabytes": 1}
        for d in (10**5, 10**6, 10**7)
        for engine, s in (("processes", 0.1), ("ray", 10 * (0.001 + 4 * d / 2e9)))
    ]  # fmt: skip
    found = constants(rows)
    assert found["task"] == pytest.approx(0.001)
    assert found["store"] == pytest.approx(2e9)
    assert "| 100,000 | 10 | 0.100 | 0.012 | -8.80 | 0.00 s |" in overhead_table(rows)[2]
    rows += [
        {"part": "settings", "setting": "A", "engine": engine, "seconds": s}
        for engine, s in (("processes", 0.4), ("ray", 0.5), ("ray", 0.5))
    ]
    assert settings_table(rows)[2:] == ["| A | 2.50 | 2.00 | 0.80 |"]
