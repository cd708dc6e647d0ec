"""Missing values in tables: texts and numbers that mean one, in all file formats."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unskew.data.readers.arrow import pa, pc

LOG = logging.getLogger("unskew")
NOT_AVAILABLE = frozenset(
    ["#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"]
    + ["N/A", "NA", "NULL", "NaN", "n/a", "nan", "null"]
)
"""Usual texts for a missing value, as pandas and R write them."""
PLACEHOLDERS = NOT_AVAILABLE.union(
    [*"?.-*–—", "--", "...", "#DIV/0!", "#VALUE!", "#REF!", "(null)", "\\N", "NONE", "None", "none"],
    ["n.a.", "N.A.", "na", "n.d.", "unknown", "Unknown", "UNKNOWN", "missing", "Missing"],
)
"""Texts that mean a missing value in a column whose other cells are numbers, truth values or dates."""
SENTINELS = tuple(float(f"{sign}{nines}") for nines in ("99", "999", "9999", "99999") for sign in ("-", ""))


def without_missing(column: Any, name: str, path: Path, missing: Sequence[str] | None) -> Any:
    """Return a column of numbers or text without the values that mean a missing one; report numbers that may mean one.

    Args:
        column: Values of the column; other types are returned unchanged.
        name: Name of the column.
        path: Path of the first file, for messages.
        missing: Texts that mean a missing value, also as numbers; None if they are not known.
    """
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        listed = np.array([float(text) for text in missing or () if is_number(text)])  # in any notation
        numbers = column.cast(pa.float64(), safe=False)
        if len(listed):
            if pa.types.is_floating(kind):  # -99.9 has another value in float32 than in float64
                with np.errstate(over="ignore"):
                    listed = listed.astype(kind.to_pandas_dtype()).astype(np.float64)
            return pc.if_else(pc.is_in(numbers, pa.array(listed, pa.float64())), None, column)
        if column.null_count < len(column):
            report_sentinels(numbers, name, path)
    elif missing and (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        return pc.if_else(pc.is_in(pc.utf8_trim_whitespace(column), pa.array(missing, kind)), None, column)
    return column


def report_sentinels(numbers: Any, name: str, path: Path) -> None:
    """Log numbers such as -999 that repeat far from all others and may mean a missing value.

    Args:
        numbers: Values of the column.
        name: Name of the column.
        path: Path of the first file.
    """
    extremes = pc.min_max(numbers).as_py()
    for value in {*extremes.values()}.intersection(SENTINELS):
        others = pc.min_max(pc.filter(numbers, pc.not_equal(numbers, value))).as_py()
        times = pc.sum(pc.equal(numbers, value)).as_py()
        if times > 1 and others["min"] is not None:
            gap = min(abs(value - others["min"]), abs(value - others["max"]))
            if gap > 2 * (others["max"] - others["min"]):
                LOG.info(
                    "%s: %g in %d of %d rows of the column %s may mean a missing value; if so, set csv.missing to it",
                    path.name, value, times, len(numbers), name,
                )  # fmt: skip


def is_number(text: str) -> bool:
    """Return whether a text with a decimal point is a number; underscores are not allowed."""
    try:
        return text.isascii() and "_" not in text and not math.isnan(float(text))
    except ValueError:
        return False
