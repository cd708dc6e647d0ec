"""Updates of a round as the server half of a rule sees them: weighted sums, and single updates if needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from unskew.errors import ConfigError
from unskew.models.spec import ModelSpec
from unskew.protocol.messages import SummedUpdate, Tensors, Update, flatten_records, unflatten_records
from unskew.protocol.round_plan import DEFAULT_PLAN, RoundPlan
from unskew.protocol.server_training import ServerTraining
from unskew.secret_draws import NoiseSource

Masks = tuple[Tensor, Tensor]
"""Masks of entries of the model, ``[d]``, and of its normalization statistics, ``[m]``."""


def same_masks(one: Masks | None, other: Masks | None) -> bool:
    """Return whether two pairs of masks select the same entries; None stands for all.

    Args:
        one: Masks of parameters and buffers, or None.
        other: Masks to compare with.
    """
    if one is other:
        return True
    if one is None or other is None:
        return all(bool(mask.all()) for mask in one or other or ())
    return torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def full_masks(masks: Masks | None, update: Update | SummedUpdate) -> Masks:
    """Return the masks, or masks that select every entry of ``update`` if there are none.

    Args:
        masks: Masks of parameters and buffers, or None.
        update: Update whose entries are selected.
    """
    if masks is not None:
        return masks
    return torch.ones_like(update.delta, dtype=torch.bool), torch.ones_like(update.buffers, dtype=torch.bool)


def nonzero_divisors(weights: Tensor) -> Tensor:
    """Return the weights with 1 instead of 0, as divisors of sums that are zero there."""
    return torch.where(weights > 0, weights, torch.ones_like(weights))


class Aggregate:
    """Weighted mean of updates, ``sum_k w_k delta_k / sum_k w_k``, and plain sums of the rules' uploads.

    Updates are added in a fixed order, so the result does not depend on which client finishes first. If clients send
    different slices of the model, each entry is averaged over the updates that contain it.

    Args:
        single: Rules whose uploads are read individually and not summed.

    Attributes:
        sent: Boolean masks ``[d]`` and ``[m]`` of the entries that at least one update contains; None if each contains
            all.
        entries: Sums of weights per entry, ``[d]`` and ``[m]``, if the updates contain different entries; None
            otherwise.
    """

    sent: Masks | None
    entries: Masks | None

    def __init__(self, single: frozenset[str] = frozenset()) -> None:
        self.single = single
        self.count = 0
        self.weight = 0.0
        self.num_samples = 0
        self._delta: Tensor | None = None
        self._buffers: Tensor | None = None
        self._buffer_change: Tensor | None = None
        self._sent_buffers: Tensor | None = None
        self.upload: dict[str, Tensors] = {}
        self.sent = None
        self.entries = None

    def add(self, update: Update | SummedUpdate, sent: Masks | None = None) -> None:
        """Add one client's update, or a sum of updates, which is weighted already.

        Args:
            update: The update, or the sum.
            sent: Masks ``[d]`` and ``[m]`` of the entries that the client sends; None for all.
        """
        self._weigh_entries(update, sent)
        summed = isinstance(update, SummedUpdate)
        scale, start_scale = (1.0, update.weight) if summed else (update.weight, 1.0)
        self.count += len(update.clients)
        self.weight += update.weight
        self.num_samples += update.num_samples
        if self._delta is None or self._buffers is None:
            self._delta, self._buffers = update.delta * scale, update.buffers * scale
        else:
            self._delta.add_(update.delta, alpha=scale)
            self._buffers.add_(update.buffers, alpha=scale)
        if update.b_start is not None:
            moved = (update.buffers - update.b_start * start_scale) * scale
            self._buffer_change = moved if self._buffer_change is None else self._buffer_change + moved
        for rule, tensors in update.upload.items():
            if rule in self.single:
                continue
            sums = self.upload.setdefault(rule, {})
            for name, tensor in tensors.items():
                sums[name] = sums[name] + tensor if name in sums else tensor.clone()

    def _weigh_entries(self, update: Update | SummedUpdate, sent: Masks | None) -> None:
        """Track weights per entry from the first update on whose entries differ from those before it."""
        if self._delta is None or self._buffers is None:
            self.sent = sent
            return
        if self.entries is None or self._sent_buffers is None:
            if same_masks(self.sent, sent):
                return
            model, statistics = full_masks(self.sent, update)
            self.entries = model.to(update.delta) * self.weight, statistics.to(update.buffers) * self.weight
            self._sent_buffers = self._buffers * statistics
        model, statistics = full_masks(sent, update)
        self.entries[0].add_(model.to(update.delta), alpha=update.weight)
        self.entries[1].add_(statistics.to(update.buffers), alpha=update.weight)
        self._sent_buffers.add_(update.buffers * statistics, alpha=update.weight)
        self.sent = self.entries[0] > 0, self.entries[1] > 0

    @property
    def total(self) -> Tensor | None:
        """Weighted sum of the updates, ``[d]``; None without updates."""
        return self._delta

    @property
    def delta(self) -> Tensor:
        """Weighted mean of the updates, ``[d]``; zero in entries that no update contains."""
        assert self._delta is not None, "an aggregate of no update has no mean"
        return self._delta / (self.weight if self.entries is None else nonzero_divisors(self.entries[0]))

    @property
    def buffers(self) -> Tensor:
        """Weighted mean of the buffers that clients send, ``[m]``."""
        if self.entries is None or self._sent_buffers is None:
            return self.all_buffers
        return self._sent_buffers / nonzero_divisors(self.entries[1])

    @property
    def all_buffers(self) -> Tensor:
        """Weighted mean of all clients' buffers, ``[m]``, including those that are not sent."""
        assert self._buffers is not None, "an aggregate of no update has no mean"
        return self._buffers / self.weight

    @property
    def buffer_change(self) -> Tensor | None:
        """Weighted mean change of the buffers, ``[m]``; None unless a rule needs ``sent_statistics``."""
        return None if self._buffer_change is None else self._buffer_change / self.weight

    def tensors(self) -> Tensors:
        """Return the sums by name."""
        sums = {
            "delta": self._delta,
            "buffers": self._buffers,
            "buffer_change": self._buffer_change,
            "sent_buffers": self._sent_buffers,
        }
        for name, both in (("sent", self.sent), ("entries", self.entries)):
            sums |= {} if both is None else {name: both[0], f"{name}_b": both[1]}
        return {**{name: t for name, t in sums.items() if t is not None}, **flatten_records("upload", self.upload)}

    def restore(self, tensors: Tensors, count: int, weight: float, num_samples: int) -> None:
        """Restore the aggregate from the output of ``tensors`` and the three counts.

        Args:
            tensors: Tensors of the aggregate by name.
            count: Number of updates.
            weight: Sum of their weights.
            num_samples: Total number of samples.
        """
        self.count = count
        self.weight = weight
        self.num_samples = num_samples
        self._delta, self._buffers, self._buffer_change = (
            tensors.get(name) for name in ("delta", "buffers", "buffer_change")
        )
        self._sent_buffers = tensors.get("sent_buffers")
        self.sent = (tensors["sent"], tensors["sent_b"]) if "sent" in tensors else None
        self.entries = (tensors["entries"], tensors["entries_b"]) if "entries" in tensors else None
        self.upload = unflatten_records("upload", tensors)


