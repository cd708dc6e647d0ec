"""Labels of generated data: number per class, order, and additional labels of multi-label data."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from unskew.seeding import uniform

LabelList = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...],
    BeforeValidator(lambda v: [piece for piece in v.split(";") if piece.strip()] if isinstance(v, str) else v),
]
"""Integers as an option of a method; separated by semicolons in a method expression."""


def allocate_counts(shares: Tensor, total: int) -> Tensor:
    """Return integers that sum to ``total`` in proportion to ``shares``, by the largest remainder method.

    Args:
        shares: Share of each class, ``[C]``.
        total: Sum of the result.

    >>> allocate_counts(torch.tensor([0.0, 500.0, 100.0, 300.0, 100.0]), 1000).tolist()
    [0, 500, 100, 300, 100]
    >>> allocate_counts(torch.ones(3), 10).tolist()
    [4, 3, 3]
    """
    exact = total * shares.to(torch.float64) / shares.sum()
    # Shares that are integers up to rounding errors must be treated as integers.
    floor = torch.floor(exact + 1e-9)
    rest = total - floor.sum()
    order = torch.argsort(torch.argsort(exact - floor, descending=True, stable=True), stable=True)
    return (floor + (order < rest)).to(torch.int64)


def labels_from_counts(counts: Tensor, total: int) -> Tensor:
    """Return labels ``[total]`` in ascending order from counts ``[C]`` that sum to ``total``.

    Args:
        counts: Number of samples per class, ``[C]``.
        total: Sum of the counts.

    >>> labels_from_counts(torch.tensor([1, 0, 2]), 3).tolist()
    [0, 2, 2]
    """
    ends = torch.cumsum(counts, 0)
    return (torch.arange(total, device=counts.device)[:, None] >= ends[None, :]).sum(1)


def repeat_labels(labels: tuple[int, ...], total: int) -> Tensor:
    """Repeat labels in order until there are ``total``.

    Args:
        labels: Labels to repeat.
        total: Length of the result.

    >>> repeat_labels((2, 0, 1), 5).tolist()
    [2, 0, 1, 2, 0]
    """
    return torch.tensor(labels)[torch.arange(total) % len(labels)]


def draw_cooccurring(key: Tensor, primary: Tensor, pairs: Tensor, counts: Tensor) -> Tensor:
    """Draw additional labels of generated samples with the rates of real samples that have the primary label.

    Args:
        key: Random key.
        primary: First label of each generated sample, ``[N]``.
        pairs: Number of real samples that have both of two labels, ``[L, L]``.
        counts: Number of real samples of each label, ``[L]``. A label without samples adds no other labels.

    Returns:
        Mask of additional labels, boolean ``[N, L]``.
    """
    rates = pairs / counts.clamp_min(1)[:, None]
    return uniform(key, (len(primary), len(counts))) < rates[primary]
