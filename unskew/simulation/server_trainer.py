"""Training at the server with the same arithmetic as at clients, see ``unskew.protocol.server_training``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from unskew.data.federation import Federation, take_rows
from unskew.data.pixel_scaling import PixelScaling
from unskew.engines import optimizers
from unskew.engines.batches import BatchPlan, InputNormalizer
from unskew.engines.local_trainer import single_sample_error
from unskew.models.batch_norm import rejects_single_samples
from unskew.models.execution import Batch, BoundModel, GradFn, LossFn
from unskew.models.spec import ModelOutput, ModelSpec
from unskew.protocol.server_training import ReferenceSamples, TrainedModel
from unskew.protocol.training_config import Training
from unskew.seeding import fold
from unskew.tasks.classification import Classification, MultiLabel

BATCH = 500


class ServerTrainer:
    """Training at the server (``ServerTraining``); the model is created on first use.

    Args:
        spec: Layout of the model.
        federation: Federation of the run.
        training: Budget of the clients.
        device: Device of the model.
        cohort: Number of clients drawn per round.
        observed: Whether the test set is available for measurements.
        weights: Weighting of clients in means.
    """

    def __init__(
        self,
        spec: ModelSpec,
        federation: Federation,
        training: Training,
        device: torch.device,
        cohort: int = 1,
        observed: bool = False,
        weights: Literal["samples", "uniform"] = "samples",
    ):
        self.spec = spec
        self.training = training
        self.device = device
        self.cohort = cohort
        self.weights = weights
        self.round = 0
        self.reference_samples = ReferenceSamples(*federation.test, federation.objective) if observed else None
        self.data, self.pixels = federation.server, PixelScaling.of(federation)
        self.task = self.client_task = federation.objective
        if self.data is not None and not self.data.in_domain:
            self.task = MultiLabel() if self.data.y.dim() > 1 else Classification()
        self.inputs = InputNormalizer(federation.normalization, federation.shape, spec.dtype, device)

    @cached_property
    def model(self) -> BoundModel:
        """In-memory model."""
        return BoundModel(self.spec, self.device)

    def in_round(self, round: int) -> ServerTrainer:
        """Use the clients' learning rate of ``round`` for rules without their own rate, and return this object."""
        self.round = round
        return self

    def plan(self, key: Tensor, num_samples: int, **changes: Any) -> list[Tensor]:
        """Return the sample indices of each step, see ``ServerTraining``.

        Args:
            key: Random key.
            num_samples: Number of samples.
            **changes: Fields of the training configuration to change.
        """
        return BatchPlan(self._training(changes), num_samples, int(key), 0, 0).batches

    def batch(self, index: Tensor, step: int, x: Tensor | None = None, y: Tensor | None = None) -> Batch:
        """Return a batch, see ``ServerTraining``.

        Args:
            index: Indices of samples, ``[B]``.
            step: Number of the step.
            x: Stored samples; None for the server's.
            y: Targets of ``x``.
        """
        x, y = self._given(x, y)
        there = index.to(y.device)
        inputs = self.inputs(take_rows(x, index.to(x.device)))
        return Batch(inputs, y[there].to(self.device), torch.tensor(step, device=self.device), torch.tensor(step))

    def gradient(self, loss_fn: LossFn | None, b: Tensor, train: bool) -> GradFn:
        """Return a gradient function, see ``ServerTraining``.

        Args:
            loss_fn: Loss of a batch; None for the task's.
            b: Buffers of the model, ``[m]``.
            train: Whether the model is in training mode.
        """
        self.model.start(b, train)
        return self.model.gradient(loss_fn or self._loss(self.task.loss))

    def outputs(self, v: Tensor, b: Tensor, x: Tensor) -> ModelOutput:
        """Return the outputs of a model, see ``ServerTraining``.

        Args:
            v: Parameters of the model, ``[d]``.
            b: Buffers of the model, ``[m]``.
            x: Stored samples, ``[n, ...]``.
        """
        predict = self.model.predict(v, b)
        outputs_list = [predict(self.inputs(part)) for part in torch.split(x, BATCH)]
        return ModelOutput(torch.cat([o.logits for o in outputs_list]), torch.cat([o.features for o in outputs_list]))

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
        """Train a model, see ``ServerTraining``.

        Args:
            v: Parameters of the model, ``[d]``.
            b: Buffers of the model, ``[m]``.
            key: Random key of the batches.
            x: Stored samples; None for the server's.
            y: Targets of ``x``.
            loss: Loss of logits and targets; None for the task's.
            moments: State of the optimizer to continue with.
            ready: Whether ``x`` are model inputs already.
            after: Function applied to the parameters after every step.
            **changes: Fields of the training configuration to change.
        """
        x, y = self._given(x, y)
        training = self._training(changes)
        plan = BatchPlan(training, len(y), int(key), 0, 0)
        if any(len(index) == 1 for index in plan.batches) and rejects_single_samples(self.spec, self.device):
            raise single_sample_error("The server")
        grad_fn = self.gradient(self._loss(loss or self.task.loss), b, train=True)
        # An optimizer that continues must know how many steps it has taken.
        v, state = v.clone(), optimizers.init_state(training, v, moments is not None)
        if moments:
            state = {name: t.clone() for name, t in zip(sorted(state), moments, strict=True)}
        total = torch.zeros((), dtype=v.dtype, device=self.device)
        for step, index in enumerate(plan.batches):
            seen, target = take_rows(x, index.to(x.device)), y[index.to(y.device)]
            seen, target = plan.augment(seen, target, self.task.pixels)
            batch = Batch(
                seen.to(self.device) if ready else self.inputs(seen),
                target.to(self.device),
                fold(key, step),
                torch.tensor(step),
            )
            v, state = optimizers.optimizer_step(training, v, grad_fn(v, batch), state, step)
            v = v if after is None else after(v)
            total += self.model.loss
        if moments is not None:
            moments[:] = [state[name] for name in sorted(state)]
        return TrainedModel(v, self.model.b.clone(), float(total) / max(1, len(plan.batches)))

    def _given(self, x: Tensor | None, y: Tensor | None) -> tuple[Tensor, Tensor]:
        data = self.data
        if x is None and data is not None:
            x = data.x
        if y is None and data is not None:
            y = data.y
        assert x is not None, "no samples: the server has none, and none were passed"
        assert y is not None, "no targets: the server has none, and none were passed"
        assert len(x) == len(y)
        return x, y

    def _training(self, changes: dict[str, Any]) -> Training:
        """Return the clients' budget with ``changes``; ``local_epochs`` replaces ``local_steps``."""
        if "local_epochs" in changes:
            changes = {"local_steps": None, **changes}
        return replace(self.training.at(self.round), counted=None, **changes)

    def _loss(self, loss: Callable[[Tensor, Tensor], Tensor]) -> LossFn:
        def loss_fn(v: Tensor, batch: Batch) -> Tensor:
            return loss(self.model(v, batch.x, batch.track).logits, batch.y)

        return loss_fn
