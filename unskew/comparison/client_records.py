"""Reading of ``clients.jsonl``, whose content is external input and is validated here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unskew.comparison.summary_statistics import is_usable_number
from unskew.errors import CheckpointError
from unskew.filesystem import parse_json, read_file
from unskew.tasks.primary_metric import SCORES


def read_clients(path: Path) -> list[dict[str, Any]]:
    """Read the records of ``clients.jsonl``; empty if it does not exist.

    Args:
        path: File to read.

    Raises:
        CheckpointError: If the file is corrupted.
    """
    if not path.is_file():
        return []
    damaged = CheckpointError(f"{path} is corrupted. Remove it to continue without it.")
    try:
        rows = [parse_json(line) for line in read_file(path).splitlines()]
    except (OSError, ValueError, RecursionError) as error:
        raise damaged from error
    if not all(map(_is_client_row, rows)):
        raise damaged
    return rows


def _is_client_row(row: Any) -> bool:
    """Return whether a record has numbers where reports and comparisons read numbers."""
    if not isinstance(row, dict) or not all(is_usable_number(row.get(name)) for name in ("client", "samples")):
        return False
    class_counts = [row.get(name, {}) for name in ("class_counts", "support")]
    if not all(isinstance(counts, dict) for counts in class_counts):
        return False
    counted = [item for counts in class_counts for item in counts.items()]
    counts = [row["samples"], row.get("num_held_out", 0), row.get("events", 0), *(count for _, count in counted)]
    shares = [row.get(name) for score in SCORES for name in (score, f"personal_{score}")]
    return (
        all(key.isascii() and key.isdigit() and len(key) < 6 for key, _ in counted)
        and all(is_usable_number(count) and count >= 0 for count in counts)
        and all(value is None or is_usable_number(value) for value in shares)
    )
