"""Slot ``aggregate``: rules that combine the updates of a round into one."""

from __future__ import annotations

from typing import ClassVar

from unskew.protocol.messages import Tensors
from unskew.protocol.rule import WithServerHalf
from unskew.protocol.updates import Combined, Updates


class AggregateRule(WithServerHalf):
    """``aggregate`` slot: combines the updates of a round into one; without such a rule it is their weighted mean."""

    combines_empty: ClassVar[bool] = False
    """True if ``combine`` is also called in rounds without updates, and the server rule applies its result."""

    def combine(self, state: Tensors, updates: Updates) -> tuple[Tensors, Combined]:
        """Combine updates.

        Args:
            state: State of the rule's server half.
            updates: Updates, at least one unless ``combines_empty``; iterate over them if ``needs`` includes
                ``individual``.

        Returns:
            The new state, and the combined update that the server rule applies.
        """
        raise NotImplementedError
