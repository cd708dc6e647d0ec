"""Features of a client's samples, which several methods compute before the first step."""

from __future__ import annotations

import torch
from torch import Tensor

from unskew.data.federation import take_rows
from unskew.protocol.rules import Context

CHUNK = 500
"""Samples of one forward pass."""


def features_of(ctx: Context, v: Tensor, b: Tensor, rows: Tensor) -> Tensor:
    """Return the features of samples in eval mode, without gradients, ``[n, f]``.

    Args:
        ctx: Context of a rule whose ``client_info`` has the client's stored samples as ``x``.
        v: Parameters of the model, ``[d]``.
        b: Buffers of the model, ``[m]``.
        rows: Numbers of the samples, ``[n]``.
    """
    with torch.no_grad():
        inputs = (ctx.inputs(take_rows(ctx.client_info["x"], part)) for part in torch.split(rows, CHUNK))
        return torch.cat([ctx.spec.forward(v, b, x).features.to(v.dtype) for x in inputs])
