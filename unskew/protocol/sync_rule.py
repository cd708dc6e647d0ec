"""Slot ``sync``: rules that select the slices of the model that are exchanged."""

from __future__ import annotations

from typing import ClassVar

from unskew.models.spec import ModelSpec
from unskew.protocol.messages import Slices, Tensors
from unskew.protocol.rule import WithServerHalf


class SyncRule(WithServerHalf):
    """``sync`` slot: selects the slices of the model that are exchanged; other slices stay at the client.

    Normalization buffers are exchanged together with the layer before them. Slices of different rounds cannot be combined.
    """

    supports_delays: ClassVar[bool] = False

    @property
    def trains_sub_models(self) -> bool:
        """True if clients have only a part of the model, and neither store nor train slices that they do not download."""
        return False

    def exchanged_slices(
        self, state: Tensors, round: int, client: int, last: int | None, spec: ModelSpec
    ) -> tuple[Slices, Slices]:
        """Return the slices of the model that a client downloads and uploads in a round.

        If clients upload different slices, each entry of the model is averaged over the clients that upload it.

        Args:
            state: State of the rule's server half.
            round: Number of the round, from 0.
            client: Client number.
            last: Last round in which the client took part; None if it never did.
            spec: Layout of the model.

        Returns:
            Slices to download and slices to upload, each in ascending order, with explicit start and stop, without
            overlap.
        """
        raise NotImplementedError

    def local_slices(self, spec: ModelSpec) -> Slices:
        """Return the slices that always stay at each client, whose personal model has its own values there.

        Args:
            spec: Layout of the model.
        """
        return ()
