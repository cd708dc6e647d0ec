"""What crosses the network in a round: which slices of the model and of its statistics, and how many bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from unskew.models.groups import layer_groups
from unskew.models.vector import ModelSpec, mask_of
from unskew.protocol.rules import Slices, Sync, Tensors


def complement(slices: Slices, size: int) -> Slices:
    """The rest of a vector of ``size`` elements; ``slices`` are in order.

    >>> complement((slice(2, 4), slice(7, 9)), 9)
    (slice(0, 2, None), slice(4, 7, None))
    """
    starts, stops = [0, *(s.stop for s in slices)], [*(s.start for s in slices), size]
    return tuple(slice(a, b) for a, b in zip(starts, stops, strict=True) if a < b)


class SyncState:
    """The ``sync`` slot of a method at work on one model; without one, everything travels.

    Args:
        sync: The rule, or None.
        spec: The model's layout.
    """

    def __init__(self, sync: Sync | None, spec: ModelSpec):
        self.sync, self.spec = sync, spec
        self.keeps_optimizer = sync is not None and sync.keeps_optimizer
        self.evaluates_mean = sync is not None and sync.evaluates_mean
        self.observes = sync is not None and sync.observes
        self.state: Tensors = {} if sync is None else sync.init(spec)
        self._bound: tuple[Tensors, Sync] | None = None
        self.numbers = 0 if sync is None else sync.numbers(spec)
        self._groups = layer_groups(spec) if sync is not None else ()
        self._masks: dict[tuple[tuple[int, int], ...], tuple[Tensor, Tensor]] = {}

    def slices(self, round: int, client: int, last: int | None) -> tuple[Slices | None, Slices | None]:
        """The slices that a client downloads and uploads; None stands for all."""
        if self.sync is None:
            return None, None
        if self._bound is None or self._bound[0] is not self.state:
            self._bound = self.state, self.sync.now(self.state)  # once per state, not once per client
        return self._bound[1].travels(round, client, last, self.spec)

    def observe(self, round: int, mean: Tensor, squares: Tensor) -> None:
        """Tell the rule each group's consensus distance.

        Args:
            round: Of the updates.
            mean: Of the clients' models minus the server's, ``[d]``.
            squares: Mean of the squares of these differences, ``[d]``.
        """
        assert self.sync is not None
        spread = (squares - mean.square()).clamp_min(0)
        distances = torch.stack([torch.stack([spread[s].sum() for s in g.slices]).sum() for g in self._groups])
        self.state = self.sync.observe(self.state, round, distances, self.spec)

    def masks(self, slices: Slices, like: Tensor) -> tuple[Tensor, Tensor]:
        """Which parameters, and which statistics, are in ``slices``: boolean ``[d]`` and ``[m]``."""
        key = tuple((piece.start, piece.stop) for piece in slices)
        if key not in self._masks:
            v = mask_of(slices, self.spec.size)
            b = mask_of((), sum(self.spec.buffer_sizes))
            for group in self._groups:
                if all(bool(v[piece].all()) for piece in group.slices):
                    for piece in group.buffers:
                        b[piece] = True
            self._masks[key] = v.to(like.device), b.to(like.device)
        return self._masks[key]

    def statistics(self, slices: Slices | None, b: Tensor) -> int:
        """Bytes of the statistics that travel with the slices."""
        count = len(b) if slices is None else int(self.masks(slices, b)[1].sum())
        return count * b.element_size()

    def start(self, down: Slices | None, b: Tensor, kept: Tensor | None) -> Tensor:
        """The statistics with which a client begins: the server's, but for those that stayed with it."""
        if down is None or kept is None:
            return b
        return torch.where(self.masks(down, b)[1], b, kept.to(b.device))

    def chosen(self, slices: Slices | None, new: Tensor, old: Tensor) -> Tensor:
        """``new`` on the slices of the vector, ``old`` elsewhere."""
        return new if slices is None else torch.where(self.masks(slices, new)[0], new, old)

    def merged(self, up: Slices | None, new: Tensor, old: Tensor) -> Tensor:
        """The server's next statistics: those that were sent, else the last ones."""
        return new if up is None else torch.where(self.masks(up, new)[1], new, old)

    def only_sent(self, up: Slices | None, new: Tensors, old: Tensors) -> Tensors:
        """A server rule's next state; what it holds per parameter stays as it was where nothing was sent."""
        if up is None:
            return new
        same = {name: old[name] for name in new if name in old and new[name].shape == (self.spec.size,)}
        return {name: self.chosen(up, t, same[name]) if name in same else t for name, t in new.items()}
