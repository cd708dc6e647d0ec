"""Training at the server with the server data, an in-memory model and the clients' budget.

A rule accesses it as ``updates.at_server`` and requests the data that it needs in ``check``::

    def check(self, run):
        run.need_own_task(self.name)
        return ()

    def step(self, state, updates):
        v, b, _ = updates.at_server.train(state["v"], updates.b_global, updates.key, local_epochs=1)
        return {"v": v, "b": b}
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from unskew.data.federation import ServerData
from unskew.data.pixel_scaling import PixelScaling
from unskew.models.execution import Batch, GradFn, LossFn, Model
from unskew.models.spec import ModelOutput, ModelSpec
from unskew.tasks.base import Task


class TrainedModel(NamedTuple):
    """Model ``v [d]`` with buffers ``b [m]`` after training, and the mean training loss."""

    v: Tensor
    b: Tensor
    loss: float


@dataclass(frozen=True)
class ReferenceSamples:
    """Stored samples of the clients' task for measurements; methods must not train on them."""

    x: Tensor
    y: Tensor
    task: Task


class ServerTraining(Protocol):
    """Data and model at the server, with the same arithmetic as at clients.

    Attributes:
        data: Server's samples, as stored, or None; other samples can be passed to the methods.
        task: Task of the server's samples; may differ from the clients' if the data are out of domain.
        client_task: Task of the clients.
        cohort: Number of clients drawn per round.
        weights: Weighting of clients in means: by samples, or uniform.
        reference_samples: Test set, if ``diagnose`` enables a metric of the rule that needs it; otherwise None.
        pixels: Scaling of image intensities to inputs of the model.
    """

    data: ServerData | None
    task: Task
    client_task: Task
    cohort: int
    weights: Literal["samples", "uniform"]
    reference_samples: ReferenceSamples | None

    @property
    def spec(self) -> ModelSpec:
        """Layout of the model."""

    pixels: PixelScaling

    @property
    def model(self) -> Model:
        """In-memory model, for losses that are passed to ``gradient``."""

    def in_round(self, round: int) -> ServerTraining:
        """Return a copy for one round; it uses the clients' learning rate of that round, averaged over steps."""

    def inputs(self, x: Tensor) -> Tensor:
        """Convert stored samples to model inputs: normalized as at clients, on the device."""

    def plan(self, key: Tensor, num_samples: int, **changes: Any) -> list[Tensor]:
        """Return the indices ``[B]`` of the samples in each step.

        Args:
            key: Random key that determines the order.
            num_samples: Number of samples.
            **changes: Fields that differ from the clients' budget, as in ``train``.
        """

    def batch(self, index: Tensor, step: int, x: Tensor | None = None, y: Tensor | None = None) -> Batch:
        """Return samples ``index [B]`` of the server's data, or of ``x, y``, as a batch.

        Args:
            index: Indices of samples, ``[B]``.
            step: Number of the step, which seeds augmentation.
            x: Stored samples; None for the server's.
            y: Targets of ``x``.
        """

    def gradient(self, loss_fn: LossFn | None, b: Tensor, train: bool) -> GradFn:
        """Return the gradient function ``(v, batch) -> g [d]`` of a loss.

        Args:
            loss_fn: Loss ``(v, batch) -> scalar`` that uses ``model``; None for the task's loss.
            b: Initial buffers, ``[m]``.
            train: Whether to use training mode, which updates the buffers ``model.b``; eval mode reads them.
        """

    def outputs(self, v: Tensor, b: Tensor, x: Tensor) -> ModelOutput:
        """Compute the model's outputs for all stored samples ``x``, in eval mode and without gradients.

        Args:
            v: Parameters of the model, ``[d]``.
            b: Buffers of the model, ``[m]``.
            x: Stored samples, ``[n, ...]``.
        """

    def train(
        self,
        v: Tensor,
        b: Tensor,
        key: Tensor,
        *,
        x: Tensor | None = None,
        y: Tensor | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        moments: list[Tensor] | None = None,
        ready: bool = False,
        after: Callable[[Tensor], Tensor] | None = None,
        **changes: Any,
    ) -> TrainedModel:
        """Train a model as a client would, by default on the server's data.

        Args:
            v: Initial model, ``[d]``; not modified.
            b: Initial buffers, ``[m]``; not modified.
            key: Random key that determines sample order, dropout and augmentation.
            x: Samples as stored; None for the server's.
            y: Targets of ``x``, ``[n]``, or ``[n, C]`` for soft targets; None for the server's.
            loss: Loss ``(logits, targets) -> scalar``; None for the task's.
            moments: State of the optimizer, each ``[d]``, to continue training: read from this list (empty for a new
                optimizer) and written back to it. None for a new optimizer, as at clients.
            ready: Whether ``x`` are model inputs already, not stored samples.
            after: Function that maps ``v`` to a new ``v`` after every step.
            **changes: Fields that differ from the clients' budget and optimizer: ``local_epochs``, ``local_steps``,
                ``batch_size``, ``optimizer``, ``lr`` and the other fields of ``Training``.

        Raises:
            DataError: If BatchNorm receives a batch of one sample.
        """
