"""Where a data rule works before the first round, and whom it tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from unskew.data.federation import Federation

PreparedData = tuple[Federation, dict[int, tuple[int, int]]]
"""A federation as a data rule leaves it, and the bytes up and down that this cost each client."""


def _quiet(*_: object) -> None:
    return None


@dataclass(frozen=True)
class Workspace:
    """What a preparation may use beside the data.

    Attributes:
        folder: Where it keeps its work and what it made, or None to keep nothing.
        shared: Whether other runs use that folder, too; then it takes a folder within, named after what it makes.
        device: Where it computes.
        given: What another run made, to be taken instead; or None.
        tell: Told what is being done, how much of it is done and how much there is.
        warn: Told what the user should know.
    """

    folder: Path | None = None
    shared: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    given: Path | None = None
    tell: Callable[[str, float, float], None] = _quiet
    warn: Callable[[str], None] = _quiet

    def within(self, name: str) -> Workspace:
        """The workspace for what ``name`` identifies."""
        return replace(self, folder=self.folder / name, shared=False) if self.folder and self.shared else self


NOWHERE = Workspace()
