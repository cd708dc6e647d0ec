"""Information that the server has about its clients, and that client rules have about their data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from unskew.data.federation import ClientData, Federation, take_rows
from unskew.data.normalization import Normalization
from unskew.protocol.round_plan import DEFAULT_PLAN, RoundPlan
from unskew.seeding import generator
from unskew.tasks.base import Task

Weights = Literal["samples", "uniform"] | Callable[[Any, Sequence[int]], np.ndarray]
"""Weighting of clients in means: by samples, uniform, or a function of the ``FederationInfo`` and the clients of a round that
returns their weights before normalization, ``[len(cohort)]``."""


@dataclass(frozen=True)
class FederationInfo:
    """Server's information about a federation; it includes no client's samples.

    Attributes:
        clients: Number of clients ``K``.
        shape: Shape of one input.
        classes: Number of classes, labels or tokens.
        task: Name of the task.
        dtype: Data type of the stored inputs.
        normalization: Standardization of inputs; None for none.
        size: Maps a client number to its number of samples for weighted means: real training samples.
        class_counts: Returns training samples per client and class, ``[K, C]``; may be slow.
        sizes: Returns ``size`` of all clients, ``[K]``; may be slow.
        weights: Weighting of clients in means.
        plan: Schedule of the run.
    """

    clients: int
    shape: tuple[int, ...]
    classes: int
    task: str
    dtype: torch.dtype
    normalization: Normalization | None
    size: Callable[[int], int]
    class_counts: Callable[[], np.ndarray]
    sizes: Callable[[], np.ndarray]
    weights: Weights = "uniform"
    plan: RoundPlan = field(default_factory=RoundPlan)

    def cohort_weights(self, cohort: Sequence[int]) -> list[float]:
        """Return the aggregation weights ``w_k`` of the clients of a round before normalization."""
        if callable(self.weights):
            return [float(weight) for weight in self.weights(self, cohort)]
        return [1.0 if self.weights == "uniform" else float(self.size(client)) for client in cohort]

    def total_weight(self) -> float:
        """Return ``sum_k w_k`` over all clients, also outside the cohort; ``p_k`` is ``w_k`` divided by it."""
        if callable(self.weights):
            return sum(self.cohort_weights(range(self.clients)))
        return float(self.clients) if self.weights == "uniform" else float(self.sizes().sum())

    @staticmethod
    def of(federation: Federation, counted: np.ndarray | None = None) -> FederationInfo:
        """Collect the information about a federation.

        Args:
            federation: Data of all clients.
            counted: Samples per client that count in weighted means, ``[K]``; None if all training samples count.
        """

        def size(client: int) -> int:
            return federation.clients[client].num_samples if counted is None else int(counted[client])

        return FederationInfo(
            len(federation.clients),
            federation.shape,
            federation.classes,
            federation.task,
            federation.test[0].dtype,
            federation.normalization,
            size,
            cache(federation.class_counts),
            lambda: federation.sizes if counted is None else counted,
        )


@dataclass(frozen=True)
class ClientDataView:
    """One client's data, as a rule may read them once before training.

    Attributes:
        client: Stored samples of the client.
        classes: Number of classes or labels ``C``.
        task: Task of the clients.
        inputs: Converts stored samples to model inputs: normalized, on the device, in the model's precision.
        normalization: Normalization that ``inputs`` applies.
        like: Empty tensor with the model's data type, on the device.
        seed: Seed of the run.
        plan: Schedule of the run.
    """

    client: ClientData
    classes: int
    task: Task
    inputs: Callable[[Tensor], Tensor]
    normalization: Normalization | None
    like: Tensor
    seed: int
    plan: RoundPlan = field(default_factory=RoundPlan)

    @staticmethod
    def of(
        federation: Federation,
        client: int,
        inputs: Callable[[Tensor], Tensor],
        like: Tensor,
        seed: int,
        plan: RoundPlan = DEFAULT_PLAN,
    ) -> ClientDataView:
        """Return the view of one client.

        Args:
            federation: Data of all clients.
            client: Client number.
            inputs: Converts stored samples to inputs of the model.
            like: Tensor with the data type and device of inputs.
            seed: Seed of the run.
            plan: Schedule of the run.
        """
        task, classes = federation.objective, federation.classes
        return ClientDataView(
            federation.clients[client], classes, task, inputs, federation.normalization, like, seed, plan
        )

    def class_counts(self) -> Tensor:
        """Return the client's samples per class or label, ``[C]``."""
        return self.task.counts(self.client.y, self.classes).to(self.like.dtype).to(self.like.device)

    def label_pairs(self) -> Tensor:
        """Return the client's number of samples with both of two labels, ``[C, C]``."""
        return self.task.pairs(self.client.y, self.classes).to(self.like.dtype).to(self.like.device)

    def exemplars(self, count: int) -> Tensor:
        """Return random inputs of each class, ``[C, count, ...]``: repeated if too few, zero without any."""
        x, y = self.client.x, self.client.y.cpu()
        order = torch.randperm(len(y), generator=generator(self.seed, "exemplars", 0, self.client.id))
        drawn = []
        for c in range(self.classes):
            rows = order[y[order] == c]
            if len(rows):
                drawn.append(self.inputs(take_rows(x, rows.repeat(-(-count // len(rows)))[:count].to(x.device))))
            else:
                drawn.append(self.inputs(x[:1]).new_zeros(count, *x.shape[1:]))
        return torch.stack(drawn)
