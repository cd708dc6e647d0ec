"""Shared base of client rules that change the logits in the task's loss according to the client's class counts.

The loss of a batch becomes ``CE(adjust(z, n_k), y)`` instead of ``CE(z, y)``. The rule adds the difference of the two, so
terms of other client rules (``moon``, ``feddecorr``) remain. The model itself, and so predictions, do not change.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from unskew.data.federation import ArrayClients, Federation
from unskew.models.execution import Batch, LossFn
from unskew.protocol.federation_info import ClientDataView
from unskew.protocol.rules import ClientRule, Context, Method, Tensors

MOST_READ = 1000
"""Largest number of clients whose labels are read before training if they are not in one array."""


class LogitAdjustment(ClientRule):
    """Cross-entropy of logits that depend on the client's class counts.

    Attributes:
        needs: Requirements of the rule, see ``unskew.protocol.requirements``.
    """

    needs: Collection[str] = ("one_class", "unweighted")

    @property
    def neutral(self) -> bool:
        """True if the options leave all logits unchanged, which is FedAvg."""
        raise NotImplementedError

    def adjust(self, logits: Tensor, counts: Tensor) -> Tensor:
        """Return the logits of the loss, ``[B, C]``.

        Args:
            logits: Logits of the model, ``[B, C]``.
            counts: Client's training samples per class, ``[C]``.
        """
        raise NotImplementedError

    def acts_before(self, other: ClientRule) -> bool:
        """Return whether the other rule scales the loss: only the inner one contains the term that this rule replaces."""
        return other.scales_loss

    def conflict_with(self, method: Method) -> str | None:
        """Reject a second rule that changes the logits."""
        other = next((r.name for r in method.client if isinstance(r, LogitAdjustment) and r is not self), None)
        return f"{self.name} and {other} both change the logits in the loss; use one of them." if other else None

    def client_info(self, data: ClientDataView) -> Tensors:
        """Return the client's training samples per class, which stay at the client."""
        return {"counts": data.class_counts()}

    def loss(self, loss_fn: LossFn, ctx: Context, carry: Tensors) -> LossFn:
        """Replace the task's loss by that of the adjusted logits."""
        if self.neutral:
            return loss_fn

        def adjusted(v: Tensor, batch: Batch) -> Tensor:
            loss = loss_fn(v, batch)
            logits = ctx.model(v, batch.x, batch.track).logits
            changed = ctx.task.loss(self.adjust(logits, ctx.client_info["counts"]), batch.y)
            return loss + (changed - ctx.task.loss(logits, batch.y))

        return adjusted


def single_class_note(federation: Federation, loss: str, consequence: str) -> Sequence[str]:
    """Return a warning about clients with one class: a softmax without absent classes is constant there.

    Args:
        federation: Data of all clients.
        loss: Name of the loss that is constant.
        consequence: Consequence and remedy, in sentences.
    """
    if not isinstance(federation.clients, ArrayClients) and len(federation.clients) > MOST_READ:
        return ()
    sizes = federation.sizes
    # Sites that hide their data all report one sample of the first class.
    count = num_single_class(federation) if sizes.max(initial=0) > 1 else 0
    if not count:
        return ()
    have = "has" if count == 1 else "have"
    return (
        f"{count} of {len(sizes)} clients {have} samples of one class only, where {loss} is constant. {consequence}",
    )


def num_single_class(federation: Federation) -> int:
    """Return the number of clients whose training samples all have the same class."""
    clients = federation.clients
    if not isinstance(clients, ArrayClients):
        return sum(bool(len(client.y)) and bool((client.y == client.y[0]).all()) for client in clients)
    y = clients.y.cpu()
    changes = torch.cat([torch.zeros(1, dtype=torch.int64), (y[1:] != y[:-1]).cumsum(0)]).numpy()
    first, last = clients.offsets[:-1], clients.splits - 1
    return int(((first <= last) & (changes[first] == changes[last])).sum())
