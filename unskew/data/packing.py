"""Packing: several short texts of a language model in one row, in which each attends only to itself."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

PADDING = -1
SEPARATOR = -2
"""Input between two texts of one row, which attend only to themselves."""


def pack_rows(x: Tensor, y: Tensor, width: int) -> tuple[Tensor, Tensor, np.ndarray]:
    """Join short texts in order, as long as they fit, with a separator between two of them.

    Args:
        x: Token ids, ``[n, L]``, padded with -1 at the end.
        y: Next tokens, ``[n, L]``; -1 for those that do not count, -2 for one of them if the text is truncated.
        width: Length of a joined row, at least that of the longest text.

    Returns:
        Inputs and targets of the joined rows, ``[m, width]``, and the index of the first text of each, ``[m]``.
    """
    # A target next to padding marks that an answer is truncated, so it belongs to the text.
    used = (x != PADDING) | (y != PADDING)
    lengths = (used * torch.arange(1, x.shape[1] + 1)).amax(1).tolist()
    row_of, starts, first = [], [], []
    end = width  # the first text begins a row
    for number, length in enumerate(lengths):
        if end + 1 + length > width:
            first.append(number)
            end = -1
        row_of.append(len(first) - 1)
        starts.append(end + 1)
        end += 1 + length
    joined_x, joined_y = (torch.full((len(first), width), PADDING, dtype=torch.int64) for _ in "xy")
    for number, (row, start, length) in enumerate(zip(row_of, starts, lengths, strict=True)):
        if start:
            joined_x[row, start - 1] = SEPARATOR
        joined_x[row, start : start + length] = x[number, :length]
        joined_y[row, start : start + length] = y[number, :length]
    return joined_x, joined_y, np.array(first, np.int64)


def longest_text(tables: Iterable[Tensor]) -> int:
    """Return the number of tokens of the longest text in packed rows; 0 without texts.

    Args:
        tables: Inputs of packed rows, ``[n, L]`` each.

    >>> longest_text([torch.tensor([[5, 6, 7, -2, 8], [5, 6, -1, -1, -1]])])
    3
    """
    longest = 0
    for x in tables:
        index = torch.arange(x.shape[1], device=x.device)
        last_gap = torch.where(x < 0, index, -1).cummax(1).values
        longest = max([longest, *(index - last_gap).amax(1).tolist()])
    return longest


def unpack_rows(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return each text of joined rows in a row of its own, in order and of the same width.

    Args:
        x: Token ids, ``[m, width]``, with separators between texts and padded with -1 at the end.
        y: Next tokens, ``[m, width]``.
    """
    if not (x == SEPARATOR).any():
        return x, y
    texts_x, texts_y = [], []
    for inputs, targets in zip(x, y, strict=True):
        start = 0
        for end in [*(inputs == SEPARATOR).nonzero().flatten().tolist(), len(inputs)]:
            rest = len(inputs) - (end - start)
            texts_x.append(F.pad(inputs[start:end], (0, rest), value=PADDING))
            texts_y.append(F.pad(targets[start:end], (0, rest), value=PADDING))
            start = end + 1
    return torch.stack(texts_x), torch.stack(texts_y)
