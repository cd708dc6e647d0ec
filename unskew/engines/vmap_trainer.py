"""Local training of several clients at once: ``unskew.engines.local_trainer`` mapped by ``torch.func.vmap``.

Clients whose next batch differs in size are mapped in separate groups, because padding would change BatchNorm's buffers
and with them the results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from unskew.engines.base import EngineConfig
from unskew.engines.batches import BatchPlan
from unskew.engines.client_axis import Tree, select_rows, stack_trees
from unskew.engines.client_inputs import pack_update
from unskew.engines.device import elapsed, time_mark
from unskew.engines.group_batches import GroupBatches
from unskew.engines.local_trainer import LocalTrainer, requested_carry
from unskew.engines.mapped_cohort import CohortSteps, MappedCohort
from unskew.engines.recorded_cohort import RecordedCohort
from unskew.engines.recording import Recorder, WatchedRound, signature
from unskew.errors import UnskewError
from unskew.models.grouped.context import GroupedModel, MappedModel, use_grouped
from unskew.models.user_modules import describe_error
from unskew.protocol.messages import Broadcast, SummedUpdate, Tensors, Update, replace_fields
from unskew.protocol.rules import survey_times

MAX_RECORDED_BYTES = 4 << 30
"""Size of the fixed tensors of recorded cohorts above which those that were not used for the longest time are dropped."""
TIMED_STEPS = 16
"""Number of steps that are timed together."""


def client_kind(broadcast: Broadcast) -> Hashable:
    """Return a key that is equal for clients whose tensors have the same names and shapes."""
    state = {name: tuple(t.shape) for name, t in sorted(broadcast.state.tensors().items())}
    return repr((state, broadcast.down, broadcast.up))


def steps_per_client(setup: EngineConfig, broadcasts: Sequence[Broadcast]) -> list[int]:
    """Return the number of local steps of each client.

    Args:
        setup: Configuration of the engine.
        broadcasts: Messages from the server.
    """
    sizes = [setup.num_trained(setup.federation.num_samples(broadcast.client)) for broadcast in broadcasts]
    return [setup.training.steps(size, sent.client) for size, sent in zip(sizes, broadcasts, strict=True)]


def schedule_groups(broadcasts: Sequence[Broadcast], steps: Sequence[int], most: int) -> list[list[int]]:
    """Group clients that are trained together, by index; groups of clients with many steps come first.

    A group has clients of one kind with similar numbers of steps, at most ``most`` of them. Groups of clients with more
    steps than the mean are smaller, so that a group takes no more work than ``most`` average clients.

    Args:
        broadcasts: Messages to the cohort.
        steps: Local steps of each client.
        most: Maximum number of clients in a group.
    """
    order = sorted(range(len(broadcasts)), key=lambda index: -steps[index])
    if most == 1:
        return [[index] for index in order]
    limit = most * sum(steps) / max(1, len(steps))
    parts: list[list[int]] = []
    open_parts: dict[Hashable, list[int]] = {}
    for index in order:
        key = client_kind(broadcasts[index])
        part = open_parts.get(key)
        if part is None or len(part) == most or sum(steps[p] for p in part) + steps[index] > limit:
            part = open_parts[key] = []
            parts.append(part)
        part.append(index)
    return parts


class GroupTrainer:
    """Trains several clients of one kind at once.

    Args:
        setup: Configuration of the engine.
        single: Trainer of single clients, for rules that cannot be mapped.
        form: Form of several clients; None to train one at a time with ``train``, or to map each operator with ``mapped``.
        views: Whether updates may be views of the group's tensors, if they are packed at once; otherwise, keeping one
            client's update would keep the memory of the whole group.
        record: Records work on a device; None executes everything from Python.
    """

    def __init__(
        self,
        setup: EngineConfig,
        single: LocalTrainer,
        form: MappedModel | None = None,
        views: bool = False,
        record: Recorder | None = None,
    ):
        self.setup, self.single, self.form, self.views = setup, single, form, views
        self.steps = CohortSteps(
            setup, single.inputs, isinstance(self.form, GroupedModel), single.model.stream is not None
        )
        self.record = record
        self._recorded: dict[str, RecordedCohort] = {}
        # Encoded uploads are other tensors than those that are checked for all clients at once.
        self.encodes = any(rule.encodes for rule in setup.rules)
        self._warned = self._warned_unrecorded = False

    def train(self, broadcasts: Sequence[Broadcast]) -> list[Update]:
        """Train clients of one kind, at once if possible.

        Some rules cannot be mapped, for example if they read values of tensors or differentiate twice. Their clients
        are trained one by one. This is tried again in every round, so that a resumed run takes the same path.
        """
        if len(broadcasts) == 1 or self.form is None:
            return [self.single.train(broadcast) for broadcast in broadcasts]
        try:
            return self.mapped(broadcasts)
        except UnskewError:
            raise
        except Exception as error:  # errors that do not come from the mapping are raised below
            reason = describe_error(error)
        remedy = "With clients_per_group=1, the numbers are the same, and no round begins with a failed attempt."
        return self.train_singly(broadcasts, reason, remedy)

    def train_singly(self, broadcasts: Sequence[Broadcast], reason: str, remedy: str) -> list[Update]:
        """Train clients one by one because their training cannot be mapped, and warn about it once.

        Args:
            broadcasts: Messages to the clients.
            reason: Description of the error of the mapping.
            remedy: Sentence about a faster choice.
        """
        updates = [self.single.train(broadcast) for broadcast in broadcasts]
        if not self._warned:
            self._warned = True
            self.setup.warn(
                "Clients are trained one at a time, because PyTorch cannot map the model or the method over clients "
                f"({reason.partition('. ')[0]}). {remedy}"
            )
        return updates

    def mapped(self, broadcasts: Sequence[Broadcast]) -> list[Any]:
        """Train clients of one kind under ``vmap``."""
        if broadcasts[0].closing or broadcasts[0].asks_loss:
            return [self.single.train(broadcast) for broadcast in broadcasts]
        with use_grouped(self.setup.spec, self.form):
            return self._mapped(broadcasts)

    def _mapped(self, broadcasts: Sequence[Broadcast]) -> list[Any]:
        if self.record is None:
            return self._train_cohort(broadcasts)
        try:
            return self._train_cohort(broadcasts)
        except (UnskewError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # errors that do not come from the recording are raised below
            reason = describe_error(error)
            if WatchedRound.__name__ in reason:
                reason = "ctx.round was passed to a function of PyTorch; pass int(ctx.round)"
        self.record = None
        self._recorded.clear()
        updates = self._train_cohort(broadcasts)
        self._warn_unrecorded(reason)
        return updates

    def _warn_unrecorded(self, reason: str) -> None:
        """Warn once that local steps are not recorded."""
        if not self._warned_unrecorded:
            self._warned_unrecorded = True
            self.setup.warn(
                f"Local steps are not recorded as a CUDA graph, which makes small models several times slower ({reason}). "
                "The numbers are the same. Set graphs=never to avoid the attempt."
            )

    def _prepared(self, broadcasts: Sequence[Broadcast], plans: list[BatchPlan]) -> tuple[MappedCohort, GroupBatches]:
        """Return clients of one kind, ready to train on the batches of their plans."""
        setup, round = self.setup, broadcasts[0].round
        ends = list(
            accumulate(len(list(own)) for _, own in groupby(broadcasts, lambda sent: setup.run_of(sent.client)))
        )
        parts = [slice(start, end) for start, end in pairwise([0, *ends])]
        batches = GroupBatches(setup, [broadcast.client for broadcast in broadcasts], plans)
        singly = [self.single.inputs_of(broadcast, plan) for broadcast, plan in zip(broadcasts, plans, strict=True)]
        stacked, dims = stack_trees(singly, setup.device)
        if self.record is None or not batches.on_device:
            return MappedCohort(self.steps, round, stacked, dims, parts), batches
        key = signature(stacked) + repr((dims, parts))
        cohort = self._recorded.pop(key, None)
        if cohort is None:
            cohort = RecordedCohort(self.steps, stacked, dims, parts, self.record)
            while self._recorded and sum(each.bytes for each in self._recorded.values()) > MAX_RECORDED_BYTES:
                self._recorded.pop(next(iter(self._recorded)))
        self._recorded[key] = cohort  # the last used one comes last
        cohort.start(round, stacked)
        return cohort, batches

    def _train_cohort(self, broadcasts: Sequence[Broadcast]) -> list[Any]:
        setup, count = self.setup, len(broadcasts)
        plans = [setup.batch_plan(sent.round, sent.client) for sent in broadcasts]
        v_sent, _ = stack_trees([broadcast.v for broadcast in broadcasts], setup.device)
        cohort, batches = self._prepared(broadcasts, plans)
        times = [time_mark(setup.device)]
        cohort.begin(lambda v: self._optimizer_state(broadcasts, v))
        times.append(time_mark(setup.device))
        samples = [
            pytree.tree_map(torch.clone, requested_carry(setup.rules, select_rows(cohort.carries, k), broadcast))
            if broadcast.carry_of
            else {}
            for k, broadcast in enumerate(broadcasts)
        ]
        cohort.train(batches)
        if isinstance(cohort, RecordedCohort) and cohort.reasons:
            self._warn_unrecorded(cohort.reasons[0])
        b, v, state = cohort.b, cohort.v, cohort.state
        if any("trained" in survey_times(rule) for rule in setup.rules):
            cohort.stacked, cohort.dims = self._trained_surveys(broadcasts, cohort.stacked, cohort.dims, v, b)
        plain = not any(
            sent.report or sent.carry_of or sent.keeps_optimizer or sent.up is not None for sent in broadcasts
        )
        if setup.sums and self.record is not None and plain and count > 1:
            return self._summed(broadcasts, cohort.parts, cohort.end_summed(v_sent), times)
        written, deltas = cohort.end(v_sent)
        losses, finite = self._read(cohort.losses(), (deltas, b, v, written, state))
        own: Callable[[Tensor], Tensor] = (lambda t: t) if self.views else torch.clone
        if isinstance(cohort, RecordedCohort):  # the next round overwrites its tensors
            deltas, v = deltas.clone(), v.clone()
        # Each client gets an equal share of the group's time.
        spent = self._shares(times, count)
        updates: list[Update] = [
            pack_update(
                *setup.origin(broadcast), deltas[k], v[k], own(b[k]),
                pytree.tree_map(lambda leaf, k=k: own(leaf[k]), written),
                {"loss": losses[k], "steps": float(len(plans[k].batches)), **spent},
                samples[k], {name: own(t[k]) for name, t in state.items()},
            )
            for k, broadcast in enumerate(broadcasts)
        ]  # fmt: skip
        return [replace_fields(update, known_finite=known) for update, known in zip(updates, finite, strict=True)]

    def step_seconds(self, broadcasts: Sequence[Broadcast]) -> float:
        """Return the seconds of a recorded first step of clients of one kind, whose result is discarded.

        Args:
            broadcasts: Messages to the clients.

        Returns:
            Infinity if the step cannot be recorded.
        """
        plans = [self.setup.batch_plan(sent.round, sent.client) for sent in broadcasts]
        for plan in plans:
            plan.batches = plan.batches[:1] * TIMED_STEPS
            plan.weights = None if plan.weights is None else plan.weights[:1] * TIMED_STEPS
        try:
            with use_grouped(self.setup.spec, self.form):
                cohort, batches = self._prepared(broadcasts, plans)
                cohort.begin(lambda v: self._optimizer_state(broadcasts, v))
                cohort.train(batches)  # records the step
                began = time_mark(self.setup.device)
                cohort.train(batches)
                return elapsed(began, time_mark(self.setup.device)) / TIMED_STEPS
        except UnskewError:
            raise
        except Exception:  # training itself reports what is wrong
            return math.inf
        finally:
            self._recorded.clear()

    def _summed(
        self, broadcasts: Sequence[Broadcast], parts: Sequence[slice], results: Tree, times: list[Any]
    ) -> list[SummedUpdate | None]:
        """Return the sums of the updates of each run at the place of its first client; the device is read once."""
        sums, state, report = results
        losses, finite = report.tolist()
        spent = self._shares(times, len(broadcasts))
        updates: list[SummedUpdate | None] = [None] * len(broadcasts)
        for part, (delta, buffers, upload) in zip(parts, sums, strict=True):
            usable = [k for k in range(part.start, part.stop) if finite[k]]
            rows = part if len(usable) == part.stop - part.start else usable
            loss = sum(losses[k] for k in usable)
            updates[part.start] = SummedUpdate(
                origin_round=broadcasts[0].round,
                clients=tuple(broadcasts[k].client for k in usable),
                unusable=tuple(broadcasts[k].client for k in range(part.start, part.stop) if not finite[k]),
                num_samples=sum(self.setup.federation.num_samples(broadcasts[k].client) for k in usable),
                weight=sum(broadcasts[k].weight for k in usable),
                delta=delta,
                buffers=buffers,
                upload={name: tensors for name, tensors in upload.items() if tensors},
                metrics={"loss": loss, **{name: seconds * len(usable) for name, seconds in spent.items()}},
                state=pytree.tree_map(lambda leaf, rows=rows: leaf[rows], state),
                known_finite=True,
                masked=False,
            )
        return updates

    def _optimizer_state(self, broadcasts: Sequence[Broadcast], v: Tensor) -> Tensors:
        """Return the clients' states of the optimizer for parameters ``[k, d]``."""
        inputs = self.single.inputs
        if not any(broadcast.keeps_optimizer and broadcast.state.optimizer for broadcast in broadcasts):
            return inputs.optimizer_state(broadcasts[0], v)
        each = [inputs.optimizer_state(broadcast, start) for broadcast, start in zip(broadcasts, v, strict=True)]
        return {name: torch.stack([state[name] for state in each]) for name in each[0]}

    def _trained_surveys(
        self, broadcasts: Sequence[Broadcast], stacked: dict[str, Any], dims: dict[str, Any], v: Tensor, b: Tensor
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the training inputs and their ``in_dims`` with the surveys of the trained models."""
        singly = []
        for k, broadcast in enumerate(broadcasts):
            own_inputs = select_rows(stacked, k, dims)
            surveys = self.single.surveys("trained", broadcast, own_inputs, v[k], b[k])
            singly.append({**own_inputs["survey"], **surveys})
        sums, axes = stack_trees(singly, self.setup.device)
        return {**stacked, "survey": sums}, {**dims, "survey": axes}

    def _read(self, losses: Tensor, results: Tree) -> tuple[list[float], list[bool]]:
        """Return the clients' losses, and for which all results are known to be finite, in one read of the device."""
        k = len(losses)
        leaves = [leaf for leaf in pytree.tree_leaves(results) if leaf.numel()]
        if self.views or self.encodes:  # another process checks the updates, or other tensors are sent
            return losses.tolist(), [False] * k
        sums = [leaf.reshape(k, -1).sum(1).to(losses.dtype) for leaf in leaves]
        values, *columns = torch.stack([losses, *sums]).tolist()
        return values, [all(map(math.isfinite, row)) for row in zip(*columns, strict=True)]

    def _shares(self, times: list[Any], count: int) -> dict[str, float]:
        """Return each client's share of the seconds before the first step and since then."""
        times = [*times, time_mark(self.setup.device)]
        seconds = [elapsed(first, last) / count for first, last in pairwise(times)]
        return dict(zip(("setup_seconds", "train_seconds"), seconds, strict=True))
