"""Clients of a federation as a single client sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unskew.data.federation import ClientData


@dataclass(frozen=True)
class SingleClientView(Sequence[ClientData]):
    """Clients of a federation as one client sees them: only its own samples, and empty data for the others."""

    site_data: ClientData
    total: int

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, k: int) -> ClientData:  # type: ignore[override]
        if not 0 <= k < self.total:
            raise IndexError(f"There is no client {k}; this federation has {self.total}.")
        own = self.site_data
        return own if k == own.id else ClientData(k, own.x[:0], own.y[:0], own.x[:0], own.y[:0])
