"""Models of the package ``transformers`` as modules that map one input tensor to logits.

Texts are token ids ``[B, L]`` (int64). Padding is -1 and always at the end, so it cannot be confused with a token of the
vocabulary, and no separate mask is needed. Images are intensities from 0 to 1, which the model resizes and normalizes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unskew.data.packing import SEPARATOR
from unskew.errors import ConfigError, explain_missing
from unskew.models.keyed_dropout import FunctionalDropout, KeyedDropout
from unskew.models.zoo.hf_options import LoadingOptions
from unskew.models.zoo.lora import merge_lora

PADDING = -1
DEFAULT = LoadingOptions()


class HuggingFaceModel(nn.Module):
    """Base class of wrapped Hugging Face models.

    ``blocks`` is the name of the list of the model's blocks, each of which is one layer; None if it has none.

    Args:
        net: Model of ``transformers``, including LoRA factors, if any.
        loading: Options with which it was loaded.

    Attributes:
        keeps_frozen_dtype: Whether frozen weights keep their data type.
        quantized: Whether frozen weights have 4 bits, so that passes cannot be mapped and factors cannot be merged.
        checkpoints: Whether a copy that is trained computes activations again for the gradient.
    """

    def __init__(self, net: nn.Module, loading: LoadingOptions = DEFAULT):
        super().__init__()
        self.net: Any = net
        self.quantized = loading.base_dtype == "nf4"
        self.keeps_frozen_dtype, self.checkpoints = loading.base_dtype != "float32", loading.checkpointing
        self.blocks = block_list(self)
        # ModelSpec replaces this nn.Dropout by a keyed one, whose keys functional dropout then uses.
        self.drop: nn.Module | None = nn.Dropout(0.0) if uses_dropout(net.config) else None

    def enable_checkpointing(self) -> None:
        """Compute activations again in this copy, whose parameters must be the same in both passes."""
        net = self.net
        enable = getattr(net, "activation_checkpointing_enable", None) or net.gradient_checkpointing_enable
        # Activations are computed again after the forward pass, whose context has ended by then.
        enable({"use_reentrant": False, "context_fn": lambda: (contextlib.nullcontext(), self.steered())})

    def steered(self) -> AbstractContextManager[object]:
        """Return the context of a forward pass, with keyed dropout and float64 softmax if needed."""
        keyed = self.drop if isinstance(self.drop, KeyedDropout) and self.training else None
        if keyed is None and self.net.dtype != torch.float64:
            return contextlib.nullcontext()
        return FunctionalDropout(keyed)

    def save(self, folder: str | Path) -> Path:
        """Write a folder that ``hf:FOLDER`` and ``transformers`` can load; LoRA factors are merged into the weights.

        Args:
            folder: Folder to write.

        Raises:
            ConfigError: If a method has replaced a part of the model, such as its head, by one that transformers lacks.
        """
        folder = Path(folder)
        with quiet_transformers():
            net = merge_lora(self.net)
            check_parts(net)
            net.save_pretrained(folder)
        return folder


class TextModel(HuggingFaceModel):
    """Base class of models with token ids as inputs."""

    @property
    def tokens(self) -> int | None:
        """Vocabulary size, or None if the configuration does not contain it."""
        return getattr(self.net.config, "vocab_size", None)


class CausalLM(TextModel):
    """Causal language model from token ids ``[B, L]`` to logits ``[B, L, V]`` of the next token.

    Padding is at the end and attention is causal, so no mask is needed, unless several texts share a row.

    Attributes:
        packed: Whether -2 separates texts of one row, each of which attends only to itself and has positions from 0.
        longest_text: Number of tokens of the longest of these texts; None without packing.
    """

    packed = False
    longest_text: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits at every position; those at padding and separators are meaningless."""
        ids = token_ids(x, self.net.config)
        kwargs = self._separation(x) if self.packed else {}
        with self.steered():
            return self.net(input_ids=ids, use_cache=False, **kwargs).logits  # type: ignore[no-any-return]

    def _separation(self, x: Tensor) -> dict[str, Tensor]:
        """Return the block-diagonal attention mask ``[B, 1, L, L]`` and the positions ``[B, L]``."""
        separates = x == SEPARATOR
        text = separates.cumsum(-1)
        index = torch.arange(x.shape[-1], device=x.device)
        same = (text[:, :, None] == text[:, None, :]) & (index[:, None] >= index)
        # A separator attends to itself, because a softmax needs a key, and no token attends to it.
        seen = same & (~separates[:, None, :] | (index[:, None] == index))
        mask = torch.zeros_like(seen, dtype=self.net.dtype).masked_fill(~seen, torch.finfo(self.net.dtype).min)
        # Padding after the last text of a row may be longer than the model has positions.
        return {"attention_mask": mask[:, None], "position_ids": (seen.sum(-1) - 1).masked_fill(x < 0, 0)}

    def separate_texts(self, longest: int = 1) -> None:
        """Separate texts of one row at -2.

        Args:
            longest: Number of tokens of the longest text, which needs as many positions of the model.

        Raises:
            ConfigError: If the model cannot, because it has no positions, or no mask of any form.
        """
        self.packed = True
        self.longest_text = max(longest, 1)
        try:
            with evaluating(self):
                joined = self(torch.tensor([[3, 4, 5, SEPARATOR, 4, 3]]))[0]
                alone = torch.cat([self(torch.tensor([ids]))[0] for ids in ([3, 4, 5], [4, 3])])
            difference = (torch.cat([joined[:3], joined[4:]]) - alone).abs().max()
            equal = bool(difference <= rounding_tolerance(self.net, alone))
        except Exception:  # a model without these arguments may raise any error
            equal = False
        if not equal or getattr(self.net.config, "sliding_window", None):
            raise ConfigError(
                f"text.pack joins texts in one row, but {type(self.net).__name__} cannot separate them by a mask and "
                "positions. Remove text.pack."
            )

    def looks_ahead(self) -> bool:
        """Return whether a token changes the logits before it, as in masked language models (not causal)."""
        with evaluating(self):
            first_output, other = self(torch.tensor([[3, 3, 3, 3], [3, 3, 3, 4]]))[:, :3]
        return not torch.allclose(first_output, other, rtol=0, atol=1e-4)


