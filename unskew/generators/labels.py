"""Labels for data that are made: how many of each class, in which order, and which further ones beside the first."""

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
"""Integers as an option of a method; in a spelling they are separated by semicolons."""


def allocate_counts(shares: Tensor, total: int) -> Tensor:
    """Integers that sum to ``total``, in proportion to ``shares [C]``: the method of the largest remainder.

    Args:
        shares: Share of each class, ``[C]``.
        total: Sum of the result.

    >>> allocate_counts(torch.tensor([0.0, 500.0, 100.0, 300.0, 100.0]), 1000).tolist()
    [0, 500, 100, 300, 100]
    >>> allocate_counts(torch.ones(3), 10).tolist()
    [4, 3, 3]
    """
    exact = total * shares.to(torch.float64) / shares.sum()
    # Shares that are whole but for rounding must count as whole.
    floor = torch.floor(exact + 1e-9)
    rest = total - floor.sum()
    order = torch.argsort(torch.argsort(exact - floor, descending=True, stable=True), stable=True)
    return (floor + (order < rest)).to(torch.int64)


def labels_from_counts(counts: Tensor, total: int) -> Tensor:
    """Labels ``[total]`` in ascending order from counts ``[C]`` that sum to ``total``.

    Args:
        counts: Number of samples per class, ``[C]``.
        total: Sum of the counts.

    >>> labels_from_counts(torch.tensor([1, 0, 2]), 3).tolist()
    [0, 2, 2]
    """
    ends = torch.cumsum(counts, 0)
    return (torch.arange(total, device=counts.device)[:, None] >= ends[None, :]).sum(1)


def repeat_labels(labels: tuple[int, ...], total: int) -> Tensor:
    """The labels in order, again and again until there are ``total``.

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
        key: Decides the draws.
        primary: The first label of each made sample, ``[N]``.
        pairs: Real samples that have both of two labels, ``[L, L]``.
        counts: Real samples of each label, ``[L]``. A label without samples brings no other with it.

    Returns:
        ``[N, L]``, boolean.
    """
    rates = pairs / counts.clamp_min(1)[:, None]
    return uniform(key, (len(primary), len(counts))) < rates[primary]
