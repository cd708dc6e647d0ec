"""Options of Hugging Face models that save memory or time: dtype of frozen weights, attention, gradient checkpointing.

Dettmers, Pagnoni, Holtzman, Zettlemoyer, "QLoRA: Efficient Finetuning of Quantized LLMs", 2023, arXiv:2305.14314: frozen
weights in 4-bit NormalFloat with double quantization, computed in bfloat16, and LoRA factors on top.

Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv:1604.06174: with gradient
checkpointing, a pass stores only the inputs of the blocks, and computes their activations again for the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from torch import Tensor, nn

from unskew.errors import ConfigError, explain_missing


@dataclass(frozen=True)
class LoadingOptions:
    """Options of loading and running a model.

    Attributes:
        base_dtype: Data type of the frozen weights of a model with LoRA factors, and of its activations; with ``nf4``, linear
            layers have 4 bits per weight (NormalFloat), and everything else is in bfloat16.
        attention: Implementation of attention: ``eager``, or PyTorch's fused kernels (``sdpa``).
        checkpointing: Compute the activations of each block again for the gradient instead of storing them.
    """

    base_dtype: Literal["float32", "bfloat16", "nf4"] = "float32"
    attention: Literal["eager", "sdpa"] = "eager"
    checkpointing: bool = False

    def check(self, lora: bool, pretrained: bool) -> None:
        """Validate that frozen weights exist if they have their own data type.

        Args:
            lora: Whether the model has LoRA factors.
            pretrained: Whether weights are loaded.

        Raises:
            ConfigError: If no weights are frozen, or 4-bit weights are not loaded, or their package is missing.
        """
        if self.base_dtype != "float32" and not lora:
            raise ConfigError(
                f"base_dtype={self.base_dtype} is for frozen weights, but all weights are trained. Set lora, such as "
                "lora: {r: 8}, or precision: bf16."
            )

        if self.base_dtype == "nf4":
            if not pretrained:
                raise ConfigError("base_dtype=nf4 quantizes the weights of a checkpoint. Remove pretrained: false.")
            with explain_missing("base_dtype=nf4 needs the package bitsandbytes: pip install 'unskew[quantized]'."):
                import_module("bitsandbytes")

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of ``from_pretrained`` and ``from_config``."""
        if self.base_dtype != "nf4":
            return {"attn_implementation": self.attention, "dtype": self.base_dtype}
        transformers: Any = import_module("transformers")
        quantization = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype="bfloat16",
        )
        # Weights are quantized on the CPU and move to the device of the run with the model.
        place = {"device_map": {"": "cpu"}, "quantization_config": quantization}
        return {"attn_implementation": self.attention, "dtype": "bfloat16", **place}


def train_in_float32(net: nn.Module) -> None:
    """Convert the trained parameters of a model with frozen weights of lower precision to float32, in place.

    Of LoRA factors both are converted, also if A is not trained, because their product is computed in one precision. LoRA
    layers convert their inputs and outputs themselves. Other trained layers, such as a classifier's head, convert their
    inputs.

    Args:
        net: Model with LoRA factors.
    """
    for name, module in net.named_modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # bitsandbytes would rearrange weights, which other copies share
        factor = bool({"lora_A", "lora_B"} & {*name.split(".")})
        trained = [p for p in module.parameters(recurse=False) if factor or p.requires_grad]
        for parameter in trained:
            parameter.data = parameter.data.float()
        if trained and not factor:
            module.register_forward_pre_hook(_as_weight)


def _as_weight(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Convert the input of a layer to the data type of its weights."""
    return (args[0].to(next(module.parameters()).dtype), *args[1:])


def check_checkpointing(net: Any, dropout: bool) -> None:
    """Validate that a model can compute the activations of its blocks again.

    Args:
        net: Model of ``transformers``.
        dropout: Whether the model or its LoRA factors have dropout.

    Raises:
        ConfigError: If it cannot, or dropout masks would differ between both computations.
    """
    if not net.supports_gradient_checkpointing:
        raise ConfigError(f"{type(net).__name__} does not support checkpointing. Remove it.")
    if dropout:
        raise ConfigError(
            "checkpointing needs a model without dropout, whose masks would be drawn again. Set the dropout options of the "
            "model to 0 in config, such as config: {dropout: 0.0}, and lora.dropout to 0."
        )
