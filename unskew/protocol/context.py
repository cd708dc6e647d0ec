"""Context of client rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor

from unskew.data.pixel_scaling import AS_THEY_ARE, PixelScaling
from unskew.errors import ConfigError
from unskew.models.execution import Model
from unskew.models.spec import ModelSpec
from unskew.protocol.messages import Tensors
from unskew.protocol.training_config import Training
from unskew.tasks.base import Task


class ReadOnlyDict(dict[str, Tensor]):
    """Dictionary that a rule may read at any time, but write only in ``end`` and ``transform_update``.

    So that all engines agree.
    """

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise ConfigError(
            "A rule writes to ctx.state or ctx.upload before the last step; it may do so in end and in sends. What begin "
            "computes goes into the carry, whose entries gradient may replace."
        )

    __setitem__ = update = setdefault = pop = _refuse


@dataclass(frozen=True)
class Context:
    """Inputs of a client rule, and the two places it may write: ``state`` and ``upload``.

    Attributes:
        round: Number of the round, from 0.
        v_global: The global model as the client knows it, ``[d]``: what was sent, and its own slices where nothing was. It is
            where local training starts.
        b_global: The statistics that it starts with, ``[m]``.
        state: What this rule kept at this client (empty if it never took part); ``end`` and ``sends`` may write to it.
        download: What the rule's server half sent beside the model.
        upload: What the rule sends beside the update, written by ``end`` or ``sends``; counted in bytes.
        spec: The model's layout.
        model: The model in training, ``model(v, x) -> Output``.
        task: Loss and probabilities.
        key: A random 64-bit key of this client and round.
        training: The client's budget and optimizer.
        plain_sgd: Whether a local step is exactly ``v - lr * g`` (no momentum, decay, clipping or adaptivity).
        steps: Number of local steps, as a scalar tensor.
        epoch_steps: Number of steps in one pass over the client's data, as a scalar tensor.
        weight: The client's aggregation weight before normalization, as a scalar tensor.
        facts: What the rule's ``facts`` says of the client's data.
        common: What the rule sent to every client alike before the first round.
        pixels: How intensities of images become the model's inputs.
        full_gradient: Gradient of the client's whole objective at ``v_global``, ``[d]``, if a rule needs it.
        sent: Which parameters go to the server after this round, boolean ``[d]``; None if all do.
        received: Which parameters came from the server before this round, boolean ``[d]``; None if all did.
    """

    round: int
    v_global: Tensor
    b_global: Tensor
    state: Tensors
    download: Tensors
    upload: Tensors
    spec: ModelSpec
    model: Model
    task: Task
    key: Tensor
    training: Training
    plain_sgd: bool
    steps: Tensor
    epoch_steps: Tensor
    weight: Tensor
    client_info: Tensors = field(default_factory=dict)
    common: Tensors = field(default_factory=dict)
    pixels: PixelScaling = AS_THEY_ARE
    full_gradient: Tensor | None = None
    sent: Tensor | None = None
    received: Tensor | None = None

    @property
    def lr(self) -> float:
        """The client's learning rate in this round; where it changes from step to step (``batch.lr``), the mean of it."""
        return self.training.rate(self.round)

    def last_received(self) -> Tensor:
        """The model as the server last sent it, ``[d]``, also slices of earlier rounds, which the rule keeps as ``start``."""
        if self.received is None:
            return self.v_global
        return torch.where(self.received, self.v_global, self.state.get("start", self.v_global))

    def sent_since(self, start: Tensor, v: Tensor) -> Tensor:
        """Return the part of ``v - start`` that is sent, ``[d]``, 0 elsewhere.

        ``start`` is kept for parts that are sent later.

        Args:
            start: Parameters at the start of the round, ``[d]``.
            v: Parameters after local training, ``[d]``.
        """
        if self.sent is None:
            return v - start
        self.state["start"] = start
        return torch.where(self.sent, v - start, 0.0)
