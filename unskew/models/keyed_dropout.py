"""Dropout with a mask that is a function of a key, so that all engines drop the same units.

``nn.Dropout`` uses the global random generator, so under ``vmap`` a client would get other masks than when it is trained
alone. ``unskew.models.spec.ModelSpec`` replaces the dropout modules of a model by this one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from unskew.seeding import fold, uniform


class KeyStream:
    """Source of one key per dropout call of a forward pass, shared by all dropout layers of a module."""

    def __init__(self) -> None:
        self.key: Tensor | None = None
        self.calls = 0

    def start(self, key: Tensor | None) -> None:
        """Start a training step with a new key; None disables dropout until the next start."""
        self.key, self.calls = key, 0

    def next(self) -> Tensor | None:
        """Return the key of the next call, or None without dropout."""
        if self.key is None:
            return None
        self.calls += 1
        return fold(self.key, self.calls)


class KeyedDropout(nn.Module):
    """Dropout with probability ``p`` that scales kept elements by ``1 / (1 - p)``; identity in eval mode."""

    def __init__(self, p: float, stream: KeyStream):
        super().__init__()
        self.p, self.stream = p, stream

    def forward(self, x: Tensor) -> Tensor:
        """Drop units of ``x``, of any shape."""
        return self.drop(x, self.p) if self.training else x

    def drop(self, x: Tensor, p: float) -> Tensor:
        """Drop elements with probability ``p``; without a key, return ``x``."""
        key = self.stream.next() if p > 0 else None
        if key is None:
            return x
        if p >= 1:
            return x * 0
        keep = uniform(key, tuple(x.shape)) >= p
        return x * keep.to(x.dtype) * (1 / (1 - p))


def use_keyed_dropout(module: nn.Module) -> KeyStream | None:
    """Replace every ``nn.Dropout`` inside ``module``; returns their shared stream, or None if there are none."""
    stream, exchanged = KeyStream(), False
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):  # also of layers with several names
            if type(child) is nn.Dropout:
                setattr(parent, name, KeyedDropout(child.p, stream).train(child.training))
                exchanged = True
    return stream if exchanged else None


def restore_dropout(module: nn.Module) -> None:
    """Replace every keyed dropout inside ``module`` by ``nn.Dropout``, for use outside of unskew."""
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):  # also of layers with several names
            if isinstance(child, KeyedDropout):
                setattr(parent, name, nn.Dropout(child.p).train(child.training))


class FunctionalDropout(TorchFunctionMode):
    """Context manager in which functional dropout uses keys, and the softmax of a float64 tensor remains in float64.

    Args:
        dropout: Dropout module with the stream of keys; None does not change dropout.
    """

    def __init__(self, dropout: KeyedDropout | None):
        super().__init__()
        self.dropout = dropout

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Intercept calls of dropout and softmax."""
        kwargs = dict(kwargs or {})
        if func is F.dropout and self.dropout is not None:
            return self._drop(*args, **kwargs)
        if func is F.softmax and args[0].dtype == torch.float64:
            kwargs.pop("dtype", None)
        return func(*args, **kwargs)

    def _drop(self, x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        assert self.dropout is not None
        return self.dropout.drop(x, p) if training else x
