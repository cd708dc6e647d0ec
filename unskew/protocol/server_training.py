"""Training at the server: samples, a model in memory, and the clients' budget.

A rule finds it in ``updates.at_server``; in ``check`` it says what data it needs::

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
    """A model ``v [d]`` with its statistics ``b [m]`` after training, and the mean loss on the way."""

    v: Tensor
    b: Tensor
    loss: float


@dataclass(frozen=True)
class ReferenceSamples:
    """Stored samples of the clients' task to measure with, never to learn from."""

    x: Tensor
    y: Tensor
    task: Task


class ServerTraining(Protocol):
    """Data and model at the server; the same arithmetic as at clients.

    Attributes:
        data: The server's samples, as they are stored, or None: other samples can be given.
        task: Loss of the server's samples; out of domain it may be another one than the clients'.
        own: The clients' task.
        cohort: Clients drawn per round.
        weights: How clients count in a mean: by samples, or uniformly.
        witness: The test set, if a figure of the rule's that ``diagnose`` names asks what it would say.
        pixels: How intensities of images become the model's inputs.
    """

    data: ServerData | None
    task: Task
    own: Task
    cohort: int
    weights: Literal["samples", "uniform"]
    witness: ReferenceSamples | None

    @property
    def spec(self) -> ModelSpec:
        """The model's layout."""

    pixels: PixelScaling

    @property
    def model(self) -> Model:
        """A model in memory, for losses that are given to ``gradient``."""

    def in_round(self, round: int) -> ServerTraining:
        """The same, in a round; the clients' learning rate is that of the round, or the mean over its steps."""

    def inputs(self, x: Tensor) -> Tensor:
        """Stored samples as inputs of the model: normalized as clients' are, on the device."""

    def plan(self, key: Tensor, examples: int, **changes: Any) -> list[Tensor]:
        """Return the indices ``[B]`` of the samples in each step.

        Args:
            key: Decides the order.
            examples: Number of samples.
            changes: What differs from the clients' budget, as for ``train``.
        """

    def batch(self, index: Tensor, step: int, x: Tensor | None = None, y: Tensor | None = None) -> Batch:
        """Samples ``index [B]`` of the server's data, or of ``x, y``, as a batch.

        Args:
            index: Indices of samples, ``[B]``.
            step: Number of the step, which seeds augmentation.
            x: Stored samples; None: those of the server.
            y: Targets of ``x``.
        """

    def gradient(self, loss_fn: LossFn | None, b: Tensor, train: bool) -> GradFn:
        """The function ``(v, batch) -> gradient [d]`` of a loss, by default the task's.

        Args:
            loss_fn: ``(v, batch) -> scalar``, made with ``model``.
            b: The statistics ``[m]`` to begin with.
            train: Training mode, which moves the statistics ``model.b``; or eval mode, which reads them.
        """

    def outputs(self, v: Tensor, b: Tensor, x: Tensor) -> ModelOutput:
        """The model's outputs for all of the stored samples ``x``, in eval mode and without gradient.

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
            v: The model to begin with, ``[d]``; it is not written.
            b: Its statistics, ``[m]``; they are not written.
            key: Decides the order of the samples, dropout and augmentation.
            x: Samples as they are stored; those of the server if None.
            y: Their targets (``[n]``, or ``[n, C]`` for soft ones); those of the server if None.
            loss: ``(logits, targets) -> scalar``; the task's if None.
            moments: For training that goes on: the optimizer's state, each ``[d]``, is taken from this list (empty: it is
                new) and left there. None: a new optimizer, as at clients.
            ready: ``x`` are inputs of the model already, not samples as they are stored.
            after: What becomes of the model after every step.
            changes: What differs from the clients' budget and optimizer: ``local_epochs``, ``local_steps``,
                ``batch_size``, ``optimizer``, ``lr`` and the other fields of ``Training``.

        Raises:
            DataError: BatchNorm meets a batch of one sample.
        """
