"""Which slices of the model and of its statistics cross the network in a round."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from unskew.models.groups import statistics_mask
from unskew.models.vector import ModelSpec, mask_of
from unskew.protocol.messages import Slices, Tensors
from unskew.protocol.rules import Sync


def complement(slices: Slices, size: int) -> Slices:
    """The rest of a vector of ``size`` elements; ``slices`` are in order.

    >>> complement((slice(2, 4), slice(7, 9)), 9)
    (slice(0, 2, None), slice(4, 7, None))
    """
    starts, stops = [0, *(s.stop for s in slices)], [*(s.start for s in slices), size]
    return tuple(slice(a, b) for a, b in zip(starts, stops, strict=True) if a < b)


class Exchange:
    """The ``sync`` slot of a method at work on one model; without one, everything travels.

    Args:
        sync: The rule, or None.
        spec: The model's layout.
    """

    def __init__(self, sync: Sync | None, spec: ModelSpec):
        self.sync, self.spec = sync, spec
        self._mask = lru_cache(maxsize=64)(self._made_mask)

    def slices(
        self, rules: dict[str, Tensors], round: int, client: int, last: int | None
    ) -> tuple[Slices | None, Slices | None]:
        """The slices that a client downloads and uploads; None stands for all.

        Args:
            rules: States of the rules' halves at the server.
            round: Of the broadcast.
            client: Who.
            last: The round in which it last took part, or None.
        """
        if self.sync is None:
            return None, None
        return self.sync.travels(rules[self.sync.name], round, client, last, self.spec)

    def _made_mask(self, edges: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
        return mask_of([slice(*pair) for pair in edges], self.spec.size).to(device)

    def statistics(self, slices: Slices | None, b: Tensor) -> int:
        """Bytes of the statistics that travel with the slices."""
        count = len(b) if slices is None else int(statistics_mask(self.spec, slices).sum())
        return count * b.element_size()

    def picked(self, slices: Slices | None, new: Tensor, old: Tensor) -> Tensor:
        """``new`` on the slices of the vector, ``old`` elsewhere."""
        if slices is None:
            return new
        edges = tuple((piece.start, piece.stop) for piece in slices)
        return torch.where(self._mask(edges, new.device), new, old)

    def picked_statistics(self, slices: Slices | None, new: Tensor, old: Tensor) -> Tensor:
        """The server's next statistics: those that were sent, else the last ones."""
        return new if slices is None else torch.where(statistics_mask(self.spec, slices).to(new.device), new, old)

    def only_sent(self, up: Slices | None, new: Tensors, old: Tensors) -> Tensors:
        """A server rule's next state; what it holds per parameter stays as it was where nothing was sent."""
        if up is None:
            return new
        same = {name: old[name] for name in new if name in old and new[name].shape == (self.spec.size,)}
        return {name: self.picked(up, t, same[name]) if name in same else t for name, t in new.items()}
