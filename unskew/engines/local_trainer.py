"""Local training of one client, the reference whose results every engine must reproduce."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial, reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from unskew.data.federation import take_rows
from unskew.engines import optimizers
from unskew.engines.base import EngineConfig
from unskew.engines.batches import BatchPlan
from unskew.engines.client_inputs import (
    ClientInputs,
    apply_begin_hooks,
    apply_end_hooks,
    client_key,
    has_frozen_parameters,
    local_update,
    move_to,
    pack_update,
)
from unskew.engines.survey import CHUNK, forward, take_surveys
from unskew.engines.training_checkpoint import CheckpointStore, TrainingCheckpoint
from unskew.errors import ConfigError, DataError, short_repr
from unskew.models.batch_norm import rejects_single_samples
from unskew.models.execution import Batch, BoundModel, GradFn, LossFn, Model
from unskew.protocol.context import Context
from unskew.protocol.messages import Broadcast, ClientState, Tensors, Update, without_model
from unskew.protocol.rules import ClientRule, SurveyTime, survey_times
from unskew.seeding import derive, fold, seeded_globals
from unskew.tasks.base import Task

Function = TypeVar("Function")


def base_loss(model: Model, task: Task) -> LossFn:
    """Return the task's loss of a batch, which rules wrap.

    Args:
        model: Model of the client.
        task: Task of the data.
    """

    def loss_fn(v: Tensor, batch: Batch) -> Tensor:
        return task.loss(model(v, batch.x, batch.track).logits, batch.y)

    return loss_fn


def composed_gradient(
    rules: Sequence[ClientRule], ctxs: Sequence[Context], carries: Sequence[Tensors], model: Model, task: Task
) -> GradFn:
    """Return the gradient of the task's loss, both wrapped by all rules in order.

    Args:
        rules: Client rules in order.
        ctxs: Context of each rule.
        carries: Carry of each rule.
        model: Model of the client.
        task: Task of the data.

    Raises:
        ConfigError: If a hook did not return a function.
    """
    loss_fn = base_loss(model, task)
    for rule, ctx, carry in zip(rules, ctxs, carries, strict=True):
        loss_fn = _checked_function(rule, "loss", rule.loss(loss_fn, ctx, carry))
    grad_fn = model.gradient(loss_fn)
    freezes = has_frozen_parameters(rules)
    for rule, ctx, carry in zip(rules, ctxs, carries, strict=True):
        if freezes and type(rule).gradient is not ClientRule.gradient:
            grad_fn = _gradient_of_trained(grad_fn)
        grad_fn = _checked_function(rule, "gradient", rule.gradient(grad_fn, ctx, carry))
    return grad_fn


def _gradient_of_trained(grad_fn: GradFn) -> GradFn:
    """Return a gradient that is 0 for parameters that a rule freezes, so that the norms and steps of rules omit them."""

    def trained(v: Tensor, batch: Batch) -> Tensor:
        g = grad_fn(v, batch)
        return g if batch.trainable is None else torch.where(batch.trainable, g, 0.0)

    return trained


def _checked_function(rule: ClientRule, hook: str, wrapped: Function) -> Function:
    """Validate and return the loss or gradient function that a hook created."""
    if not callable(wrapped):
        raise ConfigError(
            f"{rule.name}.{hook} must return a function of a vector and a batch, not {short_repr(wrapped)}."
        )
    return wrapped


def single_sample_error(who: str, why: str = "") -> DataError:
    """Return the error for a batch of one sample in a model with BatchNorm.

    Args:
        who: Client, or the server.
        why: Text that follows "a batch of one sample".
    """
    return DataError(
        f"{who} trains on a batch of one sample{why}, which BatchNorm cannot normalize. Give it "
        "more samples, set drop_last or another batch_size if this is the last batch of an epoch, or use GroupNorm."
    )


def most_parts(rules: Sequence[ClientRule]) -> int:
    """Return the largest number of parts into which a rule splits batches."""
    return max((rule.num_parts for rule in rules), default=1)


def check_batch_sizes(setup: EngineConfig) -> None:
    """Validate that clients have validation samples, and no batch of one sample if BatchNorm cannot normalize it.

    Args:
        setup: Configuration of an engine.

    Raises:
        DataError: If a client has too few samples.
    """
    training, federation = setup.training, setup.federation
    if setup.validation and 1 in federation.sizes:
        title = federation.client_title(federation.sizes.tolist().index(1))
        name = next(rule.name for rule in setup.rules if rule.validation)
        raise DataError(f"{title} has one sample, of which {name} can keep none for validation. Give it more samples.")
    if any(rule.poisson_batches for rule in setup.rules):
        return
    rejects = [rejects_single_samples(spec, setup.device) for spec in setup.spec.architectures]
    parts = most_parts(setup.rules)
    if not any(rejects):
        return
    for client, size in enumerate(map(setup.num_trained, federation.sizes.tolist())):
        if not rejects[client % len(rejects)]:
            continue
        lengths = [(cut.stop - cut.start) // parts for cut in training.cuts(size)]
        if 1 in lengths and training.steps(size, client) > lengths.index(1):
            divided = f", each split into {parts} parts" if parts > 1 else ""
            why = f" ({size} sample{'s' if size > 1 else ''} in batches of {training.batch_size}{divided})"
            raise single_sample_error(federation.client_title(client), why)


def combined_trainable_mask(
    rules: Sequence[ClientRule], ctxs: Sequence[Context], carries: Sequence[Tensors], batch: Batch
) -> Tensor | None:
    """Return the mask of parameters that no rule freezes in this step, boolean ``[d]``; None if none is frozen.

    Args:
        rules: Client rules in order.
        ctxs: Context of each rule.
        carries: Carry of each rule.
        batch: Batch of the step.
    """
    masks = [rule.trainable_mask(ctx, carry, batch) for rule, ctx, carry in zip(rules, ctxs, carries, strict=True)]
    known = [mask for mask in masks if mask is not None]
    return reduce(torch.logical_and, known) if known else None


def requested_carry(rules: tuple[ClientRule, ...], carries: list[Tensors], broadcast: Broadcast) -> Tensors:
    """Return the carry that the server wants to plot; empty if there is none.

    Args:
        rules: Client rules in order.
        carries: Carry of each rule.
        broadcast: Message from the server.
    """
    carries_of_rule = (carry for rule, carry in zip(rules, carries, strict=True) if rule.name == broadcast.carry_of)
    return dict(next(carries_of_rule, {}))


class LocalTrainer:
    """Trains one client at a time on one reused model, or on one of each architecture if clients have different ones."""

    def __init__(self, setup: EngineConfig):
        self.setup = setup
        self.others = [LocalTrainer(replace(setup, spec=spec)) for spec in setup.spec.others]
        self.model = BoundModel(setup.spec, setup.device)
        self.inputs = ClientInputs(setup)
        self.needs_full_gradient = any(
            "full_gradient" in rule.needs and "asked" not in survey_times(rule) for rule in setup.rules
        )

    @cached_property
    def _rejects_single_samples(self) -> bool:
        return rejects_single_samples(self.setup.spec, self.setup.device)

    def full_gradient(self, broadcast: Broadcast) -> Tensor:
        """Compute the gradient of the task's mean loss over the client's samples at its initial model, ``[d]``."""
        client, device = self.setup.federation.clients[broadcast.client], self.setup.device
        v = self.inputs.initial_params(broadcast).to(device)
        key = client_key(self.setup.seed, broadcast).to(device)
        self.model.start(self.inputs.initial_buffers(broadcast))
        grad_fn = self.model.gradient(base_loss(self.model, self.setup.task))
        total = torch.zeros_like(v)
        parts = torch.split(torch.arange(client.num_samples, device=client.y.device), self.setup.training.batch_size)
        shares = [len(index) / client.num_samples for index in parts]
        if self.setup.task.tokens:  # the loss of a batch is a mean over its tokens
            counts = self.setup.task.predictions(client.y)
            shares = torch.stack([counts[index].sum() / counts.sum().clamp_min(1) for index in parts]).tolist()
        for index, share in zip(parts, shares, strict=True):
            x = self.inputs.normalize(take_rows(client.x, index))
            batch = Batch(x, client.y[index].to(device), key, torch.tensor(0))
            total.add_(grad_fn(v, batch), alpha=share)
        return total

    def inputs_of(self, broadcast: Broadcast, plan: BatchPlan) -> dict[str, Any]:
        """Return the training inputs of a client, before they are moved to the device.

        Args:
            broadcast: Message from the server.
            plan: Batches of the client.
        """
        gradient = self.full_gradient(broadcast) if self.needs_full_gradient else None
        inputs = self.inputs.of(broadcast, plan, gradient)
        return inputs | {"survey": self.surveys("received", broadcast, inputs, inputs["v_global"], inputs["b_global"])}

    def surveys(
        self, when: SurveyTime, broadcast: Broadcast, inputs: dict[str, Any], v: Tensor, b: Tensor
    ) -> dict[str, Tensors]:
        """Take the surveys of a model over the samples of a client; returns the sums by rule.

        Args:
            when: Time of the surveys.
            broadcast: Message from the server.
            inputs: Training inputs of the client.
            v: The model, ``[d]``.
            b: Its buffers, ``[m]``.
        """
        setup, device = self.setup, self.setup.device
        if all(when not in survey_times(rule) for rule in setup.rules):
            return {}
        ctxs = self.inputs.contexts(move_to(inputs, device), self.model, broadcast.round)
        client = setup.federation.clients[broadcast.client]
        held = setup.split_samples(broadcast.client)[1] if setup.validation else None
        args = (self.model, self.inputs.normalize, client, v.to(device), b.to(device), held)
        return take_surveys(when, setup.rules, ctxs, *args)

    def answer(self, broadcast: Broadcast) -> Update:
        """Answer surveys of a model without training; only the ``end`` hooks of their rules run."""
        setup, device = self.setup, self.setup.device
        plan = setup.batch_plan(broadcast.round, broadcast.client)
        after = broadcast.round >= setup.plan.rounds
        when: SurveyTime = "final" if after else "asked"
        inputs = move_to(self.inputs.of(broadcast, plan, None if after else self.full_gradient(broadcast)), device)
        began = time.perf_counter()
        v, b = inputs["v_global"], inputs["b_global"]
        inputs["survey"] = self.surveys(when, broadcast, inputs, v, b)
        written: list[tuple[Tensors, Tensors]] = []
        for rule, ctx in zip(setup.rules, self.inputs.contexts(inputs, self.model, broadcast.round, True), strict=True):
            if when in survey_times(rule):
                rule.end(ctx, {}, v)
            written.append((ctx.state, ctx.upload))
        metrics = {"loss": 0.0, "steps": 0.0, "setup_seconds": 0.0, "train_seconds": time.perf_counter() - began}
        return pack_update(setup, broadcast, torch.zeros_like(v), v, b, written, metrics, {}, {})

    def report_loss(self, broadcast: Broadcast) -> Update:
        """Return an update without tensors, whose metric ``loss`` is the mean loss of the client's initial model."""
        setup, device = self.setup, self.setup.device
        client = setup.federation.clients[broadcast.client]
        v, b = self.inputs.initial_params(broadcast).to(device), self.inputs.initial_buffers(broadcast).to(device)
        total = count = 0.0
        for index in torch.split(torch.arange(client.num_samples, device=client.y.device), CHUNK):
            x = self.inputs.normalize(take_rows(client.x, index))
            y = client.y[index].to(device)
            losses = setup.task.losses(forward(self.model, b, v, x).logits, y)
            predictions = setup.task.predictions(y)  # the loss is a mean over predictions, such as the tokens of texts
            total += float((losses.double() * predictions).sum())
            count += float(predictions.sum())
        return Update(
            client=broadcast.client,
            origin_round=broadcast.round,
            num_samples=client.num_samples,
            weight=broadcast.weight,
            delta=v.new_zeros(0),
            buffers=b.new_zeros(0),
            upload={},
            state=ClientState(),
            metrics={"loss": total / max(1.0, count)},
        )

    def train(self, broadcast: Broadcast, store: CheckpointStore | None = None) -> Update:
        """Run the local training of one client from its broadcast.

        Args:
            broadcast: Message from the server.
            store: Storage of checkpoints of the training, from which an interrupted one continues.
        """
        if not self.others:
            return self._train_seeded(broadcast, store)
        trainer = (self, *self.others)[broadcast.client % (1 + len(self.others))]
        update = trainer._train_seeded(broadcast, store)
        return without_model(update, self.setup.spec.size, len(self.model.b))

    def _train_seeded(self, broadcast: Broadcast, store: CheckpointStore | None) -> Update:
        number = derive(self.setup.seed, "model draws", broadcast.round, broadcast.client)
        with seeded_globals(self.setup.spec.draws_globally, number, self.setup.device):
            return self._train(broadcast, store)

    def _train(self, broadcast: Broadcast, store: CheckpointStore | None) -> Update:
        if broadcast.closing:
            return self.answer(broadcast)
        if broadcast.asks_loss:
            return self.report_loss(broadcast)
        setup, training, device = self.setup, self.setup.training, self.setup.device
        client = setup.federation.clients[broadcast.client]
        plan = setup.batch_plan(broadcast.round, broadcast.client).to(client.y.device)
        if any(len(index) // most_parts(setup.rules) == 1 for index in plan.batches) and self._rejects_single_samples:
            raise single_sample_error(setup.federation.client_title(broadcast.client))
        inputs = move_to(self.inputs_of(broadcast, plan), device)
        self.model.start(inputs["b_global"])
        began = time.perf_counter()
        contexts = partial(self.inputs.contexts, model=self.model, round=broadcast.round)
        carries, inputs, ctxs = apply_begin_hooks(setup.rules, inputs, contexts)
        ready = time.perf_counter()
        v_start, key = inputs["v_global"], inputs["key"]
        shown = requested_carry(setup.rules, carries, broadcast)
        grad_fn = composed_gradient(setup.rules, ctxs, carries, self.model, setup.task)

        v = v_start.clone()
        moments = self.inputs.optimizer_state(broadcast, v)
        total = torch.zeros((), dtype=v.dtype, device=device)
        first, checkpoint = 0, None
        if store is not None:
            checkpoint = TrainingCheckpoint(store, setup.rules, carries, self.model, plan)
            first, v, moments, total = checkpoint.restore(v, moments, total)
        for step, index in enumerate(plan.batches[first:], first):
            x, y = take_rows(client.x, index), client.y.index_select(0, index)
            x, y = plan.augment(x, y, setup.task.pixels)
            x, y = self.inputs.normalize(x), y.to(device)
            at = torch.tensor(step)
            now = training.at(broadcast.round, step)
            own_key = fold(key, at) if self.model.stream else key
            weight = None if plan.weights is None else plan.weights[step].to(device)
            batch = Batch(x, y, own_key, at, lr=now.lr, weight=weight)
            batch = batch._replace(trainable=combined_trainable_mask(setup.rules, ctxs, carries, batch))
            v, moments = optimizers.optimizer_step(now, v, grad_fn(v, batch), moments, step, batch.trainable)
            total += self.model.loss
            if checkpoint is not None:
                checkpoint.save_if_due(step + 1, v, moments, total)

        inputs["survey"] |= self.surveys("trained", broadcast, inputs, v, self.model.b)
        ctxs = contexts(inputs, ended=True)
        delta = local_update(inputs["sent"], broadcast.v.to(device), v_start, v)
        written, delta = apply_end_hooks(setup.rules, ctxs, carries, v, delta)
        metrics = {
            "loss": float(total) / max(1, len(plan.batches)),
            "steps": float(len(plan.batches)),
            "setup_seconds": ready - began,
            "train_seconds": time.perf_counter() - ready,
        }
        return pack_update(setup, broadcast, delta, v, self.model.b.clone(), written, metrics, shown, moments)
