"""Checkpoints of unfinished local training, from which a client continues bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from unskew.engines.batches import BatchPlan
from unskew.models.execution import BoundModel
from unskew.protocol.messages import Tensors, flatten_records, unflatten_records
from unskew.protocol.rules import ClientRule
from unskew.seeding import global_states, set_global_states


class CheckpointStore(Protocol):
    """Storage of the checkpoint of one client in one round."""

    def load(self) -> Tensors:
        """Return the stored tensors; empty if nothing of this training is stored."""

    def is_due(self) -> bool:
        """Return whether it is time to store a checkpoint; called after every local step."""

    def save(self, tensors: Tensors) -> None:
        """Store tensors instead of the previous ones."""


class TrainingCheckpoint:
    """Converts unfinished local training to tensors and back.

    What precedes the first step is computed again. An entry of a carry that no step has replaced keeps the tensor that
    ``begin`` returned, with its memory layout.

    Args:
        store: Storage of the tensors.
        rules: Client rules, in order.
        carries: Carry of each rule; restored in place.
        model: Model of the client.
        plan: Batches of the client.
    """

    def __init__(
        self,
        store: CheckpointStore,
        rules: Sequence[ClientRule],
        carries: Sequence[Tensors],
        model: BoundModel,
        plan: BatchPlan,
    ):
        self.store, self.model, self.plan = store, model, plan
        self.carries = {rule.name: carry for rule, carry in zip(rules, carries, strict=True)}

    def save_if_due(self, step: int, v: Tensor, moments: Tensors, total: Tensor) -> None:
        """Store a checkpoint if one is due.

        Args:
            step: Number of steps taken.
            v: Parameters, ``[d]``.
            moments: State of the optimizer.
            total: Sum of the losses of the steps.
        """
        if not self.store.is_due():
            return
        draws = global_states(self.model.device) if self.model.spec.draws_globally else {}
        if self.plan.augmentation is not None:
            draws["augmentation"] = self.plan.augmentation.get_state()
        loop = {"step": torch.tensor(step), "v": v, "total": total}
        parts = {"loop": loop, "moments": moments, "model": self.model.mutable_state(), "draws": draws}
        tensors = flatten_records("training", parts) | flatten_records("carry", self.carries)
        self.store.save({name: tensor.detach().cpu() for name, tensor in tensors.items()})

    def restore(self, v: Tensor, moments: Tensors, total: Tensor) -> tuple[int, Tensor, Tensors, Tensor]:
        """Return the number of steps taken and the values after them; those given if there is no checkpoint.

        Args:
            v: Parameters at the first step, ``[d]``.
            moments: State of the optimizer at the first step.
            total: Sum of the losses at the first step.
        """
        stored = self.store.load()
        if not stored:
            return 0, v, moments, total
        parts = unflatten_records("training", stored)
        draws = parts.pop("draws", {})
        if self.plan.augmentation is not None:
            self.plan.augmentation.set_state(draws.pop("augmentation"))
        if draws:
            set_global_states(draws, self.model.device)
        parts = {kind: {name: t.to(v.device) for name, t in tensors.items()} for kind, tensors in parts.items()}
        self.model.restore(parts.get("model", {}))
        carries = unflatten_records("carry", stored)
        for rule, carry in self.carries.items():
            for name, tensor in carries.get(rule, {}).items():
                if name not in carry or not torch.equal(carry[name].cpu(), tensor):
                    carry[name] = tensor.to(v.device)
        loop = parts["loop"]
        return int(loop["step"]), loop["v"], parts.get("moments", {}), loop["total"]
