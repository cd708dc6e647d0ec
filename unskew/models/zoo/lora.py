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
        targets: Name suffixes of the layers with factors; None uses the defaults of ``peft``.
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
    return build_from_options(LoraOptions, options, "lora", "lora.")


def add_lora(net: Any, options: LoraOptions) -> None:
    """Add LoRA factors to a model in place; only they and a classifier's head are trained.

    Args:
        net: Model of ``transformers``.
        options: Options of LoRA.

    Raises:
        ConfigError: If peft is not installed, or no layer matches ``targets``.
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
        peft.inject_adapter_in_model(factors, net)
    except ValueError as error:
        layers = {n.rpartition(".")[2] for n, m in net.named_modules() if isinstance(m, nn.Linear)}
        raise ConfigError(
            f"lora.targets={targets} does not fit the model ({first_line(error)}). Its linear layers are called: "
            f"{', '.join(sorted(layers))}."
        ) from error
    if not hasattr(net, "peft_config"):
        net.peft_config = {"default": factors}
    if options.freeze_a:
        for name, parameter in net.named_parameters():
            if "lora_A" in name.split("."):
                parameter.requires_grad_(False)
    output = net.get_output_embeddings()
    for name, child in net.named_children():
        if name != net.base_model_prefix and child is not output:
            child.requires_grad_(True)


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