class Combined(NamedTuple):
    """Result of a rule in the ``aggregate`` slot.

    Attributes:
        delta: Combined update, ``[d]``.
        buffers: New normalization buffers, ``[m]``; None for the weighted mean.
        upload: Sums of the rules' uploads by rule and name; None for the plain sums.
        weight: Number of updates, or sum of their weights, that other rules are given; None for the real one.
        changed: Mask of the entries of the model that the combined update changes, boolean ``[d]``; None for those that
            some client sent. It is ignored if clients send the whole model.
        step: False if the server rule makes no step, so that the round changes nothing.
    """

    delta: Tensor
    buffers: Tensor | None = None
    upload: dict[str, Tensors] | None = None
    weight: float | None = None
    changed: Tensor | None = None
    step: bool = True


class CombinedUpdate(Aggregate):
    """Sums of updates whose means were replaced by the result of a rule in the ``aggregate`` slot.

    Args:
        sums: Sums of the updates.
        combined: Result of the rule.
    """

    def __init__(self, sums: Aggregate, combined: Combined):
        super().__init__(sums.single)
        self.restore(sums.tensors(), sums.count, sums.weight, sums.num_samples)
        self._combined, self.step = combined.delta, combined.step
        self._combined_buffers = combined.buffers
        if combined.upload is not None:
            self.upload = combined.upload
        if combined.weight is not None:
            self.count, self.weight = round(combined.weight), combined.weight
        if combined.changed is not None and self.sent is not None:
            self.sent = combined.changed, self.sent[1]

    @property
    def delta(self) -> Tensor:
        """Combined update, ``[d]``."""
        return self._combined

    @property
    def buffers(self) -> Tensor:
        """Combined buffers, ``[m]``."""
        return super().buffers if self._combined_buffers is None else self._combined_buffers


@dataclass(frozen=True)
class Updates:
    """Usable updates: their ``Aggregate``, and single updates if the rule's ``needs`` include ``individual``.

    The ``server_update`` hook receives the updates of a round; ``step`` of a server rule receives those in the buffer.

    Attributes:
        round: Number of the round, from 0.
        aggregate: Weighted sums of the updates.
        individual: Single updates, for iteration; None if no rule needs them.
        v_global: Broadcast model, ``[d]``; without delays, a client's local model is ``v_global + update.delta``.
        b_global: Broadcast buffers, ``[m]``.
        spec: Layout of the model.
        key: Random 64-bit key of the server and round.
        server_training: Resources for training at the server; None only in updates that are created by hand.
        version: Number of updates that the server applied before these.
        arrivals: Number of updates that had arrived in the round when these were complete.
        plan: Schedule of the run.
        noise: Source of the server's noise.
    """

    round: int
    aggregate: Aggregate
    individual: Sequence[Update] | None
    v_global: Tensor
    b_global: Tensor
    spec: ModelSpec
    key: Tensor
    server_training: ServerTraining | None = None
    version: int = 0
    arrivals: int = 0
    plan: RoundPlan = DEFAULT_PLAN
    noise: NoiseSource = field(default_factory=lambda: NoiseSource(0))

    def normal(self, number: int, like: Tensor) -> Tensor:
        """Return standard normal noise of the server, which clients of a real run cannot predict.

        Args:
            number: Number of the draw within the round.
            like: Tensor with the shape, dtype and device of the noise.
        """
        return self.noise.normal(self.round, number, like)

    @property
    def at_server(self) -> ServerTraining:
        """Return the resources for training at the server."""
        assert self.server_training is not None, "these updates were created by hand"
        return self.server_training

    def __len__(self) -> int:
        return self.aggregate.count

    def __iter__(self) -> Iterator[Update]:
        if self.individual is None:
            raise ConfigError("This rule reads single updates but does not need them; add 'individual' to its needs.")
        return iter(self.individual)
