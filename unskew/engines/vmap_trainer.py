"""Local training of several clients at once: ``unskew.engines.local_trainer`` mapped by ``torch.func.vmap``.

Clients whose next batch differs in size are mapped in separate groups, because padding would change BatchNorm's buffers
and with them the results.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from unskew.engines import optimizers
from unskew.engines.base import EngineConfig
from unskew.engines.client_inputs import apply_begin_hooks, apply_end_hooks, local_update, pack_update
from unskew.engines.group_batches import GroupBatches
from unskew.engines.local_trainer import LocalTrainer, combined_trainable_mask, composed_gradient, requested_carry
from unskew.errors import UnskewError
from unskew.models.execution import Batch, FunctionalModel
from unskew.models.grouped.context import GroupedModel, use_grouped
from unskew.models.user_modules import describe_error
from unskew.protocol.context import Context
from unskew.protocol.messages import Broadcast, Tensors, Update, replace_fields
from unskew.seeding import fold

Tree = Any


def stack_trees(trees: Sequence[Tree], device: torch.device) -> tuple[Tree, Tree]:
    """Stack trees along a leading client axis on ``device``, with one transfer per leaf for all clients.

    Args:
        trees: Tree of each client.
        device: Device to move to.

    Returns:
        Stacked tree, and the ``in_dims`` of its leaves: None for leaves that all clients share.
    """
    leaves = [pytree.tree_flatten(tree)[0] for tree in trees]
    layout = pytree.tree_flatten(trees[0])[1]
    stacked, dims = [], []
    for column in zip(*leaves, strict=True):
        alike = all(leaf is column[0] for leaf in column)  # including None, for values that no rule needs
        if alike:
            stacked.append(None if column[0] is None else column[0].to(device))
        else:
            together = len({leaf.device for leaf in column}) == 1  # state from a checkpoint is on the CPU
            stacked.append(torch.stack(column if together else [leaf.to(device) for leaf in column]).to(device))
        dims.append(None if alike else 0)
    return pytree.tree_unflatten(stacked, layout), pytree.tree_unflatten(dims, layout)


def select_rows(tree: Tree, index: Tensor | int | None, dims: Tree | None = None) -> Tree:
    """Select rows of every leaf with a client axis (all rows, not copied, if ``index`` is None).

    Args:
        tree: Nested containers of tensors.
        index: Rows to select; None for all.
        dims: Leaves with a client axis; None for all.
    """
    if index is None:
        return tree
    if dims is None:
        return pytree.tree_map(lambda leaf: leaf[index], tree)
    leaves, layout = pytree.tree_flatten(tree)
    flags = pytree.tree_flatten(dims, is_leaf=lambda d: d is None)[0]
    picked = [leaf if flag is None else leaf[index] for leaf, flag in zip(leaves, flags, strict=True)]
    return pytree.tree_unflatten(picked, layout)


def replace_rows(tree: Tree, index: Tensor | None, new: Tree) -> Tree:
    """Return ``tree`` with rows replaced.

    Args:
        tree: Nested containers of tensors.
        index: Rows to replace; None for all.
        new: Values of these rows.
    """
    if index is None:
        return new
    return pytree.tree_map(lambda old, part: old.index_copy(0, index, part), tree, new)


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
    clients, steps = setup.federation.clients, setup.training.steps
    return [steps(clients[broadcast.client].num_samples, broadcast.client) for broadcast in broadcasts]


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
        form: Grouped form of the model, which trains clients as one network; None to map each operator.
        views: Whether updates may be views of the group's tensors, if they are packed at once; otherwise, keeping one
            client's update would keep the memory of the whole group.
    """

    def __init__(
        self, setup: EngineConfig, single: LocalTrainer, form: GroupedModel | None = None, views: bool = False
    ):
        self.setup, self.single, self.views = setup, single, views
        self.form = None if any(rule.trains_alone for rule in setup.rules) else form
        # Encoded uploads are other tensors than those that are checked for all clients at once.
        self.encodes = any(rule.encodes for rule in setup.rules)
        self._warned = False

    def train(self, broadcasts: Sequence[Broadcast]) -> list[Update]:
        """Train clients of one kind, as one network if possible.

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

    def _map(self, function: Callable[..., Tree], dims: Tree, *args: Tree) -> Tree:
        return torch.func.vmap(function, in_dims=dims, randomness="error")(*args)

    def mapped(self, broadcasts: Sequence[Broadcast]) -> list[Update]:
        """Train clients of one kind under ``vmap``."""
        if broadcasts[0].closing or broadcasts[0].asks_loss:
            return [self.single.train(broadcast) for broadcast in broadcasts]
        with use_grouped(self.setup.spec, self.form):
            return self._mapped(broadcasts)

    def _mapped(self, broadcasts: Sequence[Broadcast]) -> list[Update]:
        setup, training, device, round = self.setup, self.setup.training, self.setup.device, broadcasts[0].round
        plans = [setup.batch_plan(round, sent.client) for sent in broadcasts]
        batches = GroupBatches(setup, [broadcast.client for broadcast in broadcasts], plans)
        inputs = self.single.inputs
        singly = [self.single.inputs_of(broadcast, plan) for broadcast, plan in zip(broadcasts, plans, strict=True)]
        stacked, dims = stack_trees(singly, device)

        def ctxs_of(stacked: dict[str, Any], b: Tensor, ended: bool = False) -> tuple[FunctionalModel, list[Context]]:
            model = FunctionalModel(setup.spec, b)
            return model, inputs.contexts(stacked, model, round, ended)

        def begin(stacked: dict[str, Any], b: Tensor) -> tuple[list[Tensors], Tensor]:
            carries, started, _ = apply_begin_hooks(setup.rules, stacked, lambda inputs: ctxs_of(inputs, b)[1])
            if started is not stacked:
                dims["v_global"] = 0
            return carries, started["v_global"]

        def step(
            stacked: dict[str, Any], b: Tensor, v: Tensor, carries: list[Tensors], state: Tensors, batch: Batch
        ) -> Tree:
            model, ctxs = ctxs_of(stacked, b)
            carries = [dict(carry) for carry in carries]
            grad_fn = composed_gradient(setup.rules, ctxs, carries, model, setup.task)
            trainable = combined_trainable_mask(setup.rules, ctxs, carries, batch)
            now = training.at(round, t)
            v, state = optimizers.optimizer_step(now, v, grad_fn(v, batch), state, t, trainable)
            return model.b, v, carries, state, model.loss

        def end(stacked: dict[str, Any], b: Tensor, carries: list[Tensors], v: Tensor, delta: Tensor) -> Tree:
            _, ctxs = ctxs_of(stacked, b, ended=True)
            return apply_end_hooks(setup.rules, ctxs, carries, v, delta)

        def rows(name: str) -> Tensor:
            value: Tensor = stacked[name]  # copied, because training overwrites it
            return torch.stack([value] * len(broadcasts)) if dims[name] is None else value.clone()

        b, keys, counts = (rows(name) for name in ("b_global", "key", "steps"))
        total = torch.zeros(len(broadcasts), dtype=stacked["v_global"].dtype, device=device)
        began = self._now()
        carries, v = self._map(begin, (dims, 0), stacked, b)
        if dims["v_global"] == 0:
            stacked["v_global"] = v
        v = rows("v_global")
        moments = [inputs.optimizer_state(broadcast, start) for broadcast, start in zip(broadcasts, v, strict=True)]
        state = {name: torch.stack([m[name] for m in moments]) for name in moments[0]}
        ready = self._now()
        samples = [
            requested_carry(setup.rules, select_rows(carries, k), broadcast) if broadcast.carry_of else {}
            for k, broadcast in enumerate(broadcasts)
        ]
        numbers = torch.arange(len(batches.steps), device=device)
        for t, at in enumerate(numbers):
            for group in batches.steps[t]:
                index = group.positions
                batch = self._batch(*batches.stored_batch(group), at, select_rows(keys, index))
                batch = batch._replace(lr=training.rate(round, t), weight=group.weights)
                args = (
                    select_rows(stacked, index, dims),
                    *(select_rows(x, index) for x in (b, v, carries, state)),
                    batch,
                )
                weighted = None if group.weights is None else 0
                in_dims = (dims, 0, 0, 0, 0, Batch(0, 0, 0, None, None, None, weighted))  # type: ignore[arg-type]
                new = self._map(step, in_dims, *args)
                b, v, carries, state = (
                    replace_rows(x, index, n) for x, n in zip((b, v, carries, state), new[:4], strict=True)
                )
                total = replace_rows(total, index, select_rows(total, index) + new[4])
        v_sent, _ = stack_trees([broadcast.v for broadcast in broadcasts], device)
        stacked, dims = self._trained_surveys(broadcasts, stacked, dims, v, b)
        deltas = local_update(stacked["sent"], v_sent, stacked["v_global"], v)
        written, deltas = self._map(end, (dims, 0, 0, 0, 0), stacked, b, carries, v, deltas)
        losses, finite = self._read(total / counts.clamp_min(1), (deltas, b, v, written, state))
        own: Callable[[Tensor], Tensor] = (lambda t: t) if self.views else torch.clone
        # Each client gets an equal share of the group's time.
        spent = {
            "setup_seconds": (ready - began) / len(broadcasts),
            "train_seconds": (self._now() - ready) / len(broadcasts),
        }
        updates = [
            pack_update(
                setup, broadcast, deltas[k], v[k], own(b[k]), pytree.tree_map(lambda leaf, k=k: own(leaf[k]), written),
                {"loss": losses[k], "steps": float(len(plans[k].batches)), **spent},
                samples[k], {name: own(t[k]) for name, t in state.items()},
            )
            for k, broadcast in enumerate(broadcasts)
        ]  # fmt: skip
        return [replace_fields(update, known_finite=known) for update, known in zip(updates, finite, strict=True)]

    def _trained_surveys(
        self, broadcasts: Sequence[Broadcast], stacked: dict[str, Any], dims: dict[str, Any], v: Tensor, b: Tensor
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the training inputs and their ``in_dims`` with the surveys of the trained models."""
        if all(rule.survey_at != "trained" for rule in self.setup.rules):
            return stacked, dims
        singly = []
        for k, broadcast in enumerate(broadcasts):
            own_inputs = select_rows(stacked, k, dims)
            singly.append(self.single.surveys("trained", broadcast, own_inputs, v[k], b[k]))
        surveys, axes = stack_trees(singly, self.setup.device)
        return {**stacked, "survey": surveys}, {**dims, "survey": axes}

    def _read(self, losses: Tensor, results: Tree) -> tuple[list[float], list[bool]]:
        """Return the clients' losses, and for which all results are known to be finite, in one read of the device."""
        k = len(losses)
        leaves = [leaf for leaf in pytree.tree_leaves(results) if leaf.numel()]
        if self.views or self.encodes:  # another process checks the updates, or other tensors are sent
            return losses.tolist(), [False] * k
        sums = [leaf.reshape(k, -1).sum(1).to(losses.dtype) for leaf in leaves]
        values, *columns = torch.stack([losses, *sums]).tolist()
        return values, [all(map(math.isfinite, row)) for row in zip(*columns, strict=True)]

    def _now(self) -> float:
        """Return the time after all work queued on the device is done."""
        if self.setup.device.type == "cuda":
            torch.cuda.synchronize(self.setup.device)
        return time.perf_counter()

    def _batch(self, stored: Tensor, y: Tensor, at: Tensor, keys: Tensor) -> Batch:
        flat = self.single.inputs.normalize(stored)
        if flat.dim() == 4 and self.form is None:
            x = torch.stack(flat.chunk(len(y)))
        else:
            x = torch.unflatten(flat, 0, (len(y), -1))
        return Batch(x, y, fold(keys, at) if self.single.model.stream else keys, at)
