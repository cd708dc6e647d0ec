"""Local training of clients of one kind, mapped over them: executed from Python, or as recorded work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from unskew.data.augment import crop_and_flip
from unskew.engines import optimizers
from unskew.engines.base import EngineConfig
from unskew.engines.batches import PADDING
from unskew.engines.client_axis import Tree, replace_rows, select_rows
from unskew.engines.client_inputs import ClientInputs, apply_begin_hooks, apply_end_hooks, local_update
from unskew.engines.group_batches import GroupBatches, StepKind
from unskew.engines.local_trainer import combined_trainable_mask, composed_gradient
from unskew.engines.recording import Recorder, Recording, RuleWatch, Static, overwrite
from unskew.models.execution import Batch, FunctionalModel
from unskew.protocol.messages import Tensors, num_bytes
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
            trainable = combined_trainable_mask(setup.rules, ctxs, carries, batch)
            v, state = optimizers.optimizer_step(training, v, grad_fn(v, batch), state, t, trainable)
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


class RecordedCohort(MappedCohort):
    """Local training of clients of one kind, as recorded work over tensors with fixed addresses.

    An instance serves all rounds whose tensors have the same names and shapes. Each kind of step is recorded by itself.

    Args:
        steps: Hooks and local steps.
        stacked: Training inputs of the clients in the first round.
        dims: Training inputs with a client axis.
        parts: Clients of each run, one after another.
        record: Records work.
    """

    def __init__(
        self,
        steps: CohortSteps,
        stacked: dict[str, Any],
        dims: dict[str, Any],
        parts: Sequence[slice],
        record: Recorder,
    ):
        self._given, self._given_dims, self.record = Static(stacked), dims, record
        super().__init__(steps, 0, self._given.tree, dims, parts)
        key: Tensor = self._given.tree["key"]
        self.keys = key.expand(self.count) if dims["key"] is None else key
        self._fixed: dict[str, Static] = {}
        self._begin = Recording(self._run_begin, steps.setup.device, steps.watch)
        self._end = self._new_ends()
        self._kinds: dict[StepKind, RecordedKind] = {}

    def start(self, round: int, stacked: dict[str, Any]) -> None:
        """Start a round.

        Args:
            round: Number of the round, from 0.
            stacked: Training inputs of the clients.
        """
        self.round = round
        self._given.load(stacked)
        self.stacked, self.dims = self._given.tree, self._given_dims

    @property
    def bytes(self) -> int:
        """Size of the fixed tensors in bytes."""
        fixed = [self._given, *self._fixed.values(), *(kind.table for kind in self._kinds.values())]
        return sum(num_bytes(t for t in each.leaves if isinstance(t, Tensor)) for each in fixed)

    @property
    def reasons(self) -> list[str]:
        """Reasons why local steps cannot be recorded."""
        return [reason for kind in self._kinds.values() for reason in kind.step.reasons]

    def _keep(self, name: str, tree: Tree) -> None:
        """Copy values into the fixed tensors of this name, which the first values of their layout create."""
        fixed = self._fixed.get(name)
        if fixed is not None and fixed.fits(tree):
            fixed.load(tree)
            return
        self._fixed[name] = Static(tree)
        if fixed is not None or name == "start":  # a rule does something else from this round on
            self._forget()

    def _forget(self) -> None:
        """Forget what was recorded with other fixed tensors."""
        self._kinds.clear()
        self._end = self._new_ends()

    def _new_ends(self) -> dict[bool, Recording]:
        """Return the recordings of the hooks after the last step, with sums and without."""
        setup, watch = self.steps.setup, self.steps.watch
        return {summed: Recording(partial(self._run_end, summed), setup.device, watch) for summed in (False, True)}

    def begin(self, optimizer_state: Callable[[Tensor], Tensors]) -> None:
        """Run the hooks before the first step."""
        self._begin.run(self.round, self.record)
        if "start" in self._fixed:
            self.stacked = {**self.stacked, "v_global": self._fixed["start"].tree}
            self.dims = {**self.dims, "v_global": 0}
        self.b, self.v, self.carries, self.total = self._fixed["values"].tree
        self._keep("state", optimizer_state(self.v))
        self.state = self._fixed["state"].tree

    def _run_begin(self, round: int) -> None:
        stacked, b = self._given.tree, self.rows("b_global")
        carries, v, replaced = self.steps.begin(round, self._given_dims, stacked, b)
        if replaced:
            self._keep("start", v)
        else:
            v = self.rows("v_global")
            if self._fixed.pop("start", None) is not None:
                self._forget()
        self._keep("values", (b, v, carries, torch.zeros_like(self.total)))

    def train(self, batches: GroupBatches) -> None:
        """Take all local steps."""
        training = self.steps.setup.training
        rates = [training.rate(self.round, t) for t in range(len(batches.steps))] if training.scheduled else None
        order, tables = batches.tables(rates)
        for kind, table in tables.items():
            known = self._kinds.get(kind)
            if known is None or not known.table.fits(table):
                known = self._kinds[kind] = RecordedKind(self, table)
            known.start(table)
        left = {kind: order.count(kind) for kind in tables}
        for kind in order:
            left[kind] -= 1
            self._kinds[kind].step.run(self.round, self.record, left[kind])

    def overwritten(self) -> list[Tensor]:
        """Return the tensors that a step overwrites."""
        return [*self._fixed["values"].leaves, *self._fixed["state"].leaves]

    def end(self, v_sent: Tensor) -> tuple[list[tuple[Tensors, Tensors]], Tensor]:
        """Run the hooks after the last step; the result is valid until the next round."""
        written, deltas = self._run(False, v_sent) or super().end(v_sent)
        return written, deltas

    def end_summed(self, v_sent: Tensor) -> Tree:
        """Run the hooks after the last step and return sums over clients, which are valid until the next round."""
        return self._run(True, v_sent) or super().end_summed(v_sent)

    def _run(self, summed: bool, v_sent: Tensor) -> Tree:
        """Return the results of the hooks after the last step; None if surveys of the trained models come in between."""
        if self.stacked["survey"] is not self._given.tree["survey"]:
            return None
        self._keep("sent", v_sent)
        self._end[summed].run(self.round, self.record)
        return self._fixed[f"results {summed}"].tree

    def _run_end(self, summed: bool, round: int) -> None:
        args = self.dims, self.stacked, self.b, self.carries, self.v, self._fixed["sent"].tree
        results: Tree = self.steps.end(round, *args)
        if summed:
            results = self.steps.summed(results, self.stacked, self.b, self.v, self.losses(), self.parts)
        self._keep(f"results {summed}", results)


class RecordedKind:
    """Recorded steps of one kind: a counter on the device selects the row of their table.

    Args:
        cohort: Clients that are trained.
        table: Steps of the first round, see ``GroupBatches.tables``.

    Attributes:
        table: Steps of the round, at fixed addresses.
        step: Next step.
    """

    def __init__(self, cohort: RecordedCohort, table: Tensors):
        self.cohort, self.table = cohort, Static(table)
        self._next = torch.zeros(1, dtype=torch.int64, device=table["rows"].device)
        self.step = Recording(
            self._run, cohort.steps.setup.device, cohort.steps.watch, lambda: [*cohort.overwritten(), self._next]
        )

    def start(self, table: Tensors) -> None:
        """Start a round.

        Args:
            table: Steps of the round.
        """
        self.table.load(table)
        self._next.zero_()

    def _run(self, round: int) -> None:
        """Take the next step: read its row of the table, and overwrite the values of its clients."""
        cohort, steps = self.cohort, self.cohort.steps
        row = {name: column.index_select(0, self._next).squeeze(0) for name, column in self.table.tree.items()}
        data, index = steps.setup.federation.clients, row.get("positions")
        x, y = data.take(row["rows"]), data.y.index_select(0, row["rows"])  # type: ignore[attr-defined]
        if "offsets" in row:
            x = crop_and_flip(x, row["offsets"], row["flips"], PADDING)
        keys = select_rows(cohort.keys, index)
        batch = steps.batch(x, torch.unflatten(y, 0, (len(keys), -1)), row["step"], keys)
        batch = batch._replace(lr=row.get("rate", steps.setup.training.lr), weight=row.get("weights"))
        whole = [cohort.b, cohort.v, cohort.carries, cohort.state]
        stacked = select_rows(cohort.stacked, index, cohort.dims)
        new, losses = steps.step(round, batch.step, cohort.dims, stacked, [select_rows(x, index) for x in whole], batch)
        old, part = pytree.tree_leaves(whole), pytree.tree_leaves(new)
        if index is None:
            overwrite(old, part)
            cohort.total.add_(losses)
        else:
            for own, rows in zip(old, part, strict=True):
                own.index_copy_(0, index, rows)
            cohort.total.index_copy_(0, index, cohort.total.index_select(0, index) + losses)
        self._next.add_(1)
