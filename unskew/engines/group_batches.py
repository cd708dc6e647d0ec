"""Batches of several clients in one round, moved to the device at once and gathered by one kernel per step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unskew.data.augment import crop_and_flip_samples
from unskew.data.clients import ArrayClients, take_rows
from unskew.engines.base import EngineConfig
from unskew.engines.batches import PADDING, BatchPlan
from unskew.engines.device import send
from unskew.protocol.messages import Tensors

StepKind = tuple[int, int]
"""Number of clients and size of their batches in a step."""


class StepGroup(NamedTuple):
    """Clients with batches of one size in one step, and the sample indices of each of them."""

    clients: list[int]
    batches: list[Tensor]
    positions: Tensor | None = None  # of the clients, on the device; None if these are all clients
    rows: Tensor | None = None  # of all samples in the array that the clients share
    augmentation: tuple[Tensor, Tensor] | None = None  # crop offsets and flips of all samples
    weights: Tensor | None = None  # of the rows of Poisson batches, [k, B]

    @property
    def kind(self) -> StepKind:
        """Number of clients and size of their batches."""
        return len(self.clients), len(self.batches[0])


class GroupBatches:
    """Batches of several clients; those of one step are one gather if the clients share an array.

    Args:
        setup: Configuration of the engine.
        numbers: Client numbers.
        plans: Sample indices of each client, in the order of ``numbers``.
    """

    def __init__(self, setup: EngineConfig, numbers: Sequence[int], plans: Sequence[BatchPlan]):
        source = setup.federation.clients
        self.device, self.pixels = setup.device, setup.task.pixels
        self.shared = source if isinstance(source, ArrayClients) and source.in_array else None
        self.clients = [] if self.shared is not None else [source[number] for number in numbers]
        data_device = self.clients[0].y.device if self.shared is None else self.shared.y.device
        if self.shared is None:
            plans = [plan.to(client.y.device) for plan, client in zip(plans, self.clients, strict=True)]
        by_size: dict[tuple[int, int], list[int]] = defaultdict(list)
        for k, plan in enumerate(plans):
            for t, batch in enumerate(plan.batches):
                by_size[t, len(batch)].append(k)
        sizes = sorted(by_size, key=lambda size: (size[0], by_size[size][0]))
        groups = [StepGroup(by_size[t, size], [plans[k].batches[t] for k in by_size[t, size]]) for t, size in sizes]
        lengths = [size * len(by_size[t, size]) for t, size in sizes]
        if self.shared is not None and groups:
            starts = torch.tensor([self.shared.bounds(numbers[k])[0] for group in groups for k in group.clients])
            counts = torch.tensor([size for t, size in sizes for _ in by_size[t, size]])
            rows = torch.cat([batch for group in groups for batch in group.batches]) + starts.repeat_interleave(counts)
            split = torch.split(rows.to(data_device), lengths)
            groups = [group._replace(rows=own) for group, own in zip(groups, split, strict=True)]
        if setup.training.augment and len(setup.federation.shape) == 3 and groups:
            drawn = [plan.draw_augmentation() for plan in plans]
            every = [drawn[k][t] for (t, _), group in zip(sizes, groups, strict=True) for k in group.clients]
            augmentation = [
                torch.split(torch.cat(parts).to(data_device), lengths) for parts in zip(*every, strict=True)
            ]
            groups = [
                group._replace(augmentation=own)
                for group, own in zip(groups, zip(*augmentation, strict=True), strict=True)
            ]
        some = [k for group in groups if len(group.clients) < len(plans) for k in group.clients]
        positions = torch.tensor(some, dtype=torch.int64).to(self.device) if some else torch.empty(0)
        self.steps: list[list[StepGroup]] = [[] for _ in range(max(len(plan.batches) for plan in plans))]
        for (t, _), group in zip(sizes, groups, strict=True):
            weights = [plan.weights[t] for k in group.clients if (plan := plans[k]).weights is not None]
            if weights:
                group = group._replace(weights=torch.stack(weights).to(self.device))
            if len(group.clients) < len(plans):
                group = group._replace(positions=positions[: len(group.clients)])
                positions = positions[len(group.clients) :]
            self.steps[t].append(group)

    @property
    def on_device(self) -> bool:
        """Return whether the clients share an array on the device, so that steps need nothing from the host."""
        return self.shared is not None and self.shared.y.device.type == self.device.type

    def tables(self, rates: Sequence[float] | None) -> tuple[list[StepKind], dict[StepKind, Tensors]]:
        """Return the steps of all kinds as tensors on the device, with a row per step, for clients that share an array there.

        The number of rows is a power of two, so that it seldom differs between rounds; the last ones may be unused.

        Args:
            rates: Learning rate of each step; None if it is constant.

        Returns:
            Kind of each step in order, and the tables: sample ``rows``, number of the ``step``, and, if needed, ``rate``,
            ``positions`` of the clients, crop ``offsets``, ``flips`` and ``weights`` of the samples.
        """
        entries: dict[StepKind, list[tuple[int, StepGroup]]] = defaultdict(list)
        order: list[StepKind] = []
        for t, groups in enumerate(self.steps):
            for group in groups:
                entries[group.kind].append((t, group))
                order.append(group.kind)
        return order, {kind: self._table(steps, rates) for kind, steps in entries.items()}

    def _table(self, steps: list[tuple[int, StepGroup]], rates: Sequence[float] | None) -> Tensors:
        """Return the table of the steps of one kind."""
        steps = steps + steps[-1:] * ((1 << (len(steps) - 1).bit_length()) - len(steps))
        groups = [group for _, group in steps]
        crops = [group.augmentation for group in groups if group.augmentation is not None]
        columns: dict[str, list[Tensor]] = {
            "rows": [group.rows for group in groups if group.rows is not None],
            "positions": [group.positions for group in groups if group.positions is not None],
            "weights": [group.weights for group in groups if group.weights is not None],
            "offsets": [offsets for offsets, _ in crops],
            "flips": [flips for _, flips in crops],
        }
        table = {name: torch.stack(parts) for name, parts in columns.items() if parts}
        numbers = [torch.tensor([t for t, _ in steps])]
        numbers += [] if rates is None else [torch.tensor([rates[t] for t, _ in steps], dtype=torch.float64)]
        return {**table, **dict(zip(("step", "rate"), (send(part, self.device) for part in numbers), strict=False))}

    def stored_batch(self, group: StepGroup) -> tuple[Tensor, Tensor]:
        """Return the stored inputs ``[k B, ...]`` of a group, and the targets ``[k, B, ...]`` on the device."""
        if self.shared is not None and group.rows is not None:
            x, y = self.shared.take(group.rows), self.shared.y.index_select(0, group.rows)
        else:
            chosen = [(self.clients[k], index) for k, index in zip(group.clients, group.batches, strict=True)]
            x = torch.cat([take_rows(client.x, index) for client, index in chosen])
            y = torch.cat([client.y.index_select(0, index) for client, index in chosen])
        if group.augmentation is not None:
            x, y = crop_and_flip_samples(x, y, *group.augmentation, PADDING, self.pixels)
        return x, torch.unflatten(y, 0, (len(group.clients), -1)).to(self.device)
