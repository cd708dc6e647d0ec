"""LoRA: factors of low rank beside frozen weights, through the package ``peft`` (the extra ``transformers``).

Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen, "LoRA: Low-Rank Adaptation of Large Language Models", 2021,
arXiv:2106.09685: a weight ``W`` becomes ``W + (alpha / r) B A`` with ``W`` frozen, ``A [r, in]`` random, ``B [out, r]`` zero.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import nn

from unskew.errors import ConfigError, short_repr
from unskew.option_parsing import Fraction, Positive, Whole, build_from_options


@dataclass(frozen=True)
class LoraOptions:
    """Options of LoRA.

    Attributes:
        r: Rank of the factors.
        alpha: Their product counts ``alpha / r`` times.
        targets: Ends of the names of the layers that get factors; None leaves the choice to ``peft``.
        dropout: Of the factors' inputs.
    """

    r: Whole = 8
    alpha: Positive = 16
    targets: tuple[str, ...] | None = None
    dropout: Fraction = 0.0


def parse_lora(options: Mapping[str, Any]) -> LoraOptions:
    """LoRA's options from plain values."""
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"lora is a mapping such as {{r: 4, alpha: 8, targets: [q_proj, v_proj]}}, not {short_repr(options)}."
        )
    return build_from_options(LoraOptions, options, "lora", "lora.")


def add_lora(net: Any, options: LoraOptions) -> None:
    """Put LoRA factors into a model, in place; they and a classifier's head are what is trained.

    Args:
        net: The model.
        options: Options of LoRA.

    Raises:
        ConfigError: peft is not installed, or no layer has such a name.
    """
    try:
        peft: Any = import_module("peft")
    except ImportError as error:
        raise ConfigError("LoRA needs the package peft: pip install 'unskew[transformers]'.") from error
    targets = None if options.targets is None else list(options.targets)
    factors = peft.LoraConfig(
        r=options.r, lora_alpha=options.alpha, target_modules=targets, lora_dropout=options.dropout
    )
    try:
        if targets is None:
            usual = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(net.config.model_type)
            if usual is None:
                raise ValueError("peft knows no usual layers of this kind of model")
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
    output = net.get_output_embeddings()
    for name, child in net.named_children():
        if name != net.base_model_prefix and child is not output:
            child.requires_grad_(True)


def merge_lora(net: Any) -> Any:
    """A copy of a model in which LoRA factors have become part of the weights; the model itself if it has none."""
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
    """The first line of a message that may be long, without its full stop."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
