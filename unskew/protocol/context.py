"""What a client rule has to work with."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from unskew.data.pixels import AS_THEY_ARE, Pixels
from unskew.models.trainable import Model
from unskew.models.vector import ModelSpec
from unskew.protocol.messages import Tensors
from unskew.tasks import Task


@dataclass(frozen=True)
class Context:
    """What a client rule may read, and the two places it may write: ``state`` and ``upload``.

    Attributes:
        round: Number of the round, from 0.
        v_global: The global model as the client knows it, ``[d]``: what was sent, and its own slices where nothing was.
        v_start: Where local training starts, ``[d]``.
        b_global: The statistics as sent, ``[m]``.
        state: What this rule kept at this client (empty if it never took part); writes are kept if training succeeds.
        download: What the rule's server half sent beside the model.
        upload: What the rule sends beside the update; counted in bytes.
        spec: The model's layout.
        model: The model in training, ``model(v, x) -> Output``.
        task: Loss and probabilities.
        key: A random 64-bit key of this client and round.
        lr: The client's learning rate.
        plain_sgd: Whether a local step is exactly ``v - lr * g`` (no momentum, decay, clipping or adaptivity).
        steps: Number of local steps, as a scalar tensor.
        weight: The client's aggregation weight before normalisation, as a scalar tensor.
        full_gradient: Gradient of the client's whole objective at ``v_start``, if a rule needs it.
        class_counts: The client's samples per class (per label, where a sample may have several), ``[C]``, if a rule
            needs them.
        label_pairs: The client's samples that have both of two labels, ``[C, C]``, if a rule needs them.
        exemplars: Random inputs of each class, ``[C, n, ...]``, in turn if the client holds fewer and zero if it holds none;
            at least as many as the rule needs.
        epoch_steps: Number of steps in one pass over the client's data, as a scalar tensor.
        common: What the rule's ``prepare`` put into ``Federation.common``, the same tensors for every client.
        pixels: How intensities of images become the model's inputs.
        sent: Which parameters go to the server after this round, boolean ``[d]``; None if all do.
        received: Which parameters came from the server before this round, boolean ``[d]``; None if all did.
    """

    round: int
    v_global: Tensor
    v_start: Tensor
    b_global: Tensor
    state: Tensors
    download: Tensors
    upload: Tensors
    spec: ModelSpec
    model: Model
    task: Task
    key: Tensor
    lr: float
    plain_sgd: bool
    steps: Tensor
    weight: Tensor
    full_gradient: Tensor | None = None
    class_counts: Tensor | None = None
    epoch_steps: Tensor | None = None
    common: Tensors = field(default_factory=dict)
    pixels: Pixels = AS_THEY_ARE
    sent: Tensor | None = None
    received: Tensor | None = None
    label_pairs: Tensor | None = None
    exemplars: Tensor | None = None

    def last_received(self) -> Tensor:
        """The model as the server last sent it, ``[d]``, also slices of earlier rounds, which the rule keeps as ``start``."""
        if self.received is None:
            return self.v_start
        return torch.where(self.received, self.v_start, self.state.get("start", self.v_start))

    def sent_since(self, start: Tensor, v: Tensor) -> Tensor:
        """What is sent of ``v - start``, ``[d]``, 0 elsewhere; ``start`` is kept for the parts that are sent later."""
        if self.sent is None:
            return v - start
        self.state["start"] = start
        return torch.where(self.sent, v - start, 0.0)
