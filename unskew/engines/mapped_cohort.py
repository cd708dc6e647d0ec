"""Local training of clients of one kind, mapped over them by ``torch.func.vmap``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from unskew.engines import optimizers
from unskew.engines.base import EngineConfig
from unskew.engines.client_axis import Tree, replace_rows, select_rows
from unskew.engines.client_inputs import ClientInputs, apply_begin_hooks, apply_end_hooks, local_update
from unskew.engines.group_batches import GroupBatches
from unskew.engines.local_trainer import combined_trainable_mask, composed_gradient
from unskew.engines.recording import RuleWatch
from unskew.models.execution import Batch, FunctionalModel
from unskew.protocol.messages import Tensors
from unskew.seeding import fold


def mapped(function: Callable[..., Tree], dims: Tree, *args: Tree) -> Tree:
    """Map a function over clients.

    Args:
        function: Function of one client.
        dims: Arguments with a client axis.
        *args: Arguments of all clients.
    """
    return torch.func.vmap(function, in_dims=dims, randomness="error")(*args)


class CohortSteps:
    """Hooks and local steps of clients of one kind.

    Args:
        setup: Configuration of the engine.
        inputs: Creates the contexts of the rules.
        grouped: Whether the clients are trained as one network, which takes the channels of images last.
        draws: Whether the model draws random numbers in each step.
    """

    def __init__(self, setup: EngineConfig, inputs: ClientInputs, grouped: bool, draws: bool):
        self.setup, self.inputs, self.grouped, self.draws = setup, inputs, grouped, draws
        self.watch = RuleWatch(setup.rules)

    def begin(self, round: int, dims: Tree, stacked: dict[str, Any], b: Tensor) -> tuple[list[Tensors], Tensor, bool]:
        """Run the hooks before the first step.

        Args:
            round: Number of the round, from 0.
            dims: Training inputs with a client axis.
            stacked: Training inputs of the clients.
            b: Buffers, ``[k, m]``.

        Returns:
            Carry of each rule, parameters at the first step, and whether a rule has replaced them.
        """
        replaced = []

        def one(stacked: dict[str, Any], b: Tensor) -> tuple[list[Tensors], Tensor]:
            model = FunctionalModel(self.setup.spec, b)
            contexts = partial(self.inputs.contexts, model=model, round=round)
            carries, started, _ = apply_begin_hooks(self.setup.rules, stacked, contexts)
            replaced.append(started is not stacked)
            return carries, started["v_global"]

        carries, v = mapped(one, (dims, 0), stacked, b)
        return carries, v, replaced[-1]

    def step(
        self, round: int, t: int | Tensor, dims: Tree, stacked: dict[str, Any], values: Tree, batch: Batch
    ) -> Tree:
        """Take a local step.

        Args:
            round: Number of the round, from 0.
            t: Number of the step, from 0.
            dims: Training inputs with a client axis.
            stacked: Training inputs of the clients.
            values: Buffers ``[k, m]``, parameters ``[k, d]``, carries and optimizer state; may be overwritten.
            batch: Batches of the clients.

        Returns:
            New values, and the losses, ``[k]``.
        """
        setup = self.setup
        training = setup.training.with_rate(batch.lr) if setup.training.scheduled else setup.training

        def one(
            stacked: dict[str, Any], b: Tensor, v: Tensor, carries: list[Tensors], state: Tensors, batch: Batch
        ) -> Tree:
            model = FunctionalModel(setup.spec, b)
            ctxs = self.inputs.contexts(stacked, model, round)
            carries = [dict(carry) for carry in carries]
            grad_fn = composed_gradient(setup.rules, ctxs, carries, model, setup.task)
            batch = batch._replace(trainable=combined_trainable_mask(setup.rules, ctxs, carries, batch))
            v, state = optimizers.optimizer_step(training, v, grad_fn(v, batch), state, t, batch.trainable)
            return model.b, v, carries, state, model.loss

        weighted = None if batch.weight is None else 0
        in_dims = (dims, 0, 0, 0, 0, Batch(0, 0, 0, None, None, None, weighted))  # type: ignore[arg-type]
        *new, losses = mapped(one, in_dims, stacked, *values, batch)
        return new, losses

    def end(
        self,
        round: int,
        dims: Tree,
        stacked: dict[str, Any],
        b: Tensor,
        carries: list[Tensors],
        v: Tensor,
        v_sent: Tensor,
    ) -> tuple[list[tuple[Tensors, Tensors]], Tensor]:
        """Run the hooks after the last step.

        Args:
            round: Number of the round, from 0.
            dims: Training inputs with a client axis.
            stacked: Training inputs of the clients.
            b: Buffers after training, ``[k, m]``.
            carries: Carry of each rule.
            v: Parameters after training, ``[k, d]``.
            v_sent: Broadcast model, ``[d]`` or ``[k, d]``.

        Returns:
            State and upload of each rule, and the updates, ``[k, d]``.
        """

        def one(stacked: dict[str, Any], b: Tensor, carries: list[Tensors], v: Tensor, delta: Tensor) -> Tree:
            ctxs = self.inputs.contexts(stacked, FunctionalModel(self.setup.spec, b), round, ended=True)
            return apply_end_hooks(self.setup.rules, ctxs, carries, v, delta)

        deltas = local_update(stacked["sent"], v_sent, stacked["v_global"], v)
        written, deltas = mapped(one, (dims, 0, 0, 0, 0), stacked, b, carries, v, deltas)
        return written, deltas

    def summed(
        self, results: Tree, stacked: dict[str, Any], b: Tensor, v: Tensor, losses: Tensor, parts: Sequence[slice]
    ) -> Tree:
        """Return the sums that servers need, without the clients whose numbers are not finite.

        Args:
            results: State and upload of each rule, and the updates, see ``end``.
            stacked: Training inputs of the clients.
            b: Buffers after training, ``[k, m]``.
            v: Parameters after training, ``[k, d]``.
            losses: Mean losses, ``[k]``.
            parts: Clients of each sum.

        Returns:
            For each part, the weighted sums of updates ``[d]`` and buffers ``[m]``, and the sums of the uploads by rule; the
            states by rule ``[k, ...]``; and losses, and whether all numbers are finite, ``[2, k]``.
        """
        written, deltas = results
        leaves = [leaf.reshape(len(v), -1) for leaf in pytree.tree_leaves((deltas, b, v, written)) if leaf.numel()]
        finite = torch.stack([leaf.isfinite().all(1) for leaf in leaves]).all(0)
        weights = torch.where(finite, stacked["weight"], 0.0)

        def usable(rows: Tensor) -> Tensor:
            return torch.where(finite.view(-1, *[1] * (rows.dim() - 1)), rows, torch.zeros_like(rows))

        rules = [rule.name for rule in self.setup.rules]
        state = {name: kept for name, (kept, _) in zip(rules, written, strict=True)}
        uploads = {name: pytree.tree_map(usable, sent) for name, (_, sent) in zip(rules, written, strict=True)}
        deltas, b = usable(deltas), usable(b)
        sums = [
            (
                weights[part] @ deltas[part],
                weights[part] @ b[part],
                pytree.tree_map(lambda rows, part=part: rows[part].sum(0, dtype=rows.dtype), uploads),
            )
            for part in parts
        ]
        return sums, state, torch.stack([losses, finite.to(losses.dtype)])

    def batch(self, stored: Tensor, y: Tensor, step: Tensor, keys: Tensor) -> Batch:
        """Return the batches of a step.

        Args:
            stored: Stored inputs of all clients, ``[k B, ...]``.
            y: Targets, ``[k, B, ...]``.
            step: Number of the step.
            keys: Random keys of the clients, ``[k]``.
        """
        flat = self.inputs.normalize(stored)
        if flat.dim() == 4 and not self.grouped:
            x = torch.stack(flat.chunk(len(y)))
        else:
            x = torch.unflatten(flat, 0, (len(y), -1))
        return Batch(x, y, fold(keys, step) if self.draws else keys, step)


class MappedCohort:
    """Local training of clients of one kind in one round, executed from Python.

    Args:
        steps: Hooks and local steps.
        round: Number of the round, from 0.
        stacked: Training inputs of the clients.
        dims: Training inputs with a client axis.
        parts: Clients of each run, one after another.

    Attributes:
        v: Parameters, ``[k, d]``.
        b: Buffers, ``[k, m]``.
        carries: Carry of each rule.
        state: State of the optimizer.
        total: Sums of the losses, ``[k]``.
    """

    carries: list[Tensors]
    state: Tensors

    def __init__(
        self, steps: CohortSteps, round: int, stacked: dict[str, Any], dims: dict[str, Any], parts: Sequence[slice]
    ):
        self.steps, self.round, self.stacked, self.dims, self.parts = steps, round, stacked, dims, parts
        count = self.count = parts[-1].stop
        self.b, self.keys = self.rows("b_global"), self.rows("key")
        self.total = torch.zeros(count, dtype=stacked["v_global"].dtype, device=steps.setup.device)

    def rows(self, name: str) -> Tensor:
        """Return a training input of each client, copied, because training overwrites it."""
        value: Tensor = self.stacked[name]
        return torch.stack([value] * self.count) if self.dims[name] is None else value.clone()

    def begin(self, optimizer_state: Callable[[Tensor], Tensors]) -> None:
        """Run the hooks before the first step.

        Args:
            optimizer_state: Returns the state of the optimizer for parameters ``[k, d]``.
        """
        self.carries, v, replaced = self.steps.begin(self.round, self.dims, self.stacked, self.b)
        if replaced:
            self.stacked, self.dims = {**self.stacked, "v_global": v}, {**self.dims, "v_global": 0}
        self.v = self.rows("v_global")
        self.state = optimizer_state(self.v)

    def train(self, batches: GroupBatches) -> None:
        """Take all local steps."""
        training = self.steps.setup.training
        numbers = torch.arange(len(batches.steps), device=self.steps.setup.device)
        for t, at in enumerate(numbers):
            for group in batches.steps[t]:
                index = group.positions
                batch = self.steps.batch(*batches.stored_batch(group), at, select_rows(self.keys, index))
                batch = batch._replace(lr=training.rate(self.round, t), weight=group.weights)
                values = [select_rows(x, index) for x in (self.b, self.v, self.carries, self.state)]
                stacked = select_rows(self.stacked, index, self.dims)
                new, losses = self.steps.step(self.round, t, self.dims, stacked, values, batch)
                self.b, self.v, self.carries, self.state = (
                    replace_rows(x, index, n)
                    for x, n in zip((self.b, self.v, self.carries, self.state), new, strict=True)
                )
                self.total = replace_rows(self.total, index, select_rows(self.total, index) + losses)

    def end(self, v_sent: Tensor) -> tuple[list[tuple[Tensors, Tensors]], Tensor]:
        """Run the hooks after the last step.

        Args:
            v_sent: Broadcast model, ``[d]`` or ``[k, d]``.

        Returns:
            State and upload of each rule, and the updates, ``[k, d]``.
        """
        return self.steps.end(self.round, self.dims, self.stacked, self.b, self.carries, self.v, v_sent)

    def losses(self) -> Tensor:
        """Return the mean losses of the clients, ``[k]``."""
        steps: Tensor = self.stacked["steps"]
        return self.total / steps.clamp_min(1)

    def end_summed(self, v_sent: Tensor) -> Tree:
        """Run the hooks after the last step and return sums over clients, see ``CohortSteps.summed``.

        Args:
            v_sent: Broadcast model, ``[d]`` or ``[k, d]``.
        """
        return self.steps.summed(self.end(v_sent), self.stacked, self.b, self.v, self.losses(), self.parts)
