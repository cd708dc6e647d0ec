"""FedLESAM: sharpness-aware local training along the last change of the global model.

Fan, Hu, Yao, Niu, Zhang, Sugiyama, Wang, "Locally Estimated Global Perturbations are Better than Local Perturbations for
Federated Sharpness-aware Minimization", 2024, arXiv:2405.18890. A client that received ``theta_old`` when it last took part
and receives ``theta`` now takes its steps with a perturbation that is the same in all of them::

    e = rho (theta_old - theta) / ||theta_old - theta||           0 if it takes part for the first time
    theta_k <- theta_k - lr grad f(theta_k + e)

So each step computes one gradient, FedSAM's two. The norm is over all parameters.

The authors' code (``optimizer/LESAM.py`` of MediaBrain-SJTU/FedLESAM) computes another perturbation: its index into the
flat update is the number of the parameter tensor, so all entries of a tensor are shifted by one number. It also takes the
server's last update for all clients, and multiplies SCAFFOLD's correction by 0.1 in ``optimizer/LESAM_S.py``. This
implementation follows the paper; ``fedlesam-s`` and ``fedlesam-d`` are compositions with SCAFFOLD and FedDyn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.models.execution import GradFn
from unskew.protocol.rules import ClientRule, Context, Method, Tensors
from unskew.protocol.search_space import Space, log_range


@dataclass(frozen=True)
class FedLESAM(ClientRule):
    """Sharpness-aware local training with perturbations from received models.

    Attributes:
        rho: Radius of the perturbation, as in the authors' code; 0 is FedAvg.
    """

    name: ClassVar[str] = "fedlesam"
    summary: ClassVar[str] = "sharpness-aware local training along the last change of the global model"
    paper: ClassVar[str] = "Fan et al. 2024, arXiv:2405.18890"
    # One decade on each side of the authors' 0.1.
    spaces: ClassVar[Mapping[str, Space]] = {"rho": log_range(0.01, 1.0)}

    rho: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1

    def conflict_with(self, method: Method) -> str | None:
        """Reject methods with which clients receive no model, or successive ones that are not comparable."""
        if method.sync is not None and not method.sync.trains_global_model:
            return (
                f"fedlesam perturbs along the change of the model that a client receives, but with {method.sync.name} it "
                "receives none. Remove one of them."
            )
        other = next((rule.name for rule in method.rules if rule.successive_models_differ), None)
        if other is None:
            return None
        return (
            f"fedlesam compares the models that a client receives one after the other, but with {other} they are not the "
            "same part of the same model. Remove one of them."
        )

    def begin(self, ctx: Context) -> Tensors:
        """Compute the perturbation; of a part of the model that is not received, it is 0."""
        received = ctx.last_received()
        change = ctx.state.get("start", received) - received
        # The lower bound of the norm keeps the perturbation zero if the model did not change.
        return {"e": change * (self.rho / torch.linalg.vector_norm(change).clamp_min(1e-12)), "start": received}

    def gradient(self, grad_fn: GradFn, ctx: Context, carry: Tensors) -> GradFn:
        """Compute the gradient at ``theta_k + e``."""
        return (lambda v, batch: grad_fn(v + carry["e"], batch)) if self.rho else grad_fn

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """Store the received model."""
        ctx.state["start"] = carry["start"]
