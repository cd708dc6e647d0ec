"""LG-FedAvg: clients keep the lower layers, which extract features, and share the last ones.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think Locally, Act Globally: Federated Learning with
Local and Global Representations", 2020, arXiv:2001.01523, Algorithm 1. A client keeps its body ``phi_k``, receives the head
``h``, and trains both::

    (phi_k, h_k) <- (phi_k, h_k) - lr grad f_k(phi_k, h_k)
    h            <- mean_S h_k

The authors' code (``main_lg.py`` of pliang279/LG-FedAvg) averages uniformly, as here, and starts from a model trained with
FedAvg. A run does so with ``start_from``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from unskew.methods.partial_sharing import PartialSharing, last_layers
from unskew.models.spec import ModelSpec
from unskew.protocol.rules import Slices, Weights
from unskew.protocol.run_context import PreRunContext


@dataclass(frozen=True)
class LGFedAvg(PartialSharing):
    """Personal lower layers and shared last layers.

    Attributes:
        weights: Client weighting with ``client_weighting=auto``; None if the method does not choose one.
        share: Number of last layers that are shared, in order of depth. The authors share 1, and 2 for CIFAR-10.
    """

    name: ClassVar[str] = "lgfedavg"
    summary: ClassVar[str] = "a shared head on each client's own body"
    paper: ClassVar[str] = "Liang et al. 2020, arXiv:2001.01523"
    weights: ClassVar[Weights | None] = "uniform"

    share: Annotated[int, Field(ge=1)] = 1

    def shared_slices(self, spec: ModelSpec) -> Slices:
        """Return the slices of the last layers."""
        return last_layers(spec, self.share, "lgfedavg:share")[1]

    def local_slices(self, spec: ModelSpec) -> Slices:
        """Return the slices of the lower layers."""
        return last_layers(spec, self.share, "lgfedavg:share")[0]

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Warn if all layers are shared, so that the whole model is averaged."""
        notes = super().check(run)
        if self.local_slices(run.spec):
            return notes
        return [
            *notes,
            "lgfedavg keeps no layers at clients, because all are shared: it is FedAvg with uniform weights.",
        ]
