"""FedPer: the last layers are personal and trained together with the shared ones.

Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", 2019, arXiv:1912.00818,
Algorithms 1 and 2. A client receives the base layers ``phi``, keeps its personalization layers ``h_k``, and trains both::

    (phi_k, h_k) <- (phi_k, h_k) - lr grad f_k(phi_k, h_k)
    phi          <- sum_k p_k phi_k

The average is weighted by samples, as in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from unskew.errors import ConfigError
from unskew.methods.partial_sharing import PartialSharing, last_layers
from unskew.models.layer_groups import layer_groups
from unskew.models.spec import ModelSpec
from unskew.protocol.rules import Slices
from unskew.protocol.run_context import PreRunContext


@dataclass(frozen=True)
class FedPer(PartialSharing):
    """Shared base layers and personal last layers, trained together.

    Attributes:
        personal: Number of last layers that stay at the clients, in order of depth (``unskew models MODEL`` shows
            them). 0 is FedAvg.
    """

    name: ClassVar[str] = "fedper"
    summary: ClassVar[str] = "personal last layers, trained together with the shared ones"
    paper: ClassVar[str] = "Arivazhagan et al. 2019, arXiv:1912.00818"

    personal: Annotated[int, Field(ge=0)] = 1

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate that a trained layer is shared."""
        layers = len(layer_groups(run.spec))
        if 1 < self.personal == layers:
            raise ConfigError(
                f"fedper:personal={layers} makes all {layers} layers of the model personal, so nothing would be shared. Use "
                f"personal={layers - 1} or less."
            )
        return super().check(run)

    def shared_slices(self, spec: ModelSpec) -> Slices:
        """Return the slices of the base layers."""
        return last_layers(spec, self.personal, "fedper:personal")[0]

    def local_slices(self, spec: ModelSpec) -> Slices:
        """Return the slices of the personalization layers."""
        return last_layers(spec, self.personal, "fedper:personal")[1]
