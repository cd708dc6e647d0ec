"""Models on the Hugging Face Hub or in a local folder, optionally with LoRA (needs the extra ``transformers``).

Weights are only read from safetensors, and code of model authors is never executed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from unskew.data.readers.hub import UNREACHABLE, hub_or_cache
from unskew.errors import ConfigError, short_repr, unknown_name
from unskew.models.zoo.hf_options import LoadingOptions, check_checkpointing, train_in_float32
from unskew.models.zoo.hf_wrappers import (
    CausalLM,
    ImageClassifier,
    SequenceClassifier,
    quiet_transformers,
    uses_dropout,
)
from unskew.models.zoo.lora import add_lora, first_line, parse_lora
from unskew.option_parsing import build_from_options
from unskew.tasks.registry import TASKS

Options = Mapping[str, Any]
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALVES = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
DERIVED = ("out_features", "out_indices", "stage_names")
RESNET18 = {"embedding_size": 64, "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "basic"}
VIT_LORA = {"r": 4, "alpha": 8, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}


def hugging_face(
    shape: tuple[int, ...],
    classes: int,
    task: str = "classification",
    *,
    weights: str,
    pretrained: bool = True,
    config: Options | None = None,
    lora: Options | None = None,
    revision: str | None = None,
    size: int | None = None,
    base_dtype: str = "float32",
    attention: str = "eager",
    checkpointing: bool = False,
) -> nn.Module:
    """Build a Hugging Face model for a task.

    The task ``language`` uses a causal language model. Other tasks use a sequence classifier for token ids, and an image
    classifier for images. If the number of classes differs from the checkpoint's, the head is newly initialized.

    Args:
        shape: Shape of one input: ``(L,)`` for token ids, or ``(c, H, W)`` for images.
        classes: Number of classes, or of tokens for a language model.
        task: Name of the task: ``language``, ``classification`` or ``multilabel``.
        weights: Name of a model on the Hub, or a folder with ``config.json`` and safetensors. Without ``pretrained`` also
            the name of an architecture, such as ``opt``.
        pretrained: Load the weights; otherwise only the configuration is read, and weights are initialized.
        config: Changes of the model's configuration.
        lora: Options of LoRA (see ``LoraOptions``), which trains only the factors and a classifier's head; None trains all.
        revision: Branch, tag or commit on the Hub.
        size: Height and width of images; None uses those of the checkpoint.
        base_dtype: Data type of frozen weights, which LoRA leaves: ``float32``, ``bfloat16`` or ``nf4``.
        attention: ``eager``, or ``sdpa`` for fused kernels.
        checkpointing: Compute activations again for the gradient instead of storing them.

    Raises:
        ConfigError: If the model cannot be found or loaded, or an option does not fit it.
    """
    if not isinstance(weights, str) or not weights:
        raise ConfigError(
            "The name of the model is missing. Use hf:NAME with a Hugging Face Hub name or a local folder."
        )
    kind = "ImageClassification" if len(shape) == 3 else "SequenceClassification"
    kind = "CausalLM" if TASKS[task].tokens else kind
    factors = None if lora is None else parse_lora(lora)
    options = {"base_dtype": base_dtype, "attention": attention, "checkpointing": checkpointing}
    loading = build_from_options(LoadingOptions, options, f"the model hf:{weights}", "model_options.")
    loading.check(factors is not None, pretrained)
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise ConfigError(
            f"size={short_repr(size)} is not valid: the height and width of images must be a positive integer."
        )
    if size is not None and kind != "ImageClassification":
        raise ConfigError("size is only for image models. For the length of texts, set text.block.")
    with quiet_transformers() as transformers, readable_hub_errors(weights, transformers, pretrained):
        settings = load_configuration(transformers, weights, pretrained, config or {}, revision)
        if kind == "CausalLM":
            if not pretrained and "vocab_size" not in (config or {}) and is_architecture_name(transformers, weights):
                settings.vocab_size = classes
        else:
            settings.num_labels = classes
        net = load_weights(
            getattr(transformers, f"AutoModelFor{kind}"), weights, pretrained, settings, revision, loading
        )
        if factors is not None:
            add_lora(net, factors, trains_head=kind != "CausalLM")
        if loading.base_dtype != "float32":
            train_in_float32(net)
        if checkpointing:
            check_checkpointing(net, uses_dropout(net.config) or (factors is not None and factors.dropout > 0))
        if kind == "SequenceClassification":
            classifier = SequenceClassifier(net, loading)
            if not hasattr(net, "score"):
                classifier.check_masks(shape[0])
            return classifier
        if kind == "CausalLM":
            model = CausalLM(net, loading)
            if model.looks_ahead():
                raise ConfigError(f"{weights} uses later tokens to predict the next one. Use a causal language model.")
            return model
        mean, std, side = image_preprocessing(weights, settings, revision, pretrained)
        return ImageClassifier(net, size or side, mean, std, loading)


def resnet18(
    shape: tuple[int, ...],
    classes: int,
    weights: str = "microsoft/resnet-18",
    pretrained: bool = True,
    size: int = 224,
    config: Options | None = None,
    lora: Options | None = None,
) -> nn.Module:
    """Build a ResNet-18 trained on ImageNet (not the weights of the Feddle paper); see `hugging_face` for the options.

    Args:
        shape: Shape of a sample, ``(C, H, W)``.
        classes: Number of outputs.
        weights: Name or folder of the checkpoint.
        pretrained: Whether to load the trained weights.
        size: Side to which images are resized, in pixels.
        config: Changes of the model's configuration.
        lora: Options of LoRA; None trains all parameters.
    """
    if not pretrained:
        weights, config = "resnet", {**RESNET18, **(config or {})}
    return require_image_shape(
        shape, classes, weights=weights, pretrained=pretrained, size=size, config=config, lora=lora
    )


def vit_b16(
    shape: tuple[int, ...],
    classes: int,
    weights: str = "google/vit-base-patch16-224",
    pretrained: bool = True,
    size: int | None = None,
    config: Options | None = None,
    lora: Options | None = VIT_LORA,
) -> nn.Module:
    """Build a ViT-B/16 trained on ImageNet (not Feddle's weights), with LoRA on attention projections; see `hugging_face`.

    Args:
        shape: Shape of a sample, ``(C, H, W)``.
        classes: Number of outputs.
        weights: Name or folder of the checkpoint.
        pretrained: Whether to load the trained weights.
        size: Side to which images are resized, in pixels; None uses that of the checkpoint.
        config: Changes of the model's configuration.
        lora: Options of LoRA; None trains all parameters.
    """
    weights = weights if pretrained else "vit"
    return require_image_shape(
        shape, classes, weights=weights, pretrained=pretrained, size=size, config=config, lora=lora
    )


def require_image_shape(shape: tuple[int, ...], classes: int, **options: Any) -> nn.Module:
    """Build an image classifier; raises ``ConfigError`` if samples are not images.

    Args:
        shape: Shape of a sample.
        classes: Number of outputs.
        **options: Options of `hugging_face`.
    """
    if len(shape) != 3 or min(shape) < 1:
        raise ConfigError(f"This model needs an image shape (channels, height, width), but got {tuple(shape)}.")
    return hugging_face(shape, classes, **options)


def is_folder(name: str) -> bool:
    """Return whether a name is a local folder.

    Args:
        name: Name of a model on the Hugging Face Hub, or path of a folder.

    Raises:
        ConfigError: If the name can only be a path, but the folder does not exist.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return True
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ConfigError(f"The folder {name} does not exist. Check the path of the model.")
    return False


def is_architecture_name(transformers: Any, name: str) -> bool:
    """Return whether a name is an architecture such as ``opt`` and not a folder.

    Args:
        transformers: Package ``transformers``.
        name: Name to look up.
    """
    return not is_folder(name) and name in transformers.CONFIG_MAPPING


def load_configuration(
    transformers: Any, weights: str, pretrained: bool, changes: Options, revision: str | None
) -> Any:
    """Load the configuration of a model and apply changes.

    Args:
        transformers: Package ``transformers``.
        weights: Name or folder of the checkpoint, or name of an architecture.
        pretrained: Whether the trained weights will be loaded.
        changes: Fields to change.
        revision: Commit, branch or tag of the checkpoint.
    """
    if not pretrained and is_architecture_name(transformers, weights):
        settings = transformers.AutoConfig.for_model(weights)
    else:
        where = str(Path(weights).expanduser()) if is_folder(weights) else weights
        settings = transformers.AutoConfig.from_pretrained(where, revision=revision, trust_remote_code=False)
    wrong = [name for name in changes if not hasattr(settings, name)]
    if wrong:
        raise ConfigError(unknown_name(f"entry of the configuration of {weights}", wrong[0], settings.to_dict()))
    if changes:  # create it again, so that derived values match the changes
        own = {k: v for k, v in settings.to_diff_dict().items() if k not in DERIVED}
        settings = type(settings)(**{**own, **changes})
    if getattr(settings, "layerdrop", 0):
        settings.layerdrop = 0.0  # randomly skipped blocks would differ between engines
    return settings


def load_weights(
    auto: Any, weights: str, pretrained: bool, settings: Any, revision: str | None, loading: LoadingOptions
) -> Any:
    """Load the model.

    Args:
        auto: ``AutoModel`` class that creates the model.
        weights: Name or folder of the checkpoint.
        pretrained: Whether to load the trained weights.
        settings: Configuration of the model.
        revision: Commit, branch or tag of the checkpoint.
        loading: Data type and attention.

    Raises:
        ConfigError: If there are no safetensors, or they do not fit the model.
    """
    if not pretrained:
        return auto.from_config(settings, **loading.arguments)
    where = weights
    if is_folder(weights):
        folder = Path(weights).expanduser()
        where = str(folder)
        if not any(folder.glob("*.safetensors")):
            others = sorted(f.name for suffix in ("*.bin", "*.pt", "*.h5", "*.msgpack") for f in folder.glob(suffix))
            instead = f"only {', '.join(others)}, which may execute code when loaded" if others else "no weights"
            raise ConfigError(
                f"{folder} contains no safetensors ({instead}). Save the model as safetensors with save_pretrained."
            )
    net, report = auto.from_pretrained(
        where,
        config=settings,
        revision=revision,
        use_safetensors=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **loading.arguments,
    )
    new = {*report["missing_keys"], *(key[0] if isinstance(key, tuple) else key for key in report["mismatched_keys"])}
    body = sorted(k for k in new if k.startswith(net.base_model_prefix + ".") and "pooler" not in k)
    if body:
        raise ConfigError(
            f"The weights of {weights} do not fit the model: {len(body)} are missing or have another shape, such as "
            f"{body[0]}. Use the configuration of the checkpoint."
        )
    return net


def image_preprocessing(weights: str, settings: Any, revision: str | None, pretrained: bool) -> tuple[Any, Any, int]:
    """Return mean, standard deviation and size of a checkpoint's images, or defaults of its architecture.

    Args:
        weights: Name or folder of the checkpoint.
        settings: Configuration of the model.
        revision: Commit, branch or tag of the checkpoint.
        pretrained: Whether the trained weights are loaded.
    """
    mean, std = IMAGENET if settings.model_type == "resnet" else HALVES
    side = getattr(settings, "image_size", 224)
    path: str | Path | None = None
    if is_folder(weights):
        path = Path(weights).expanduser() / "preprocessor_config.json"
    elif pretrained:
        hub: Any = import_module("transformers.utils.hub")
        quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        path = hub.cached_file(weights, "preprocessor_config.json", revision=revision, **quiet)
    if path is not None and Path(path).is_file():
        scale = json.loads(Path(path).read_text(encoding="utf-8"))
        mean, std = scale.get("image_mean", mean), scale.get("image_std", std)
        size = scale.get("size", side)
        if "image_size" not in settings.to_dict() and isinstance(size, dict):
            size = size.get("height", size.get("shortest_edge", side))
            side = size if isinstance(size, int) else side
    channels = getattr(settings, "num_channels", 3)
    for name, values in (("image_mean", mean), ("image_std", std)):
        numbers = isinstance(values, list | tuple) and all(isinstance(v, int | float) for v in values)
        if not numbers or len(values) < channels:
            raise ConfigError(
                f"{name} in the preprocessor_config.json of {weights} must be a list of {channels} numbers."
            )
    return mean[:channels], std[:channels], side


@contextmanager
def readable_hub_errors(weights: str, transformers: Any, pretrained: bool) -> Iterator[None]:
    """Context manager that uses the Hub only if it is needed and reachable, and converts errors to readable messages.

    Args:
        weights: Name or folder of the checkpoint, or name of an architecture.
        transformers: Package ``transformers``.
        pretrained: Whether the trained weights are loaded.
    """
    new = not pretrained and is_architecture_name(transformers, weights)
    try:
        with nullcontext(True) if new or is_folder(weights) else hub_or_cache() as reached:
            yield
    except ConfigError:
        raise
    except Exception as error:  # the Hub, the files and the model may raise any error
        if not reached and isinstance(error, OSError):  # other errors are not due to missing files
            raise ConfigError(
                f"The model {weights!r} cannot be loaded: {UNREACHABLE} use a folder that contains it."
            ) from error
        if "scaled_dot_product_attention" in str(error):
            raise ConfigError(f"The model {weights!r} has no attention: sdpa. Remove this option.") from error
        hint = ""
        if "safetensors" in str(error):
            hint = " If another revision on the Hub has them, set revision, or use a folder that contains safetensors."
        action = "built" if new else "loaded"
        raise ConfigError(f"The model {weights!r} cannot be {action}: {first_line(error)}.{hint}") from error
