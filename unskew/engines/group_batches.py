"""Batches of several clients in one round, moved to the device at once and gathered by one kernel per step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from unskew.data.augment import crop_and_flip
from unskew.data.clients import ArrayClients, DrawnClients, take_rows
from unskew.engines.base import EngineConfig
from unskew.engines.batches import PADDING, BatchPlan


class GroupBatches:
    """Batches of several clients.

    If the clients share one array, a batch of all of them is one gather from it. Otherwise each client's samples are
    gathered separately, and the batch is moved to the device at once.

    Args:
        setup: Configuration of the engine.
        numbers: Client numbers.
        plans: Sample indices of each client, in the order of ``numbers``.

    Attributes:
        steps: Clients that train in each step, as positions in ``numbers``, grouped by batch size.
    """

    def __init__(self, setup: EngineConfig, numbers: Sequence[int], plans: Sequence[BatchPlan]):
        self.device = setup.device
        every = setup.federation.clients
        self.shared = every if isinstance(every, ArrayClients) and not isinstance(every, DrawnClients) else None
        self.clients = [every[number] for number in numbers]
        self.plans = plans
        self.steps: list[list[list[int]]] = []
        for t in range(max(len(plan.batches) for plan in plans)):
            sizes: dict[int, list[int]] = defaultdict(list)
            for k, plan in enumerate(plans):
                if t < len(plan.batches):
                    sizes[len(plan.batches[t])].append(k)
            self.steps.append(list(sizes.values()))
        parts = [(t, who) for t, groups in enumerate(self.steps) for who in groups]
        lengths = [sum(len(plans[k].batches[t]) for k in who) for t, who in parts]
        data_device = self.clients[0].y.device
        self._rows = self._shared_rows(parts, lengths, data_device)
        self._moves: Iterator[tuple[Tensor, Tensor]] | None = None
        if setup.training.augment and len(setup.federation.shape) == 3:
            drawn = [plan.draw_augmentation() for plan in plans]
            both = zip(*(drawn[k][t] for t, who in parts for k in who), strict=True)
            offsets, flips = (torch.cat(values).to(data_device) for values in both)
            self._moves = zip(torch.split(offsets, lengths), torch.split(flips, lengths), strict=True)
        some = [who for _, who in parts if len(who) < len(plans)]
        flat = torch.tensor([k for who in some for k in who], dtype=torch.int64)
        self._index = iter(torch.split(flat.to(self.device), [len(who) for who in some]) if some else ())

    def _shared_rows(
        self, parts: Sequence[tuple[int, list[int]]], lengths: list[int], device: torch.device
    ) -> Iterator[Tensor] | None:
        """Return the rows of the shared array in each part, or None if the clients do not share one."""
        if self.shared is None:
            for plan, client in zip(self.plans, self.clients, strict=True):
                plan.to(client.y.device)
            return None
        batches = [
            (self.plans[k].batches[t], self.shared.bounds(self.clients[k].id)[0]) for t, who in parts for k in who
        ]
        if not batches:
            return iter(())
        starts = torch.tensor([start for _, start in batches])
        sizes = torch.tensor([len(batch) for batch, _ in batches])
        rows = torch.cat([batch for batch, _ in batches]) + starts.repeat_interleave(sizes)
        return iter(torch.split(rows.to(device), lengths))

    def next_index(self, who: Sequence[int]) -> Tensor | None:
        """Return positions as a tensor on the device, or None if these are all clients.

        Must be called once per group of ``steps``, in order, as ``next_batch``.

        Args:
            who: Group of clients.
        """
        return None if len(who) == len(self.plans) else next(self._index)

    def next_batch(self, t: int, who: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the stored inputs ``[k B, ...]`` and the targets ``[k, B, ...]`` of the next group of ``steps``.

        Args:
            t: Number of the step.
            who: Group of clients.
        """
        if self.shared is not None and self._rows is not None:
            rows = next(self._rows)
            x, y = take_rows(self.shared.x, rows), self.shared.y.index_select(0, rows)
        else:
            chosen = [(self.clients[k], self.plans[k].batches[t]) for k in who]
            x = torch.cat([take_rows(client.x, index) for client, index in chosen])
            y = torch.cat([client.y.index_select(0, index) for client, index in chosen])
        if self._moves is not None:
            x = crop_and_flip(x, *next(self._moves), PADDING)
        return x, y.unflatten(0, (len(who), -1)).to(self.device)
