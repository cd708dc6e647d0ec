"""Slices of the model and of its buffers that are exchanged in a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from unskew.errors import ConfigError
from unskew.models.layer_groups import buffer_mask
from unskew.models.spec import ModelSpec, slices_mask
from unskew.protocol.messages import Slices, Tensors
from unskew.protocol.rules import SyncRule
from unskew.protocol.updates import Masks


def complement_slices(slices: Slices, size: int) -> Slices:
    """Return the complement of sorted slices in a vector.

    Args:
        slices: Slices in ascending order.
        size: Length of the vector.

    >>> complement_slices((slice(2, 4), slice(7, 9)), 9)
    (slice(0, 2, None), slice(4, 7, None))
    """
    starts, stops = [0, *(s.stop for s in slices)], [*(s.start for s in slices), size]
    return tuple(slice(a, b) for a, b in zip(starts, stops, strict=True) if a < b)


def subtract_slices(slices: Slices | None, others: Slices | None, size: int) -> Slices:
    """Return the parts of ``slices`` that are in none of ``others``.

    Args:
        slices: Slices in ascending order; None for the whole vector.
        others: Slices to remove; None for the whole vector.
        size: Length of the vector.

    >>> subtract_slices((slice(0, 6),), (slice(2, 3),), 9)
    (slice(0, 2, None), slice(3, 6, None))
    """
    if others is None:
        return ()
    remaining: list[slice] = []
    for span in (slice(0, size),) if slices is None else slices:
        start = span.start
        for other in others:
            if other.stop <= start or other.start >= span.stop:
                continue
            if other.start > start:
                remaining.append(slice(start, other.start))
            start = max(start, other.stop)
        if start < span.stop:
            remaining.append(slice(start, span.stop))
    return tuple(remaining)


def check_slices(edges: Sequence[tuple[int, int, int | None]], size: int, who: str) -> None:
    """Validate that slices are in ascending order, do not overlap and are within the vector.

    Args:
        edges: Start, stop and step of each slice.
        size: Length of the vector.
        who: Name of the rule's hook, for the error message.

    Raises:
        ConfigError: If a slice is invalid.
    """
    end = 0
    for start, stop, step in edges:
        valid = isinstance(start, int) and isinstance(stop, int) and step in (None, 1)
        if not valid or not end <= start <= stop <= size:
            raise ConfigError(
                f"{who} must return slices of the {size} parameters in ascending order, without overlap, with start and "
                f"stop and without a step, but got {slice(start, stop, step)}."
            )
        end = stop


def buffer_bytes(spec: ModelSpec, slices: Slices | None, b: Tensor) -> int:
    """Return the size in bytes of the buffers that are sent with slices of the model.

    Args:
        spec: Layout of the model.
        slices: Slices that are sent; None for all.
        b: Buffers of the model, ``[m]``.
    """
    count = len(b) if slices is None else int(buffer_mask(spec, slices).sum())
    return count * b.element_size()


class SliceExchange:
    """Exchanged slices of one model, as selected by the ``sync`` rule; without a rule, everything is exchanged.

    Args:
        sync: Sync rule of the method, or None.
        spec: Layout of the model.
    """

    def __init__(self, sync: SyncRule | None, spec: ModelSpec):
        self.sync, self.spec = sync, spec
        self._masks = lru_cache(maxsize=64)(self._made_masks)
        self._checked = lru_cache(maxsize=64)(self._made_check)
        if sync is not None:
            check_slices(
                [(span.start, span.stop, span.step) for span in sync.local_slices(spec)],
                spec.size,
                f"{sync.name}.local_slices",
            )

    def slices(
        self, rules: dict[str, Tensors], round: int, client: int, last: int | None
    ) -> tuple[Slices | None, Slices | None]:
        """Return the slices that a client downloads and uploads; None for all.

        Args:
            rules: Server state of each rule.
            round: Round of the broadcast.
            client: Client number.
            last: Last round in which the client took part, or None.
        """
        if self.sync is None:
            return None, None
        both = self.sync.exchanged_slices(rules[self.sync.name], round, client, last, self.spec)
        for slices in both:
            if slices is not None:
                self._checked(tuple((span.start, span.stop, span.step) for span in slices))
        return both

    def check_equal_slices(
        self, rules: dict[str, Tensors], round: int, last_rounds: Mapping[int, int], clients: int
    ) -> None:
        """Validate that all clients upload the same slices in a round, whether they take part or not.

        Args:
            rules: Server state of each rule.
            round: Number of the round, from 0.
            last_rounds: Last round in which each client took part.
            clients: Number of clients of the federation.

        Raises:
            ConfigError: If two clients upload different slices.
        """
        if self.sync is None:
            return
        uploads = [self.slices(rules, round, client, last_rounds.get(client))[1] for client in range(clients)]
        if any(slices != uploads[0] for slices in uploads):
            raise ConfigError(
                f"With {self.sync.name}, clients upload different slices of the model, so the entries that change show who "
                "takes part, which another rule must hide. Let all clients upload the same slices, or remove that rule."
            )

    def _made_check(self, edges: tuple[tuple[int, int, int | None], ...]) -> None:
        check_slices(edges, self.spec.size, f"{self.sync.name}.exchanged_slices" if self.sync else "")

    def _made_masks(self, edges: tuple[tuple[int, int], ...], device: torch.device) -> Masks:
        slices = [slice(*pair) for pair in edges]
        return slices_mask(slices, self.spec.size).to(device), buffer_mask(self.spec, slices).to(device)

    def masks(self, slices: Slices | None, device: torch.device) -> Masks | None:
        """Return masks of the parameters in the slices and of the buffers sent with them; None for all.

        Args:
            slices: Slices that are sent; None for all.
            device: Device of the masks.
        """
        return None if slices is None else self._masks(tuple((span.start, span.stop) for span in slices), device)

    def only_sent(self, sent: Masks | None, new: Tensors, old: Tensors) -> Tensors:
        """Return a server rule's next state; state per parameter is unchanged in entries that no client sent.

        Args:
            sent: Masks of the entries that some client sent; None for all.
            new: New state of the rule.
            old: State before this round.
        """
        if sent is None:
            return new
        same = {name: old[name] for name in new if name in old and new[name].shape == (self.spec.size,)}
        return {name: torch.where(sent[0], t, same[name]) if name in same else t for name, t in new.items()}
