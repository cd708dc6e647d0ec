"""Projection between the features and the head of a model."""

from __future__ import annotations

import copy

from torch import Tensor, nn

from unskew.errors import ConfigError


class ModelWithProjection(nn.Module):
    """Projection of two linear layers to ``width`` units, followed by a linear head; it replaces a linear head."""

    def __init__(self, head: nn.Linear, width: int):
        super().__init__()
        self.first = nn.Linear(head.in_features, head.in_features)
        self.second = nn.Linear(head.in_features, width)
        self.head = nn.Linear(width, head.out_features, bias=head.bias is not None)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Map features ``[B, f]`` to logits ``[B, C]``; the head's input is the projection ``[B, width]``."""
        return self.head(self.second(self.relu(self.first(x))))  # type: ignore[no-any-return]


def with_projection(module: nn.Module, head: str, width: int) -> tuple[nn.Module, str]:
    """Return a copy of ``module`` with a projection before its head, and the name of the new head.

    Args:
        module: Model without projection.
        head: Name of its head.
        width: Number of units of the projection.

    Raises:
        ConfigError: If the head is not a linear layer.
    """
    module = copy.deepcopy(module)
    parent, _, name = head.rpartition(".")
    old = module.get_submodule(head)
    if not isinstance(old, nn.Linear):
        what = f"{head!r}, a {type(old).__name__}" if head else f"the model, a {type(old).__name__}"
        raise ConfigError(f"A projection needs a linear head, but the head is {what}. Use projection=0.")
    if not head:
        return ModelWithProjection(old, width), "head"
    setattr(module.get_submodule(parent), name, ModelWithProjection(old, width))
    return module, f"{head}.head"
