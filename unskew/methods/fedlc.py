"""FedLC: calibrated logits give rare classes of a client a larger margin, and leave out absent ones.

Zhang, Li, Li, Xu, Wu, Ding, Wu, "Federated Learning with Label Distribution Skew via Logits Calibration", 2022,
arXiv:2209.00189, Equation 8. With ``n_kc`` samples of class ``c`` at client ``k``::

    CE(z - tau n_k^(-1/4), y)

For an absent class, ``n_kc^(-1/4)`` is infinite, so the class is excluded from the softmax. The counts are those of the
client: counts of all clients, as in some other libraries, give FedAvg if classes are balanced over the federation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.methods.logit_adjustment import LogitAdjustment, single_class_note
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, log_range


@dataclass(frozen=True)
class FedLC(LogitAdjustment):
    """Logits calibration.

    Attributes:
        tau: Strength of the margins; 0 is FedAvg, which excludes no class.
    """

    name: ClassVar[str] = "fedlc"
    summary: ClassVar[str] = "larger margins for rare classes of a client, absent classes left out"
    paper: ClassVar[str] = "Zhang et al. 2022, arXiv:2209.00189"
    class_targets: ClassVar[bool] = True
    # One decade on each side of the default.
    spaces: ClassVar[Mapping[str, Space]] = {"tau": log_range(0.1, 10.0)}

    tau: Annotated[float, Field(ge=0)] = 1.0

    @property
    def neutral(self) -> bool:
        """True if ``tau`` is 0."""
        return self.tau == 0

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Warn about clients with one class."""
        if self.neutral:
            return ()
        remedy = (
            "They learn nothing. Use fedrs, which keeps absent classes, or a partition with more classes per client."
        )
        return single_class_note(run.federation, "fedlc's loss", remedy)

    def adjust(self, logits: Tensor, counts: Tensor) -> Tensor:
        """Return ``z - tau n_k^(-1/4)``, which is ``-inf`` for absent classes."""
        return logits - self.tau * counts**-0.25
