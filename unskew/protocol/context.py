"""Context of client rules: inputs of local training and writable state."""

from __future__ import annotations

from collections.abc import Callable
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
    """Dictionary that is read-only until ``end`` and ``transform_update``, so that all engines agree."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise ConfigError(
            "A rule wrote to ctx.state or ctx.upload before the last step, but only end and transform_update may write to "
            "them. Return values that begin computes as the carry, whose entries gradient may replace."
        )

    __setitem__ = update = setdefault = pop = _refuse


def as_stored(x: Tensor) -> Tensor:
    """Return stored samples that are inputs of the model as they are."""
    return x


@dataclass(frozen=True)
class Context:
    """Inputs of a client rule, and its two writable dictionaries, ``state`` and ``upload``.

    Attributes:
        round: Number of the round, from 0.
        v_global: Model that local training starts from, ``[d]``: the received slices, and the client's own values
            elsewhere.
        b_global: Buffers that local training starts from, ``[m]``.
        state: State of this rule at this client (empty before it first takes part); ``end`` and ``transform_update``
            may write to it.
        download: Tensors that the rule's server half sent in addition to the model.
        upload: Tensors that the rule sends in addition to the update, written by ``end`` or ``transform_update``;
            counted as traffic.
        spec: Layout of the model.
        model: Model in training, ``model(v, x) -> ModelOutput``.
        task: Task of the client, which defines loss and probabilities.
        key: Random 64-bit key of this client and round.
        training: Budget and optimizer of the client.
        plain_sgd: Whether a local step is exactly ``v - lr * g`` (no momentum, decay, clipping or adaptivity).
        steps: Number of local steps, as a scalar tensor.
        epoch_steps: Number of steps in one pass over the client's data, as a scalar tensor.
        weight: Client's aggregation weight before normalization, as a scalar tensor.
        client_info: Output of the rule's ``client_info`` hook for this client's data.
        common: Tensors that a data rule of the same name sent to every client before the first round.
        inputs: Converts stored samples, as in ``ClientDataView.client``, to inputs of the model.
        pixels: Scaling of image intensities to inputs of the model.
        full_gradient: Gradient of the task's mean loss over the client's samples at ``v_global``, ``[d]``, if a
            rule needs it.
        survey: Sums over the client's training samples, or its validation samples, that the rule's ``survey`` computed.
        final: Whether this is the training after the last round, such as fine-tuning.
        sent: Mask of the parameters that the client uploads after this round, boolean ``[d]``; None if all.
        received: Mask of the parameters that the client downloaded before this round, boolean ``[d]``; None if all.
        v_received: In ``begin``, the received model ``[d]`` if another rule starts training from another one; otherwise
            None.
        secret: Secret key of this client and round, int64 ``[2]``, from which noise that protects the client is drawn with
            ``unskew.secret_draws`` instead of ``key``; None if the run is not private, or must repeat bit for bit.
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
    inputs: Callable[[Tensor], Tensor] = as_stored
    pixels: PixelScaling = AS_THEY_ARE
    full_gradient: Tensor | None = None
    survey: Tensors = field(default_factory=dict)
    final: bool = False
    sent: Tensor | None = None
    received: Tensor | None = None
    v_received: Tensor | None = None
    secret: Tensor | None = None

    @property
    def lr(self) -> float:
        """Client's learning rate in this round: the mean over steps if it changes within the round (``batch.lr``)."""
        return self.training.rate(self.round)

    def last_received(self) -> Tensor:
        """Return the last received model, ``[d]``; slices not received this round come from ``state["start"]``.

        Only ``begin`` may call it: later, the model that training starts from may have replaced the received one.
        """
        v = self.v_global if self.v_received is None else self.v_received
        return v if self.received is None else torch.where(self.received, v, self.state.get("start", v))

    def sent_since(self, start: Tensor, v: Tensor) -> Tensor:
        """Return ``v - start`` in uploaded entries, 0 elsewhere, ``[d]``.

        If not all entries are uploaded, ``start`` is stored in ``state`` for entries that are uploaded later.

        Args:
            start: Parameters at the start of the round, ``[d]``.
            v: Parameters after local training, ``[d]``.
        """
        if self.sent is None:
            return v - start
        self.state["start"] = start
        return torch.where(self.sent, v - start, 0.0)
