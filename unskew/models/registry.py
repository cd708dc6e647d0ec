"""Registry of models, and construction of custom models.

`MODELS` contains the models that come with unskew. `resolve_model` also accepts a module, a factory, the import path of a
factory, or ``hf:NAME`` for a model on the Hugging Face Hub or in a folder. Weights are initialized with PyTorch's global
random generator, so the caller must seed it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from unskew import plugins
from unskew.errors import ConfigError, UnskewError, short_repr
from unskew.models.names import HUB, split_models
from unskew.models.user_modules import describe_error
from unskew.models.zoo.basic import MLP, VGG11, Logistic
from unskew.models.zoo.cnn import CNNA, CNNB, CNNC
from unskew.models.zoo.huggingface import hugging_face, resnet18, vit_b16
from unskew.models.zoo.proportional import Proportional
from unskew.models.zoo.resnet import ResNet20
from unskew.models.zoo.tabular import TableMLP
from unskew.models.zoo.text import TextMLP
from unskew.models.zoo.unet import UNet
from unskew.option_parsing import import_from_path

ModelLike = str | nn.Module | Callable[..., nn.Module]
"""Types that `resolve_model` accepts as a model."""

_KEYWORD_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_OWN_KINDS = (inspect.Parameter.POSITIONAL_ONLY, *_KEYWORD_KINDS)


@dataclass(frozen=True)
class ModelEntry:
    """Registered model.

    Attributes:
        name: Name in a configuration file.
        constructor: Called with `shape`, `classes` and the model's options as keyword arguments.
        description: One line for the list of models.
        reference: Paper of the model.
        pretrained: Whether the weights come from the Hugging Face Hub (needs the extra ``transformers``).
        texts: Whether inputs are token ids.
        pixels: Whether outputs are one class per pixel.
    """

    name: str
    constructor: Callable[..., nn.Module]
    description: str
    reference: str
    pretrained: bool = False
    texts: bool = False
    pixels: bool = False

    @property
    def reads_categories(self) -> bool:
        """True if the model learns weights for each category, so that its constructor needs `categories`."""
        return any(parameter.name == "categories" for parameter in _parameters(self.constructor))


MODELS: dict[str, ModelEntry] = {
    entry.name: entry
    for entry in (
        ModelEntry(
            "cnn",
            CNNA,
            "CNN-A: two 5x5 convolutions and three linear layers (CIFAR-10, Fashion-MNIST)",
            "FedCOG, Ye et al. 2023, arXiv:2312.05966",
        ),
        ModelEntry(
            "cnn-b",
            CNNB,
            "CNN-B: three 3x3 convolutions and two linear layers (CIFAR-100)",
            "FedCOG, Ye et al. 2023, arXiv:2312.05966",
        ),
        ModelEntry(
            "cnn-c",
            CNNC,
            "CNN-C: three 3x3 convolutions, one pooling and two linear layers",
            "Feddle, Zhu et al. 2025, arXiv:2503.20138",
        ),
        ModelEntry(
            "resnet20",
            ResNet20,
            "ResNet-20 for small images; batch or group norm, three kinds of shortcut",
            "He et al. 2015, arXiv:1512.03385; variant of FedALS, Gholami and Seferoglu 2024, arXiv:2404.11754",
        ),
        ModelEntry(
            "vgg11",
            VGG11,
            "VGG-11 with dropout and without batch norm",
            "Simonyan and Zisserman 2014, arXiv:1409.1556; variant of Fedssyn, Li et al. 2023, arXiv:2306.13263",
        ),
        ModelEntry(
            "logistic",
            Logistic,
            "Multinomial logistic regression on the flattened input",
            "the convex model of FedProx, Li et al. 2018, arXiv:1812.06127",
        ),
        ModelEntry(
            "mlp",
            MLP,
            "Multilayer perceptron on the flattened input, two hidden layers of 200 by default",
            "the 2NN of FedAvg, McMahan et al. 2016, arXiv:1602.05629",
        ),
        ModelEntry(
            "table-mlp",
            TableMLP,
            "Multilayer perceptron on the numbers of a table and embeddings of its categories",
            "Guo and Berkhahn 2016, arXiv:1604.06737",
        ),
        ModelEntry(
            "proportional",
            Proportional,
            "Proportional hazards for survival analysis: one linear effect for all bins of time",
            "Cox 1972, Journal of the Royal Statistical Society B 34; Friedman 1982, Annals of Statistics 10",
        ),
        ModelEntry(
            "text-mlp",
            TextMLP,
            "Pooled embeddings of a text's words and pairs of words, and a linear layer; needs no download",
            "Joulin et al. 2016, arXiv:1607.01759",
            texts=True,
        ),
        ModelEntry(
            "unet",
            UNet,
            "U-Net with group norm for segmentation of images and volumes; one class per pixel",
            "Ronneberger, Fischer, Brox 2015, arXiv:1505.04597",
            pixels=True,
        ),
        ModelEntry(
            "resnet-18",
            resnet18,
            "ResNet-18 trained on ImageNet, images brought to 224 x 224",
            "He et al. 2015, arXiv:1512.03385; as in Feddle, Zhu et al. 2025, arXiv:2503.20138",
            pretrained=True,
        ),
        ModelEntry(
            "vit-b16",
            vit_b16,
            "ViT-B/16 trained on ImageNet, with LoRA on the projections of attention",
            "Dosovitskiy et al. 2020, arXiv:2010.11929; as in Feddle, Zhu et al. 2025, arXiv:2503.20138",
            pretrained=True,
        ),
    )
}
"""Models that come with unskew, by name."""


def build_model(name: str, shape: tuple[int, ...], classes: int, /, **options: object) -> nn.Module:
    """Build a registered model.

    Args:
        name: Key of `MODELS`, or name of a plugin.
        shape: Shape of a sample, usually `(channels, height, width)`.
        classes: Number of logits.
        **options: Options of the model, such as `shortcut` of `"resnet20"`.

    Returns:
        The model with newly initialized weights.

    Raises:
        ConfigError: If the name or an option is unknown, or a value does not fit the model.

    >>> build_model("mlp", (4,), 2, hidden=[3]).head
    Linear(in_features=3, out_features=2, bias=True)
    """
    return _registered(name, shape, classes, options)


def _registered(
    name: str,
    shape: tuple[int, ...],
    classes: int,
    options: Mapping[str, object],
    task: str = "classification",
    categories: tuple[int, ...] = (),
) -> nn.Module:
    """Build a model by its name, which may be that of a plugin."""
    if name in MODELS:
        return _call(f"The model {name!r}", MODELS[name].constructor, shape, classes, options, task, categories)
    try:
        plugin = plugins.find_plugin(plugins.MODELS, "model", name, MODELS)
    except ConfigError as error:
        raise ConfigError(f"{error} Use a custom model as 'package.module:factory'.") from None
    label = f"The model {name!r} of the package {plugin.package}"
    return _call(label, plugin.load_callable(), shape, classes, options, task, categories)


def check_models_known(models: str) -> None:
    """Validate that the models of a run folder have names from which they can be built.

    Args:
        models: One or several names, separated by commas.

    Raises:
        ConfigError: If a name is not known, for example because the model was passed as an object in Python.
    """
    for name in split_models(models):
        if ":" in name or name in MODELS:
            continue
        try:
            plugins.find_plugin(plugins.MODELS, "model", name, MODELS)
        except ConfigError as error:
            raise ConfigError(
                f"{error} If the run got the model as an object in Python, pass it again there: model=..."
            ) from None


def resolve_model(
    model: ModelLike,
    shape: tuple[int, ...],
    classes: int,
    options: Mapping[str, object] | None = None,
    task: str = "classification",
    categories: tuple[int, ...] = (),
) -> nn.Module:
    """Build a model from any supported description.

    Args:
        model: One of
            a registered name, including those of plugins;
            a module, which is returned unchanged;
            a factory, called with those of `shape`, `classes`, `task` and `categories` that its signature contains, and
                with `options`;
            a string `"package.module:factory"`, which is imported and then used like a factory;
            `"hf:NAME"`, a model on the Hub or in a folder (see `unskew.models.zoo.huggingface.hugging_face`).
        shape: Shape of a sample.
        classes: Number of logits.
        options: Keyword arguments of the model or the factory.
        task: Name of the task.
        categories: Number of categories of each input, 0 for numeric inputs; empty if all inputs are numeric.

    Returns:
        The module.

    Raises:
        ConfigError: If the model cannot be found, imported, or called with the available arguments.

    >>> resolve_model("torch.nn:Linear", (4,), 2, {"in_features": 4, "out_features": 2})
    Linear(in_features=4, out_features=2, bias=True)
    """
    options = options or {}
    if isinstance(model, str) and ":" not in model:
        return _registered(model, shape, classes, options, task, categories)
    if isinstance(model, str) and model.startswith(HUB):
        if "weights" in options:
            raise ConfigError(f"The model {model!r} has no option 'weights'. Choose the weights with hf:NAME.")
        named = functools.partial(hugging_face, weights=model.removeprefix(HUB))
        return _call(f"The model {model!r}", named, shape, classes, options, task, categories)
    label = f"The factory {model!r}" if isinstance(model, str) else f"The factory {_name(model)!r}"
    target = import_from_path(model, f"the model {model!r}") if isinstance(model, str) else model
    if isinstance(target, nn.Module):
        if options:
            raise ConfigError(
                f"The model is already built, so its options ({_listed(options)}) have no effect. "
                "Remove them, or pass a factory."
            )
        return target
    if isinstance(model, str) and not may_be_model(target):
        raise ConfigError(
            f"{model!r} is not a model: it must be a torch.nn.Module, a subclass of it, or a Python function "
            f"that returns one, but is {str(target)[:60]}."
        )
    if not callable(target):
        raise ConfigError(
            f"A model is a name, a module, or a function that returns a module, but got {short_repr(target)}."
        )
    return _call(label, target, shape, classes, options, task, categories)


def may_be_model(target: object) -> bool:
    """Return whether the target of an import path can build a model; other functions are never called."""
    if isinstance(target, functools.partial):
        return may_be_model(target.func)
    if inspect.isclass(target):
        return issubclass(target, nn.Module) and target is not nn.Module
    if str(getattr(target, "__module__", "")).partition(".")[0] in sys.stdlib_module_names:
        return False  # for example subprocess.run, which would execute a command from the model's options
    return inspect.isfunction(target) or inspect.ismethod(target)


def _call(
    label: str,
    factory: Callable[..., object],
    shape: tuple[int, ...],
    classes: int,
    options: Mapping[str, object],
    task: str = "classification",
    categories: tuple[int, ...] = (),
) -> nn.Module:
    """Call a factory with its options and those of shape, classes, task and categories that its signature contains."""
    parameters = _parameters(factory)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    keywords = [p.name for p in parameters if p.kind in _KEYWORD_KINDS]
    more = {"task": task, "categories": categories}
    data_options = {"shape": shape, "classes": classes, **{name: more[name] for name in more if name in keywords}}
    # Keywords that the user has already set with functools.partial are not passed again.
    fixed = factory.keywords if isinstance(factory, functools.partial) else {}

    refused = [o for o in options if o in data_options or not (takes_any or o in keywords)]
    if refused:
        valid = [keyword for keyword in keywords if keyword not in data_options and keyword not in fixed]
        choices = f"Its options are: {_listed(valid)}." if valid else "It has no options."
        raise ConfigError(f"{label} has no option {_listed(refused)}. {choices}")

    arguments = {k: v for k, v in data_options.items() if (takes_any or k in keywords) and k not in fixed}
    arguments |= options
    needed = [p for p in parameters if p.kind in _OWN_KINDS and p.default is p.empty]
    missing = [p.name for p in needed if p.kind not in _KEYWORD_KINDS or p.name not in arguments]
    if missing:
        raise ConfigError(
            f"{label} needs {_listed(missing)}, but only 'shape' and 'classes' are known. "
            "Set the others in the model's options, or define defaults."
        )

    try:
        module = factory(**arguments)
    except UnskewError:
        raise
    except Exception as error:  # for example, a layer that does not fit in memory, or a mistake in a factory
        uncalled = (
            isinstance(error, TypeError) and error.__traceback__ is not None and error.__traceback__.tb_next is None
        )
        problem = "called to create a model" if uncalled else "built"
        raise ConfigError(f"{label} cannot be {problem}: {describe_error(error)}.") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{label} must return a torch.nn.Module, but returned a {type(module).__name__}.")
    return module


def _parameters(factory: Callable[..., object]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):
        return []  # some built-in callables have no signature and are called without arguments


def _name(factory: object) -> str:
    return str(getattr(factory, "__qualname__", type(factory).__name__))


def _listed(names: Mapping[str, object] | list[str]) -> str:
    return ", ".join(repr(name) for name in names)
