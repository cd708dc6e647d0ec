"""Names of metrics in configurations."""

import re

import pytest

from unskew.config.metrics import validate_metric


def test_an_unknown_metric_lists_each_known_one_once():
    with pytest.raises(ValueError, match="There is no metric 'dice2'") as problem:
        validate_metric("dice2")
    known = re.search("Known: (.*)", str(problem.value))[1].split(", ")
    assert "brier" in known
    assert len(known) == len({*known})
