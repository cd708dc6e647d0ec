"""FedAsync: the server applies each update on arrival, with less weight the older it is.

Xie, Koyejo, Gupta, "Asynchronous Federated Optimization", 2019, arXiv:1903.03934, Algorithm 1. For each update in order of
arrival, ``omega_j`` is the client's whole model and ``s`` its staleness in server versions, where each update counts as one
version::

    omega <- (1 - alpha_s) omega + alpha_s omega_j,    alpha_s = alpha0 * staleness(s)

    constant     1
    polynomial   (1 + s)^(-a)
    hinge        1 if s <= b, else 1 / (a (s - b) + 1)

The paper's clients also use a proximal term: ``fedasync+fedprox``. The server needs each individual model, and stores the
model that it sent to each client until its update arrives. With ``alpha0 = 1`` and constant staleness, the last arrival
replaces the global model. A client's normalization buffers are mixed in the same way as its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from unskew.protocol.rules import ServerRule, Tensors, Updates, Weights
from unskew.protocol.search_space import Space, one_of


@dataclass(frozen=True)
class FedAsync(ServerRule):
    """Asynchronous federated optimization.

    Attributes:
        weights: Client weighting with ``client_weighting=auto``; None if the method does not choose one.
        needs: Requirements of the rule, see ``unskew.protocol.requirements``.
        alpha0: Weight of an update that is not stale.
        staleness: How the weight decreases with age: ``constant``, ``polynomial`` or ``hinge``.
        a: Steepness of ``polynomial`` and ``hinge``. The paper uses 0.5 for ``polynomial``, 10 for ``hinge``.
        b: Age up to which ``hinge`` keeps the full weight, as in the paper.
    """

    name: ClassVar[str] = "fedasync"
    summary: ClassVar[str] = "every update moves the model as it arrives"
    paper: ClassVar[str] = "Xie et al. 2019, arXiv:1903.03934"
    averaging = "none"
    # The grids of Zhu et al. 2025 (arXiv:2503.20138).
    spaces: ClassVar[Mapping[str, Space]] = {"alpha0": one_of(0.2, 0.4, 0.8), "a": one_of(0.1, 0.5, 0.9)}
    weights: ClassVar[Weights | None] = "uniform"
    needs = ("individual", "sent_model")
    idle_options = (
        ({"staleness": "constant"}, ("a", "b")),
        ({"staleness": "polynomial"}, ("b",)),
    )

    alpha0: Annotated[float, Field(gt=0, le=1)] = 0.4
    staleness: Literal["constant", "polynomial", "hinge"] = "polynomial"
    a: Annotated[float, Field(ge=0)] = 0.5
    b: Annotated[float, Field(ge=0)] = 4.0

    def weight(self, age: int) -> float:
        """Return ``alpha_s`` for an update that is ``age`` versions old."""
        if self.staleness == "polynomial":
            return self.alpha0 * float((1 + age) ** -self.a)
        if self.staleness == "hinge" and age > self.b:
            return self.alpha0 / (self.a * (age - self.b) + 1)
        return self.alpha0

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """Apply the updates in order of arrival."""
        v, b = state["v"], updates.b_global
        for number, update in enumerate(updates):
            assert update.start is not None
            alpha = self.weight(updates.version + number - update.version)
            v = v + alpha * (update.start + update.delta - v)
            b = b + alpha * (update.buffers - b)
        return {"v": v, "b": b}
