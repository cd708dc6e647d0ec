"""Shared base of methods whose clients have LoRA factors of different rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from unskew.errors import ConfigError
from unskew.methods.lora_factors import FactorProducts, lora_layers, weights_mask
from unskew.models.spec import ModelSpec, mask_slices
from unskew.protocol.rules import Slices
from unskew.protocol.run_context import PreRunContext

WEIGHT = 2**31 - 1
"""Number of a component that no rank includes."""


class RankedFactors(FactorProducts):
    """Base of methods with the option ``ranks``: the rank of each client's factors."""

    ranks: str
    """Ranks, separated by slashes; client ``k`` has rank number ``k`` modulo their count. Empty for the model's rank."""

    def __post_init__(self) -> None:
        """Validate the ranks."""
        if self.ranks and not all(part.isdecimal() and int(part) > 0 for part in self.ranks.split("/")):
            raise ConfigError(
                f"{self.name}:ranks={self.ranks} is not valid: write positive integers, separated by slashes, such as "
                "16/8/4."
            )

    @property
    def listed_ranks(self) -> list[int]:
        """Ranks as numbers; empty if all clients have the model's rank."""
        return [int(part) for part in self.ranks.split("/")] if self.ranks else []

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate the ranks, and that the model has no BatchNorm.

        Args:
            run: Run to check, with its configuration, federation and model.

        Raises:
            ConfigError: If a rank is larger than the model's, layers have factors of different rank, or the model has
                BatchNorm.
        """
        most = model_rank(run.spec)
        for layer in lora_layers(run.spec):
            rank, name = run.spec.shapes[layer.a][0], run.spec.names[layer.a].partition(".lora_A.")[0]
            if rank != most:
                raise ConfigError(
                    f"{self.name} needs LoRA factors of one rank in all layers, but some have rank {most}, and those of "
                    f"{name} have rank {rank}. Use the same rank for all layers (no rank_pattern), or fedavg or fedex."
                )
        if max(self.listed_ranks, default=0) > most:
            raise ConfigError(
                f"{self.name}:ranks={self.ranks} has a rank above {most}, the r of the model's LoRA factors. Set r to the "
                "largest rank."
            )
        return super().check(run)


def model_rank(spec: ModelSpec) -> int:
    """Return the rank of the model's factors.

    Args:
        spec: Layout of a model that ``FactorProducts.adapt`` returned.
    """
    return spec.shapes[lora_layers(spec)[0].a][0]


@lru_cache(maxsize=16)
def components(spec: ModelSpec) -> Tensor:
    """Return the number of the component of the product that a factor's entry belongs to, ``[d]``.

    It is the row of ``A`` or the column of ``B``; -1 for parameters without factors, and ``WEIGHT`` for the weights ``W``.

    Args:
        spec: Layout of a model that ``FactorProducts.adapt`` returned.
    """
    numbers = torch.full((spec.size,), -1, dtype=torch.int32)
    numbers[weights_mask(spec)] = WEIGHT
    values = torch.split(numbers, spec.sizes)
    for pair in lora_layers(spec):
        row = torch.arange(spec.shapes[pair.a][0], dtype=torch.int32)
        values[pair.a].view(spec.shapes[pair.a])[:] = row[:, None]
        values[pair.b].view(spec.shapes[pair.b])[:] = row
    return numbers


@lru_cache(maxsize=64)
def first_components(spec: ModelSpec, rank: int) -> Slices:
    """Return the slices of the first components of all factors, and of parameters without factors.

    Args:
        spec: Layout of a model that ``FactorProducts.adapt`` returned.
        rank: Number of components.
    """
    return mask_slices(components(spec) < rank)
