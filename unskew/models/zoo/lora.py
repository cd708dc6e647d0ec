"""LoRA: low-rank factors added to frozen weights, with the package ``peft`` (needs the extra ``transformers``).

Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen, "LoRA: Low-Rank Adaptation of Large Language Models", 2021,
arXiv:2106.09685: a weight ``W`` becomes ``W + (alpha / r) B A``. ``W`` is frozen; initially ``A [r, in]`` is random and
``B [out, r]`` zero.

FFA-LoRA (Sun, Li, Li, Ding, "Improving LoRA in Privacy-preserving Federated Learning", 2024, arXiv:2403.12313, Section 4)
also freezes ``A``. If clients train both factors, the mean of their products ``B_k A_k`` differs from the product of the mean
factors, which is the model that they receive; with a common ``A`` both are equal.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import nn

from unskew.errors import ConfigError, explain_missing, short_repr
from unskew.option_parsing import Fraction, Positive, Whole, build_from_options


@dataclass(frozen=True)
class LoraOptions:
    """Options of LoRA.

    Attributes:
        r: Rank of the factors.
        alpha: Scale of the factors' product, which is multiplied by ``alpha / r``.
        targets: Name suffixes of the layers with factors, or one suffix; None uses the defaults of ``peft``.
        dropout: Dropout probability of the factors' inputs.
        freeze_a: Train only ``B`` (FFA-LoRA): half as many values are sent, and averages are exact.
    """

    r: Whole = 8
    alpha: Positive = 16
    targets: tuple[str, ...] | None = None
    dropout: Fraction = 0.0
    freeze_a: bool = False


def parse_lora(options: Mapping[str, Any]) -> LoraOptions:
    """Create the options of LoRA from a mapping (raises ``ConfigError`` if it is not valid)."""
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"lora must be a mapping such as {{r: 4, alpha: 8, targets: [q_proj, v_proj]}}, not {short_repr(options)}."
        )
    if isinstance(options.get("targets"), str):
        options = {**options, "targets": [options["targets"]]}
    return build_from_options(LoraOptions, options, "lora", "lora.")


def add_lora(net: Any, options: LoraOptions, trains_head: bool) -> None:
    """Add LoRA factors to a model in place; only they, and the head if requested, are trained.

    A layer with factors whose weight another layer uses, such as an output layer tied to the embedding, gets a copy of the
    weight, because only this layer's weight becomes ``W + (alpha / r) B A``.

    Args:
        net: Model of ``transformers``.
        options: Options of LoRA.
        trains_head: Whether the layers outside the base model, such as a classifier's head, are also trained.

    Raises:
        ConfigError: If peft is not installed, or an entry of ``targets`` matches no layer or one without factors.
    """
    with explain_missing("LoRA needs the package peft: pip install 'unskew[transformers]'."):
        peft: Any = import_module("peft")
    targets = None if options.targets is None else list(options.targets)
    factors = peft.LoraConfig(
        r=options.r, lora_alpha=options.alpha, target_modules=targets, lora_dropout=options.dropout
    )
    try:
        if targets is None:
            usual = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(net.config.model_type)
            if usual is None:
                raise ValueError("peft has no default layers for this architecture")
            factors.target_modules = usual
        else:
            check_targets(net, targets)
        untie_layers(net, factors)
        peft.inject_adapter_in_model(factors, net)
    except ValueError as error:
        raise ConfigError(
            f"lora.targets={targets} does not fit the model ({first_line(error)}). Layers that can have factors are called: "
            f"{', '.join(possible_targets(net))}."
        ) from error
    if not hasattr(net, "peft_config"):
        net.peft_config = {"default": factors}
    if options.freeze_a:
        for name, parameter in net.named_parameters():
            if "lora_A" in name.split("."):
                parameter.requires_grad_(False)
    if trains_head:
        for name, child in net.named_children():
            if name != net.base_model_prefix:
                child.requires_grad_(True)


def check_targets(net: nn.Module, targets: list[str]) -> None:
    """Validate that every target matches a layer, and none an embedding.

    Args:
        net: Model without factors.
        targets: Name suffixes of layers.

    Raises:
        ValueError: If a target matches no layer.
        ConfigError: If a target matches an embedding.
    """
    modules = dict(net.named_modules())
    for target in targets:
        matches = [name for name in modules if f".{name}".endswith(f".{target}")]
        if not matches:
            raise ValueError(f"no layer is called {target}")
        embedding = next((name for name in matches if isinstance(modules[name], nn.Embedding)), None)
        if embedding is not None:
            raise ConfigError(
                f"lora.targets contains {target}, but {embedding} is an embedding, and unskew supports LoRA factors only of "
                f"layers such as linear ones. Remove {target} from lora.targets."
            )


def possible_targets(net: nn.Module) -> list[str]:
    """Return the names of layers that can have factors, without the names of the modules that contain them."""
    from transformers.pytorch_utils import Conv1D

    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, Conv1D)
    return sorted({name.rpartition(".")[2] for name, module in net.named_modules() if isinstance(module, kinds)})


def untie_layers(net: Any, factors: Any) -> None:
    """Give every layer its own parameters if a layer that gets factors shares one with another layer.

    Args:
        net: Model of ``transformers`` without factors.
        factors: Configuration of peft with the targets.
    """
    from peft.tuners.tuners_utils import check_target_module_exists

    owners = Counter(id(p) for module in net.modules() for p in module.parameters(recurse=False))
    layers = [module for name, module in net.named_modules() if check_target_module_exists(factors, name)]
    if all(owners[id(p)] < 2 for layer in layers for p in layer.parameters(recurse=False)):
        return
    seen: set[int] = set()
    for module in net.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in seen:
                setattr(module, name, nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad))
            seen.add(id(parameter))
    # The checkpoint has one weight for both layers, and a saved model must load two.
    for config in (net.config, net.config.get_text_config(decoder=True)):
        config.tie_word_embeddings = False


def merge_lora(net: Any) -> Any:
    """Return a copy of a model with LoRA factors merged into the weights, or the model itself if it has none."""
    if not getattr(net, "peft_config", None):
        return net
    from peft.tuners.lora import LoraLayer

    net = copy.deepcopy(net)
    for name, layer in [(n, m) for n, m in net.named_modules() if isinstance(m, LoraLayer)]:
        layer.merge()
        parent, _, last = name.rpartition(".")
        setattr(net.get_submodule(parent), last, layer.get_base_layer())
    del net.peft_config
    net._hf_peft_config_loaded = False
    return net


def first_line(error: Exception) -> str:
    """Return the first line of an error message without its final period; if it ends with a colon, with the next line."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".")
