"""FedAvg: the mean of the clients' models is the next model.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from Decentralized
Data", 2016, arXiv:1602.05629, Algorithm 1: ``theta <- sum_k p_k theta_k`` with ``p_k = n_k / sum_j n_j``. In terms of
updates, this is ``theta <- theta + sum_k p_k delta_k``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from unskew.protocol.rules import Method, ServerRule, Tensors, Updates


@dataclass(frozen=True)
class FedAvg(ServerRule):
    """Federated averaging.

    Attributes:
        eta: Server learning rate; 1 is the paper's.
        discard_late: With delays, discard updates of earlier rounds. By default they are averaged in the round in which
            they arrive. Synchronous FedAvg as in Equation 3 of the Feddle paper discards them.
    """

    name: ClassVar[str] = "fedavg"
    summary: ClassVar[str] = "average of the clients' models"
    paper: ClassVar[str] = "McMahan et al. 2016, arXiv:1602.05629"

    eta: Annotated[float, Field(gt=0)] = 1.0
    discard_late: bool = False

    @property
    def needs(self) -> Collection[str]:  # type: ignore[override]
        """``same_round`` if late updates are discarded."""
        return ("same_round",) if self.discard_late else ()

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """``v <- v + eta * sum_k p_k delta_k``."""
        return {"v": state["v"].add(updates.aggregate.delta, alpha=self.eta)}


def server_rule(method: Method) -> ServerRule:
    """Return the server rule of a method, or ``FedAvg()`` if it has none."""
    return method.server or FedAvg()
