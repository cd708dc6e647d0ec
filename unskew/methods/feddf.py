"""FedDF: the server distills the ensemble of the clients' models into their average.

Lin, Kong, Stich, Jaggi, "Ensemble Distillation for Robust Model Fusion in Federated Learning", 2020, arXiv:2006.07242,
Algorithm 1, on inputs ``x`` at the server. Their labels are not used, so they may come from another data set::

    omega <- omega + sum_j p_j Delta_j                      the start: FedAvg over the updates that arrived
    z(x) = (1/J) sum_j f_{omega_j}(x)                       mean logits of the J arrived models
    omega <- argmin  mean_x KL(softmax z(x) || softmax f_omega(x))     by a fixed number of steps

``omega_j`` is the client's whole model with its own buffers: the model that it received, which may be an older one,
plus its update. Teachers predict in eval mode, once per round, and only for inputs that the steps use. The student
starts with the mean of the clients' buffers, which are then updated on the server's batches. If no update arrives in a
round, the model does not change. If all teachers equal the student, as with a single update of the current model, there
is nothing to distill: the gradient is rounding noise, which Adam would amplify to full steps, so none are taken. The
original uses up to 10,000 steps of Adam with a learning rate that decays to 0, and early stopping on validation data;
here the number of steps is fixed. With no steps this is FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.protocol.rules import Tensors, Updates
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, one_of
from unskew.protocol.server_budget import TrainsAtServer


@dataclass(frozen=True)
class FedDF(TrainsAtServer):
    """Ensemble distillation; see ``TrainsAtServer`` for the options."""

    name: ClassVar[str] = "feddf"
    summary: ClassVar[str] = "distills the clients' ensemble into their average at the server"
    paper: ClassVar[str] = "Lin et al. 2020, arXiv:2006.07242"
    # The grids of Zhu et al. 2025 (arXiv:2503.20138).
    spaces: ClassVar[Mapping[str, Space]] = {"lr": one_of(1e-5, 1e-4, 1e-3), "epochs": one_of(1, 10, 20)}
    tasks_reason: ClassVar[str] = "its teacher is a mean of probabilities, with one prediction per sample"
    needs = ("counts", "individual", "sent_model", "whole_updates")

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate that the server has data; its labels are not used."""
        self.check_budget()
        run.need_server_data(self.name)
        return ()

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """Average the updates, compute the ensemble's logits, and distill them."""
        at = updates.at_server
        key = updates.key
        mean = updates.aggregate
        assert at.data is not None
        x, start = at.data.x, state["v"] + mean.delta
        seen = at.plan(key, len(x), **self.budget)
        if not seen:
            return {"v": start, "loss": state["loss"]}
        if all_teachers_equal_the_student(state["v"], updates):
            return {"v": start, "loss": torch.zeros(())}
        rows = torch.unique(torch.cat(seen)).to(x.device)
        total = torch.zeros(())
        for update in updates:
            assert update.start is not None
            total = at.outputs(update.start + update.delta, update.buffers, x[rows]).logits + total.to(start.device)
        z = total.new_zeros(len(x), total.shape[1]).index_copy_(0, rows.to(total.device), total / len(updates))
        v, b, loss = at.train(
            start, mean.buffers, key, y=z, loss=lambda s, t: at.client_task.divergence(t, s), **self.budget
        )
        return {"v": v, "b": b, "loss": torch.tensor(loss)}


def all_teachers_equal_the_student(v: Tensor, updates: Updates) -> bool:
    """Return whether all updates are the same change of the model ``v``, so that their average is each client's model.

    The inputs of the average are compared, because the average itself is rounded.

    Args:
        v: Model of the server before the round, ``[d]``.
        updates: Updates of the round.
    """
    first, *_ = updates
    return all(
        update.start is not None
        and torch.equal(update.start, v)
        and torch.equal(update.delta, first.delta)
        and torch.equal(update.buffers, first.buffers)
        for update in updates
    )
