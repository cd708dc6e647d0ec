"""Names of clients, groups, categories, classes and columns: comparison after Unicode normalization and trimming."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

import numpy as np

from unskew.errors import DataError


def clean_name(text: str) -> str:
    r"""Return a name in Unicode normal form C and without surrounding spaces.

    >>> clean_name(" Orle\u0301ans ") == "Orl\u00e9ans"
    True
    """
    return unicodedata.normalize("NFC", text).strip()


def clean_names(values: Iterable[str], what: str) -> dict[str, str]:
    """Return the clean form of each distinct name.

    Args:
        values: Names.
        what: What the names are, for the error.

    Raises:
        DataError: If two names differ only by surrounding spaces or by the form of their accents.
    """
    clean_of: dict[str, str] = {}
    written: dict[str, str] = {}
    for value in dict.fromkeys(values):
        clean_of[value] = clean_name(value)
        other = written.setdefault(clean_of[value], value)
        if other != value:
            reason = "spaces" if other.strip() == value.strip() else "spaces or by the encoding of their accents"
            raise DataError(
                f"{what} has the names {other!r} and {value!r}, which differ only by {reason}. Write them in the same way."
            )
    return clean_of


def with_clean_names(values: np.ndarray, what: str | None = None) -> np.ndarray:
    """Return an array of names with clean names; arrays of other types are returned unchanged.

    Args:
        values: Names, ``[n]``, as objects or strings; missing names are None.
        what: What the names are, for the error about two names for the same thing; None does not check for it.
    """
    if values.dtype.kind not in "OU":
        return values
    distinct = sorted({value for value in values.tolist() if isinstance(value, str)})
    clean_of = {name: clean_name(name) for name in distinct} if what is None else clean_names(distinct, what)
    if all(name == clean for name, clean in clean_of.items()):
        return values
    return np.array([clean_of.get(value, value) for value in values.tolist()], dtype=object)
