"""LoRA factors of a model, and the shared base of methods whose server combines them layer by layer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from unskew.errors import ConfigError
from unskew.models.spec import ModelSpec
from unskew.protocol.requirements import single_reads
from unskew.protocol.rules import AggregateRule, ClientRule, Method, ServerRule, SyncRule
from unskew.protocol.run_context import PreRunContext

ADAPTER = "default"
"""Name that peft gives to the factors of a layer."""


class Factors(NamedTuple):
    """LoRA factors of one layer, as numbers of parameters of the model.

    Attributes:
        weight: Number of the weight ``W``; -1 if it is not part of the model.
        a: Number of ``A``, ``[r, in]``.
        b: Number of ``B``, ``[out, r]``.
        scale: Factor ``s`` of the product.
        transposed: Whether the weight is ``[in, out]``.
    """

    weight: int
    a: int
    b: int
    scale: float
    transposed: bool

    def change(self, product: Tensor) -> Tensor:
        """Return the change of the weight, as a vector, for a product of factors ``B A``.

        Args:
            product: Product, ``[out, in]``.
        """
        return self.scale * (product.T if self.transposed else product).reshape(-1)


class FactorProducts(ClientRule, SyncRule, AggregateRule):
    """Base of methods in which clients train LoRA factors, which the server combines or adds to the weights of the model."""

    needs = ("individual",)
    merges: ClassVar[bool] = True
    """True if the server adds products to the weights, so that the exchanged model includes them."""
    conflict: ClassVar[str]
    """Reason why clients' updates and own models mean something else than in other methods, for errors."""

    def adapt(self, module: nn.Module, head: str) -> tuple[nn.Module, str]:
        """Make the weights of layers with LoRA factors part of the exchanged model, if products are added to them.

        Args:
            module: Model with LoRA factors.
            head: Name of its head.

        Raises:
            ConfigError: If the model has no LoRA factors, or does not train both.
        """
        module = copy.deepcopy(module)
        layers: list[Any] = [layer for layer in module.modules() if ADAPTER in getattr(layer, "lora_A", ())]
        if not layers:
            raise ConfigError(no_factors(self.name))
        for layer in layers:
            weight = layer.get_base_layer().weight
            if not layer.lora_A[ADAPTER].weight.requires_grad:
                raise ConfigError(
                    f"{self.name} trains both LoRA factors. Remove freeze_a, whose averages are exact already."
                )
            if weight.dim() != 2:
                raise ConfigError(
                    f"{self.name} supports LoRA factors of linear layers only. Remove the others from lora.targets."
                )
            if self.merges and getattr(module, "keeps_frozen_dtype", False):
                raise ConfigError(
                    f"{self.name} changes the weights in every round, which base_dtype would round. Remove base_dtype, or "
                    "use fedavg or fedsa."
                )
            weight.requires_grad_(self.merges)
        return module, head

    def conflict_with(self, method: Method) -> str | None:
        """Reject rules that keep or compare parameters from round to round, or read the updates themselves."""
        for rule in method.client:
            if rule is self or "final_training" in rule.needs:
                continue
            at_server = isinstance(rule, ServerRule) or type(rule).server_update is not ClientRule.server_update
            if at_server or rule.uploads or rule.encodes:
                return (
                    f"{rule.name} needs updates of the same parameters in all rounds, but {self.conflict}. Remove one of "
                    "them."
                )
            if rule.has_personal_model:
                return f"{rule.name} keeps a client's own model, but {self.conflict}. Remove one of them."
        if method.server is not None and (reads := single_reads(method.server)):
            return f"{method.server.name} {reads}, but {self.name} combines updates first. Remove one of them."
        return None

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate that the model has no BatchNorm.

        Args:
            run: Run to check, with its configuration, federation and model.

        Raises:
            ConfigError: If the model has BatchNorm.
        """
        if run.spec.buffer_sizes:
            raise ConfigError(f"{self.name} does not train normalization layers, so the model cannot have BatchNorm.")
        return ()


def no_factors(name: str) -> str:
    """Return the error message for a model without LoRA factors.

    Args:
        name: Name of the method.
    """
    return f"{name} needs a model with LoRA factors: model: {{hf: NAME, lora: {{r: 8}}}} (see docs/models.md)."


@lru_cache(maxsize=16)
def lora_layers(spec: ModelSpec) -> tuple[Factors, ...]:
    """Return the layers with LoRA factors.

    Args:
        spec: Layout of a model that ``FactorProducts.adapt`` returned.
    """
    modules = dict(spec.module.named_modules())
    layers: list[Factors] = []
    for number, name in enumerate(spec.names):
        layer, _, rest = name.partition(".lora_A.")
        if rest:
            base, b, module = f"{layer}.base_layer.weight", spec.names.index(f"{layer}.lora_B.{rest}"), modules[layer]
            weight = spec.names.index(base) if base in spec.names else -1
            layers.append(Factors(weight, number, b, module.scaling[ADAPTER], bool(module.fan_in_fan_out)))
    return tuple(layers)


@lru_cache(maxsize=16)
def weights_mask(spec: ModelSpec) -> Tensor:
    """Return the mask of the entries of all weights that have factors, boolean ``[d]``.

    Args:
        spec: Layout of a model that ``FactorProducts.adapt`` returned.
    """
    mask = torch.zeros(spec.size, dtype=torch.bool)
    parameters = torch.split(mask, spec.sizes)
    for layer in lora_layers(spec):
        if layer.weight >= 0:
            parameters[layer.weight][:] = True
    return mask
