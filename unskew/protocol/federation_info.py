"""Information that the server has of its clients, and that a client rule has of the client's data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from unskew.data.federation import ClientData, Federation, take_rows
from unskew.data.normalization import Normalization
from unskew.seeding import generator
from unskew.tasks.base import Task


@dataclass(frozen=True)
class FederationInfo:
    """Information that a server has of a federation; it never sees a client's samples.

    Attributes:
        clients: Number of clients ``K``.
        shape: Shape of one input.
        classes: Number of classes, of labels or of tokens.
        task: The task's name.
        dtype: The type that inputs are stored in.
        normalization: How inputs are standardized; None leaves them alone.
        size: From a client's number to its samples that count in a weighted mean: the real ones it trains on.
        class_counts: All clients' samples per class to train on, ``[K, C]``; it may take long.
        sizes: ``size`` of all clients, ``[K]``; it may take long, too.
        weights: How clients count in a mean: by samples, or uniformly.
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
    weights: Literal["samples", "uniform"] = "uniform"

    def weight(self, client: int) -> float:
        """The aggregation weight ``w_k`` of a client before normalization."""
        return 1.0 if self.weights == "uniform" else float(self.size(client))

    def total_weight(self) -> float:
        """``sum_k w_k`` over all clients, also those that do not take part: ``w_k`` over it is ``p_k``."""
        return float(self.clients) if self.weights == "uniform" else float(self.sizes().sum())

    @staticmethod
    def of(federation: Federation, counted: np.ndarray | None = None) -> FederationInfo:
        """Collect the information of a federation.

        ``counted [K]`` is given if clients train on more samples than those that count.

        Args:
            federation: Data of all clients.
            counted: Samples per client and class that count, ``[K]``; None: all.
        """

        def size(client: int) -> int:
            return federation.clients[client].examples if counted is None else int(counted[client])

        return FederationInfo(
            len(federation.clients),
            federation.shape,
            federation.classes,
            federation.task,
            federation.test[0].dtype,
            federation.normalization,
            size,
            federation.class_counts,
            lambda: federation.sizes if counted is None else counted,
        )


@dataclass(frozen=True)
class ClientDataView:
    """One client's data, as a rule may look at them once for all rounds.

    Attributes:
        client: The samples as they are stored.
        classes: Number of classes or labels ``C``.
        task: The clients' task.
        inputs: From stored samples to inputs of the model: normalized, on the device, in the model's precision.
        normalization: What it does.
        like: An empty tensor of the model's precision, on the device.
        seed: Of the run.
    """

    client: ClientData
    classes: int
    task: Task
    inputs: Callable[[Tensor], Tensor]
    normalization: Normalization | None
    like: Tensor
    seed: int

    @staticmethod
    def of(
        federation: Federation, client: int, inputs: Callable[[Tensor], Tensor], like: Tensor, seed: int
    ) -> ClientDataView:
        """Return the view of one client.

        Args:
            federation: Data of all clients.
            client: Number of the client.
            inputs: Converts stored samples to inputs of the model.
            like: Tensor with the data type and device of inputs.
            seed: Seed of the run.
        """
        task, classes = federation.objective, federation.classes
        return ClientDataView(federation.clients[client], classes, task, inputs, federation.normalization, like, seed)

    def class_counts(self) -> Tensor:
        """The client's samples per class (per label, where a sample may have several), ``[C]``."""
        return self.task.counts(self.client.y, self.classes).to(self.like.dtype).to(self.like.device)

    def label_pairs(self) -> Tensor:
        """The client's samples that have both of two labels, ``[C, C]``."""
        return self.task.pairs(self.client.y, self.classes).to(self.like.dtype).to(self.like.device)

    def exemplars(self, count: int) -> Tensor:
        """Random inputs of each class, ``[C, count, ...]``, in turn if there are fewer, and zero if there are none."""
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
