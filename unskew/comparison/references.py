"""Reference rows of a comparison: training on all data in one place, and each client on its own."""

from __future__ import annotations

REFERENCES = ("pooled", "local")
"""Methods that are shown below the others and never ranked."""


def is_reference(spelling: str) -> bool:
    """Whether a method is a reference row.

    >>> is_reference("pooled"), is_reference("fedavg")
    (True, False)
    """
    return spelling in REFERENCES
