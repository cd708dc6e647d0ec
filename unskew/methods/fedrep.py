"""FedRep: all clients share the body of the model, each has a head of its own.

Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning", 2021,
arXiv:2102.07078, Algorithm 1. A client receives the body ``phi``, keeps its head ``h_k``, and in every round::

    h_k   <- h_k - eta grad_h f_k(phi, h_k)         first steps, the body is frozen
    phi_k <- phi_k - eta grad_phi f_k(phi_k, h_k)   the other steps, the head is frozen
    phi   <- mean_S phi_k

The paper counts epochs: ``E_h`` on the head, then ``E_b`` on the body. Here both share the run's budget: the first
``round(head_share tau)`` of the ``tau`` local steps train the head, so ``local_epochs = E_h + E_b`` with
``head_share = E_h / (E_h + E_b)`` is the paper's. The average is uniform, as in the paper.

The default 2/3 is ``E_h = 10``, ``E_b = 5``, as in six of the seven scripts of the authors' code (lgcollins/FedRep:
``local_ep=15``, ``local_rep_ep=5``); the seventh, CIFAR-10 with 100 clients of two classes, has ``E_b = 1``, that is
``head_share=0.909``. Before, the default here was 0.5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.errors import ConfigError
from unskew.models.execution import Batch
from unskew.models.spec import ModelSpec, slices_mask
from unskew.protocol.rules import ClientRule, Context, Method, ServerRule, Slices, SyncRule, Tensors, Weights
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, uniform_range


@dataclass(frozen=True)
class FedRep(ClientRule, SyncRule):
    """A shared body and a head per client.

    Attributes:
        head_share: Share of the local steps that train the head, before the others train the body.
    """

    name: ClassVar[str] = "fedrep"
    summary: ClassVar[str] = "a shared body and a head of each client's own"
    paper: ClassVar[str] = "Collins et al. 2021, arXiv:2102.07078"
    # Both the head and the body must move.
    spaces: ClassVar[Mapping[str, Space]] = {"head_share": uniform_range(0.1, 0.9)}
    weights: ClassVar[Weights | None] = "uniform"

    head_share: Annotated[float, Field(ge=0, le=1)] = 2 / 3

    def check(self, run: PreRunContext) -> Sequence[str]:
        """There is a body to be shared.

        Raises:
            ConfigError: The model is only a head, so nothing would ever be sent; or updates are delayed.
        """
        notes = super().check(run)
        if not run.spec.parts["body"]:
            raise ConfigError(
                "fedrep shares the body of the model and leaves its head at the clients, but this model trains no body; "
                "take a model with more layers, or another method."
            )
        return notes

    def exchanged_slices(
        self, state: Tensors, round: int, client: int, last: int | None, spec: ModelSpec
    ) -> tuple[Slices, Slices]:
        """The body, both ways. A client begins with the head of the initial model, which is not a secret."""
        body = tuple(spec.parts["body"])
        return body, body

    def local_slices(self, spec: ModelSpec) -> Slices:
        """The head."""
        return tuple(spec.parts["head"])

    def begin(self, ctx: Context) -> Tensors:
        """Store the position of the head in the vector, and the number of steps that train it."""
        head = slices_mask(ctx.spec.parts["head"], ctx.spec.size).to(ctx.v_global.device)
        return {"head": head, "steps": torch.floor(self.head_share * ctx.steps + 0.5)}

    def trainable_mask(self, ctx: Context, carry: Tensors, batch: Batch) -> Tensor:
        """First the head, then the body."""
        return carry["head"] == (batch.step < carry["steps"])

    def conflict_with(self, method: Method) -> str | None:
        """Not with rules whose other half is at the server: theirs would be about a head that never gets there."""
        for rule in method.client:
            if rule is self:
                continue
            if type(rule).server_update is not ClientRule.server_update or isinstance(rule, ServerRule):
                return (
                    f"{rule.name} works on the whole model at the server, but fedrep leaves the heads at the clients."
                )
            if type(rule).personal is not ClientRule.personal:
                return f"{rule.name} and fedrep each give a client a personal model; leave out one of the two."
        return None
