"""Dropout whose mask is a function of a key, so that every engine drops the same units.

``nn.Dropout`` draws from global state: under ``vmap`` each client would see other masks than alone. The modules of a
model are exchanged for this one when its ``unskew.models.spec.ModelSpec`` is made.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from unskew.seeding import fold, uniform


class KeyStream:
    """Hands out one key per dropout call of a forward pass; shared by all dropout layers of a module."""

    def __init__(self) -> None:
        self.key: Tensor | None = None
        self.calls = 0

    def start(self, key: Tensor | None) -> None:
        """Begin a training step with its own key (None: no dropout until the next start)."""
        self.key, self.calls = key, 0

    def next(self) -> Tensor | None:
        """The key of the next call."""
        if self.key is None:
            return None
        self.calls += 1
        return fold(self.key, self.calls)


class KeyedDropout(nn.Module):
    """Zeroes each element with probability ``p`` and scales the rest by ``1 / (1 - p)``; identity in eval mode."""

    def __init__(self, p: float, stream: KeyStream):
        super().__init__()
        self.p, self.stream = p, stream

    def forward(self, x: Tensor) -> Tensor:
        """Drop units of ``x``, of any shape."""
        return self.drop(x, self.p) if self.training else x

    def drop(self, x: Tensor, p: float) -> Tensor:
        """Drop with probability ``p``; without a key nothing is dropped."""
        key = self.stream.next() if p > 0 else None
        if key is None:
            return x
        if p >= 1:
            return x * 0
        keep = uniform(key, tuple(x.shape)) >= p
        return x * keep.to(x.dtype) * (1 / (1 - p))


def use_keyed_dropout(module: nn.Module) -> KeyStream | None:
    """Exchange every ``nn.Dropout`` inside ``module``; the stream they share, or None if there is none."""
    stream, exchanged = KeyStream(), False
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Dropout:
                setattr(parent, name, KeyedDropout(child.p, stream).train(child.training))
                exchanged = True
    return stream if exchanged else None


def restore_dropout(module: nn.Module) -> None:
    """Exchange every keyed dropout inside ``module`` for ``nn.Dropout`` again, for a model that leaves unskew."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, KeyedDropout):
                setattr(parent, name, nn.Dropout(child.p).train(child.training))


class FunctionalDropout(TorchFunctionMode):
    """Context manager in which functional dropout draws its masks from a key, and a float64 softmax stays in float64.

    Args:
        dropout: Holds the stream of keys; None leaves dropout alone.
    """

    def __init__(self, dropout: KeyedDropout | None):
        super().__init__()
        self.dropout = dropout

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call."""
        kwargs = dict(kwargs or {})
        if func is F.dropout and self.dropout is not None:
            return self._drop(*args, **kwargs)
        if func is F.softmax and args[0].dtype == torch.float64:
            kwargs.pop("dtype", None)
        return func(*args, **kwargs)

    def _drop(self, x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        assert self.dropout is not None
        return self.dropout.drop(x, p) if training else x
