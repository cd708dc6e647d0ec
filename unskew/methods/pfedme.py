"""pFedMe: personal models from Moreau envelopes of the clients' losses.

Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", 2020, arXiv:2006.08848, Algorithm 1. In every
local step, with one batch::

    K times  t   <- t - eta_p (grad f_k(t) + lam (t - w_k) + decay t)
    w_k <- w_k - lr lam (w_k - t)
    server   theta <- (1 - beta) theta + beta sum_k p_k w_k

``w_k`` starts from the received model, and so does ``t`` before the first step of a round; later steps continue from the
last ``t``. The personal model is ``t`` after the last step. The defaults are those of the authors' code (CharlieDinh/pFedMe),
which uses ``lr=0.005``, 20 steps and batches of 20. There all clients train in each round and a subset is averaged;
here only the cohort trains. Weights are the numbers of samples, as there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.methods.fedavg import FedAvg
from unskew.methods.perfedavg import need_plain_sgd
from unskew.models.execution import Batch, GradFn
from unskew.protocol.rules import PERSONAL, ClientRule, Context, Rule, Tensors
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, log_range


@dataclass(frozen=True)
class PFedMe(ClientRule):
    """Personal models from Moreau envelopes.

    Attributes:
        lam: Strength of the pull between the personal model ``t`` and the client's global model ``w_k``. With 0, the
            global model never changes.
        K: Steps on the personal model per local step.
        eta_p: Learning rate of the personal model.
        beta: Server learning rate; the authors' tuned runs use 2. Other values than 1 fill the slot ``server``.
        decay: Weight decay of the personal model.
    """

    name: ClassVar[str] = "pfedme"
    summary: ClassVar[str] = "a personal model near the global one, which follows it (Moreau envelopes)"
    paper: ClassVar[str] = "Dinh et al. 2020, arXiv:2006.08848"
    has_personal_model: ClassVar[bool] = True
    # One decade around the defaults.
    spaces: ClassVar[Mapping[str, Space]] = {"lam": log_range(1.0, 50.0), "eta_p": log_range(0.01, 0.5)}

    lam: Annotated[float, Field(ge=0)] = 15.0
    K: Annotated[int, Field(ge=1)] = 5
    eta_p: Annotated[float, Field(gt=0)] = 0.09
    beta: Annotated[float, Field(gt=0)] = 1.0
    decay: Annotated[float, Field(ge=0)] = 0.001

    def acts_before(self, other: ClientRule) -> bool:
        """Return whether the other rule adds a vector to the gradient: each of the ``K`` steps would contain it."""
        return other.shifts_gradient

    @property
    def slots(self) -> Mapping[str, Rule]:  # type: ignore[override]
        """The client slot, and the server slot unless ``beta`` is 1."""
        return {"client": self} if self.beta == 1 else {"client": self, "server": FedAvg(eta=self.beta)}

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate that the optimizer is plain SGD."""
        need_plain_sgd(self.name, run)
        return ()

    def begin(self, ctx: Context) -> Tensors:
        """``t = theta``."""
        return {"t": ctx.v_global.clone()}

    def gradient(self, grad_fn: GradFn, ctx: Context, carry: Tensors) -> GradFn:
        """``lam (w_k - t)``, after ``K`` steps on ``t``."""

        def envelope(w: Tensor, batch: Batch) -> Tensor:
            t = carry["t"]
            for step in range(self.K):
                g = grad_fn(t, batch if step == 0 else batch.untracked())
                t = t - self.eta_p * (g + self.lam * (t - w) + self.decay * t)
            if batch.track:  # ignore additional gradients of a step
                carry["t"] = t
            return self.lam * (w - t)

        return envelope

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """Store the personal model at the client."""
        ctx.state[PERSONAL] = carry["t"]
