"""Names of run folders."""

from __future__ import annotations

import hashlib

LONGEST_NAME = 200
"""Longest name of a folder in bytes; file systems allow 255, and files get a suffix."""


def folder_name(spelling: str) -> str:
    """Convert a method expression to a folder name, which is short enough for file systems.

    >>> folder_name("fedprox:mu=0.1+scaffold"), folder_name(f"digits-fedprox:mu=0.{'1' * 300}-seed0")
    ('fedprox-mu=0.1+scaffold', 'digits-fedprox-mu=0.111...111-seed0')
    """
    name = "".join(c if c.isalnum() or c in "+=.,_-" else "-" for c in spelling)
    data = name.encode()
    start, end = (part.decode(errors="ignore") for part in (data[: LONGEST_NAME // 2], data[-LONGEST_NAME // 2 :]))
    digest = hashlib.sha256(spelling.encode()).hexdigest()[:8]
    return name if len(data) <= LONGEST_NAME else f"{start}-{digest}-{end}"
