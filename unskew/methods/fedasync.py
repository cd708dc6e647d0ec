"""FedAsync: every update moves the model as it arrives, the less the older it is.

Xie, Koyejo, Gupta, "Asynchronous Federated Optimization", 2019, arXiv:1903.03934, Algorithm 1. For each update in the order
of arrival, with ``omega_j`` the client's whole model and ``s`` its age in versions of the server, one version per update::

    omega <- (1 - alpha_s) omega + alpha_s omega_j,    alpha_s = alpha0 * staleness(s)

    constant     1
    polynomial   (1 + s)^(-a)
    hinge        1 if s <= b, else 1 / (a (s - b) + 1)

The paper's clients also have a proximal term: ``fedasync+fedprox``. The server needs every single model, and remembers
which one each client on its way was sent. With ``alpha0 = 1`` and constant staleness the last arrival replaces the model.
A client's whole model is mixed in, its normalization statistics too.
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
    """Asynchronous federated optimisation.

    Attributes:
        alpha0: Weight of an update that is not stale.
        staleness: How the weight falls with the age.
        a: Steepness of ``polynomial`` and ``hinge``; the paper has 0.5 and 10.
        b: Age up to which ``hinge`` does not fall; the paper has 4.
    """

    name: ClassVar[str] = "fedasync"
    summary: ClassVar[str] = "every update moves the model as it arrives"
    paper: ClassVar[str] = "Xie et al. 2019, arXiv:1903.03934"
    # The grids of Zhu et al. 2025 (arXiv:2503.20138).
    spaces: ClassVar[Mapping[str, Space]] = {"alpha0": one_of(0.2, 0.4, 0.8), "a": one_of(0.1, 0.5, 0.9)}
    weights: ClassVar[Weights | None] = "uniform"
    needs = ("individual", "sent_model")

    alpha0: Annotated[float, Field(gt=0, le=1)] = 0.4
    staleness: Literal["constant", "polynomial", "hinge"] = "polynomial"
    a: Annotated[float, Field(ge=0)] = 0.5
    b: Annotated[float, Field(ge=0)] = 4.0

    def weight(self, age: int) -> float:
        """``alpha_s`` for an update that is ``age`` versions old."""
        if self.staleness == "polynomial":
            return self.alpha0 * float((1 + age) ** -self.a)
        if self.staleness == "hinge" and age > self.b:
            return self.alpha0 / (self.a * (age - self.b) + 1)
        return self.alpha0

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """Each arrival in turn."""
        v, b = state["v"], updates.b_global
        for number, update in enumerate(updates):
            assert update.start is not None
            alpha = self.weight(updates.version + number - update.version)
            v = v + alpha * (update.start + update.delta - v)
            b = b + alpha * (update.buffers - b)
        return {"v": v, "b": b}
