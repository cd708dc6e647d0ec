"""Which of many cases the default suite decides; the others are marked slow and run by ``make test-all``."""

from collections.abc import Sequence
from typing import Any

import pytest


def slow_but(quick: Sequence[Any], cases: Sequence[Any]) -> list[Any]:
    """All cases as parameters, those marked slow that are not named as quick ones."""
    assert all(case in cases for case in quick), "a quick case that there is not would be decided nowhere"
    return [case if case in quick else as_slow(case) for case in cases]


def as_slow(case: Any) -> Any:
    """One case, or a tuple of values of one, marked slow."""
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
