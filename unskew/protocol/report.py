"""Report of a rule on the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Report:
    """Report of a rule on the run.

    Attributes:
        summary: Fields of the run summary, such as a guarantee of the finished run.
        clients: Fields of the rows of ``clients.jsonl``, by client number.
        stop_reason: Reason why no further round may follow, as a sentence; None to continue.
    """

    summary: Mapping[str, Any] = field(default_factory=dict)
    clients: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    stop_reason: str | None = None