class SequenceClassifier(TextModel):
    """Classifier from token ids ``[B, L]`` to logits ``[B, C]``.

    Decoders classify a text by its last token, so the features are the hidden state ``[B, f]`` of this token. Encoders are
    called with an attention mask.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits of the classes."""
        ids, there = token_ids(x, self.net.config), x != PADDING
        with self.steered():
            if hasattr(self.net, "score"):
                base = getattr(self.net, self.net.base_model_prefix)
                states = base(input_ids=ids, use_cache=False).last_hidden_state
                last = (there.sum(-1) - 1).clamp_min(0)
                at = last[:, None, None].expand(-1, 1, states.shape[-1])
                return self.net.score(states.gather(1, at).squeeze(1))  # type: ignore[no-any-return]
            return self.net(input_ids=ids, attention_mask=self._masks(there)).logits  # type: ignore[no-any-return]

    def _masks(self, there: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the mask of an encoder's layers, ``[B, 1, L, L]``, or one for each kind of layers if some are local.

        They are built here, because the code of transformers depends on values, which vmap does not support.

        Args:
            there: Whether there is a token, boolean ``[B, L]``.
        """
        hidden, length, config = torch.finfo(self.net.dtype).min, there.shape[1], self.net.config
        mask = torch.zeros_like(there, dtype=self.net.dtype).masked_fill(~there, hidden)
        mask = mask[:, None, None, :].expand(-1, 1, length, -1)
        if "sliding_attention" not in (getattr(config, "layer_types", None) or ()):
            return mask
        index = torch.arange(length, device=there.device)
        far = (index[:, None] - index).abs() > config.sliding_window
        return {"full_attention": mask, "sliding_attention": mask.masked_fill(far, hidden)}

    def check_masks(self, length: int) -> None:
        """Validate that an encoder computes with these masks what it computes without padding.

        Args:
            length: Number of tokens of the longest text.

        Raises:
            ConfigError: If it does not, because its layers use the mask in another way.
        """
        ids = 3 + torch.arange(length)[None] % 3
        short = min(3, length)
        try:
            with evaluating(self):
                alone = [
                    self.net(input_ids=text, attention_mask=torch.ones_like(text)).logits[0]
                    for text in (ids, ids[:, :short])
                ]
        except Exception:  # the error of the first pass of the run states the cause
            return
        expected = torch.stack(alone)
        padded = torch.cat([ids, F.pad(ids[:, :short], (0, length - short), value=PADDING)])
        try:
            with evaluating(self):
                difference = (self(padded) - expected).abs().max()
            equal = bool(difference <= rounding_tolerance(self.net, expected))
        except Exception:  # a model without a mask of this form may raise any error
            equal = False
        if not equal:
            pooling = getattr(self.net.config, "classifier_pooling", "cls")
            remedy = "Use another model." if pooling == "cls" else "Set classifier_pooling to cls in its config."
            raise ConfigError(
                f"{type(self.net).__name__} computes other logits with the masks of all pairs of tokens that unskew passes "
                f"than without padding. {remedy}"
            )


class ImageClassifier(HuggingFaceModel):
    """Classifier from images ``[B, c, H, W]`` with intensities from 0 to 1 to logits ``[B, C]``.

    Args:
        net: Model of ``transformers``.
        size: Height and width of its inputs.
        mean: Mean of its inputs per channel.
        std: Standard deviation of its inputs per channel.
        loading: Options with which it was loaded.

    Attributes:
        intensities: True, because the model normalizes its inputs itself.
        mean: Buffer of the means, ``[c, 1, 1]``.
        std: Buffer of the standard deviations, ``[c, 1, 1]``.
    """

    intensities = True
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        net: nn.Module,
        size: int,
        mean: Sequence[float],
        std: Sequence[float],
        loading: LoadingOptions = DEFAULT,
    ):
        super().__init__(net, loading)
        self.size = size
        self.preprocessing = {"image_mean": list(mean), "image_std": list(std), "size": {"height": size, "width": size}}
        self.register_buffer("mean", torch.tensor(mean)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(std)[:, None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits after converting images to the model's size, channels and scale."""
        sides = x.shape[-2:]
        if sides != (self.size, self.size):
            smaller = max(sides) > self.size
            x = F.interpolate(x, (self.size, self.size), mode="bilinear", align_corners=False, antialias=smaller)
        channels = len(self.preprocessing["image_mean"])
        if x.shape[1] == 1 and channels > 1:
            x = x.expand(-1, channels, -1, -1)
        with self.steered():
            return self.net(pixel_values=(x - self.mean) / self.std).logits  # type: ignore[no-any-return]

    def save(self, folder: str | Path) -> Path:
        """Write a folder that also contains the size and normalization of images."""
        folder = super().save(folder)
        (folder / "preprocessor_config.json").write_text(
            json.dumps(self.preprocessing, indent=2) + "\n", encoding="utf-8"
        )
        return folder


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Context manager in which a module is in eval mode and computes no gradients."""
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(training)


def check_parts(net: Any) -> None:
    """Validate that the layers of a model are those that ``transformers`` creates from its configuration.

    Args:
        net: Model of ``transformers`` without LoRA factors.

    Raises:
        ConfigError: If the saved weights would not fit, so that loading would draw random ones.
    """
    with torch.device("meta"):
        created = type(net)(net.config)
    ours, theirs = (
        {name: type(module) for name, module in some.named_modules() if [*module.parameters(recurse=False)]}
        for some in (net, created)
    )
    quantized = {name for name, kind in ours.items() if kind.__module__.startswith("bitsandbytes")}
    for name in [*ours, *theirs]:
        if name not in quantized and ours.get(name) is not theirs.get(name):
            raise ConfigError(
                f"The method has replaced {name.partition('.')[0]!r} of the model by a layer that transformers lacks, so "
                "its format cannot store it. Export to onnx, torch or torchscript."
            )


def token_ids(x: Tensor, config: Any) -> Tensor:
    """Replace padding and separators by the model's padding id.

    Args:
        x: Token ids, ``[B, L]``; -1 for padding, -2 for separators.
        config: Configuration of the model.

    Raises:
        TypeError: If the inputs are not integers.
    """
    if x.is_floating_point():
        raise TypeError("it needs token ids, which are integers")
    padding: Any = getattr(config, "pad_token_id", None)
    size = getattr(config, "vocab_size", None)
    known = isinstance(padding, int) and padding >= 0 and (size is None or padding < size)
    return torch.where(x < 0, padding if known else 0, x)


def rounding_tolerance(net: nn.Module, outputs: Tensor) -> float:
    """Return the largest difference between two passes that rounding can explain: ``min(128 eps, 1/16) max |outputs|``.

    Relative rounding errors of size ``eps`` add up like a random walk, to ``128 eps`` after ``128^2 = 16,384`` roundings in
    sequence; models of 4 to 12 blocks had up to ``21 eps`` in float32. With 8 bits (bfloat16, ``eps = 1/128``) this bound
    would be the outputs themselves, hence ``1/16 = 8 eps``; texts that attend to each other changed the outputs of tiny
    models with random weights by at least 0.16.

    Args:
        net: Model, of whose data types the coarsest counts.
        outputs: Outputs of one of the passes.
    """
    dtypes = {outputs.dtype, *(p.dtype for p in net.parameters() if p.is_floating_point())}
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    return min(128 * eps, 1 / 16) * float(outputs.abs().max())


def uses_dropout(config: Any) -> bool:
    """Return whether a configuration has any dropout."""
    values = [v for name, v in config.to_dict().items() if "drop" in name and not isinstance(v, bool)]
    return any(isinstance(v, int | float) and v > 0 for v in values)


def block_list(module: HuggingFaceModel) -> str | None:
    """Return the name of a transformer's list of blocks, the list of modules with the most parameters."""
    if not hasattr(module.net.config, "num_attention_heads"):
        return None
    lists = {
        n: sum(p.numel() for p in m.parameters()) for n, m in module.named_modules() if isinstance(m, nn.ModuleList)
    }
    return max(lists, key=lambda name: lists[name]) if lists else None


@contextlib.contextmanager
def quiet_transformers() -> Iterator[Any]:
    """Context manager that yields the package ``transformers`` with its warnings and progress bars off.

    Yields:
        The package ``transformers``.

    Raises:
        ConfigError: If the package ``transformers`` is not installed.
    """
    with explain_missing("This model needs the package transformers: pip install 'unskew[transformers]'."):
        transformers: Any = import_module("transformers")
        bars: Any = import_module("transformers.utils.logging")
    level, shown = bars.get_verbosity(), bars.is_progress_bar_enabled()
    bars.set_verbosity_error()
    bars.disable_progress_bar()
    try:
        yield transformers
    finally:
        bars.set_verbosity(level)
        if shown:
            bars.enable_progress_bar()
