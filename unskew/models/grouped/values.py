"""Values of ``k`` clients in a grouped network (``unskew.models.grouped.network``), in one of two layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class UnsupportedLayerError(Exception):
    """A part of a model cannot be grouped."""


class GroupedValue(NamedTuple):
    """Values of ``k`` clients, ``[k, B, ...]``, or ``[B, k C, ...]`` if ``image`` is true."""

    data: Tensor
    image: bool


class GroupedPass:
    """Pass of a grouped network: its parameters, and conversion between the two layouts."""

    def __init__(
        self,
        k: int,
        parameters: dict[str, Tensor],
        buffers: dict[str, Tensor],
        owner: dict[int, str],
        train: bool,
        keys: Tensor | None,
    ):
        self.k = k
        self.parameters = parameters
        self.buffers = buffers
        self.owner = owner
        self.train = train
        self.keys = keys
        self.dropped = 0

    def of(self, parameter: Tensor | None) -> Tensor | None:
        """Return all copies of a parameter in its layout; a frozen parameter is repeated for each client."""
        if parameter is None:
            return None
        name = self.owner[id(parameter)]
        if name in self.parameters:
            return self.parameters[name]
        every = parameter.expand(self.k, *parameter.shape)
        return every.reshape(-1, *parameter.shape[1:]) if parameter.dim() >= 3 else every

    def rows(self, value: GroupedValue) -> Tensor:
        """Return the values as ``[k, B, ...]``, without a copy."""
        if not value.image:
            return value.data
        return torch.unflatten(value.data, 1, (self.k, -1)).transpose(0, 1)

    def image(self, value: GroupedValue) -> Tensor:
        """Return the values as ``[B, k C, ...]``; images have channels-last memory."""
        if value.image:
            return value.data
        x = value.data
        batch, channels, *sides = x.shape[1:]
        if len(sides) != 2:
            return x.transpose(0, 1).reshape(batch, self.k * channels, *sides)
        last = x.permute(1, 3, 4, 0, 2).reshape(batch, *sides, self.k * channels)
        return last.permute(0, 3, 1, 2)

    def samples(self, value: GroupedValue, function: Callable[[Tensor], Tensor]) -> GroupedValue:
        """Apply a function that treats every sample separately, on ``[k B, ...]``.

        Args:
            value: Value of all clients.
            function: Function to apply.
        """
        rows = self.rows(value)
        return GroupedValue(torch.unflatten(function(rows.flatten(0, 1)), 0, rows.shape[:2]), False)

    def each(self, value: GroupedValue, function: Callable[[Tensor], Tensor]) -> GroupedValue:
        """Apply an elementwise function.

        Args:
            value: Value of all clients.
            function: Function to apply.
        """
        return GroupedValue(function(value.data), value.image)

    def channels(self, value: GroupedValue, function: Callable[[Tensor], Tensor]) -> GroupedValue:
        """Apply a function that treats every channel separately.

        Args:
            value: Value of all clients.
            function: Function to apply.
        """
        return GroupedValue(function(self.image(value)), True)
