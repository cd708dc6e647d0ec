"""Gradients of small functions outside of ``torch.func.vmap``, with less overhead than ``torch.func.grad_and_value``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def grad_and_value(loss: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function that computes the gradient with respect to the first argument, and the value.

    Args:
        loss: Function ``(v, ...) -> scalar``.
    """

    def evaluate(v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        leaf = v.detach().requires_grad_()
        with torch.enable_grad():
            value = loss(leaf, *others)
        (gradient,) = torch.autograd.grad(value, leaf, materialize_grads=True)
        return gradient, value.detach()

    return evaluate
