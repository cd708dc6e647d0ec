"""Slot ``server``: rules that compute the next model."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.messages import Tensors
from unskew.protocol.rule import MetricSpec, Rule
from unskew.protocol.updates import Updates


class ServerRule(Rule):
    """``server`` slot: computes the next model, ``state["v"]``, from updates."""

    steps_without: ClassVar[Literal["updates", "clients"] | None] = None
    """``"updates"``: ``step`` is also called in rounds without updates; ``"clients"``: no client takes part at all."""

    summary_metrics: ClassVar[tuple[MetricSpec, ...]] = ()
    """Metrics of the method that the run summary repeats."""

    updates_per_step: int | None = None
    """Number of updates to collect, over several rounds if necessary, before ``step`` is called; None to call it with the
    updates of each round."""

    def init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Return the server state before the first round; it contains at least ``"v"``.

        Args:
            v: Initial model, ``[d]``.
            federation_info: Server's information about the federation.
        """
        return {"v": v}

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """Return the server state after applying updates.

        An entry ``EVALUATED`` is the model that is evaluated and saved; by default it is ``state["v"]``. An entry ``"b"``
        sets the model's new buffers ``[m]`` and is removed from the state. By default, the new buffers are the weighted
        mean of the clients' buffers.

        Args:
            state: Current state; ``state["v"]`` is the model.
            updates: Updates, at least one unless ``steps_without`` is set.
        """
        raise NotImplementedError
