"""Checks for authors of plugins and custom methods: of a rule, an engine, a data source and a model.

Each check trains for a moment on small data and raises ``AssertionError`` with the reason if something that unskew relies on
does not hold. Call them in the tests of your package.
"""

from unskew.testing.checks import assert_engines_agree, check_data, check_engine, check_model, check_rule
from unskew.testing.small_problems import SmallBatchNorm, small_federation

__all__ = [
    "SmallBatchNorm",
    "assert_engines_agree",
    "check_data",
    "check_engine",
    "check_model",
    "check_rule",
    "small_federation",
]
