"""Local training of clients of one kind as recorded work over tensors with fixed addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from unskew.data.augment import crop_and_flip_samples
from unskew.engines.batches import PADDING
from unskew.engines.client_axis import Tree, select_rows
from unskew.engines.group_batches import GroupBatches, StepKind
from unskew.engines.mapped_cohort import CohortSteps, MappedCohort
from unskew.engines.recording import Recorder, Recording, Static, overwrite
from unskew.protocol.messages import Tensors, num_bytes


class RecordedCohort(MappedCohort):
    """Local training of clients of one kind, as recorded work over tensors with fixed addresses.

    An instance serves all rounds whose tensors have the same names and shapes. Each kind of step is recorded separately.

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
            x, y = crop_and_flip_samples(x, y, row["offsets"], row["flips"], PADDING, steps.setup.task.pixels)
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
