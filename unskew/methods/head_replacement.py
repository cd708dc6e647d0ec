"""Shared base of methods that replace the linear head of the model."""

from __future__ import annotations

import copy

from torch import Tensor, nn

from unskew.errors import ConfigError
from unskew.models.spec import ModelSpec
from unskew.protocol.rules import ClientRule, Tensors


class HeadReplacement(ClientRule):
    """Trains the model with another head."""

    def new_head(self, linear: nn.Linear) -> nn.Module:
        """Return the head that replaces a linear one.

        Args:
            linear: The head of the model.
        """
        raise NotImplementedError

    def adapt(self, module: nn.Module, head: str) -> tuple[nn.Module, str]:
        """Replace the head.

        Args:
            module: The model.
            head: Name of its head; empty if the model is only a head.

        Returns:
            A copy of the model with the new head, and the head's name.

        Raises:
            ConfigError: If the head is not a linear layer.
        """
        module = copy.deepcopy(module)
        linear = module.get_submodule(head)
        if not isinstance(linear, nn.Linear):
            raise ConfigError(
                f"{self.name} needs a model with a linear head, but its head is a {type(linear).__name__}."
            )
        if not head:
            return nn.Sequential(self.new_head(linear)), "0"
        new = self.new_head(linear)
        for parent in list(module.modules()):
            for name, child in list(parent._modules.items()):  # a layer may have several names
                if child is linear:
                    setattr(parent, name, new)
        return module, head


def head_parameters_of(spec: ModelSpec, v: Tensor) -> Tensors:
    """Return the parameters of the head by their names within it, as views.

    Args:
        spec: Layout of the model.
        v: Parameters, ``[d]``.
    """
    prefix = f"{spec.head_name}."
    return {name.removeprefix(prefix): p for name, p in spec.parameters(v).items() if name.startswith(prefix)}
