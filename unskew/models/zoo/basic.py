"""Base class of the papers' classifiers, VGG-11, and two small models for any flattened input.

Every model has a `body` that outputs one feature vector per sample, followed by a linear `head`. Modules are registered in
the order of the forward pass, so parameters are ordered by depth.

References:
    VGG-11: Simonyan and Zisserman 2014, arXiv:1409.1556, as used by Li et al. 2023 (Fedssyn), arXiv:2306.13263.
    MLP: the "2NN" of McMahan et al. 2016 (FedAvg), arXiv:1602.05629.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from unskew.errors import ConfigError, short_repr

VGG11_LAYERS: tuple[int | None, ...] = (64, None, 128, None, 256, 256, None, 512, 512, None, 512, 512, None)
"""Output channels of the convolutions of VGG-11; `None` is a pooling layer."""
NORMS = ("none", "batch", "group")
"""Kinds of normalization."""


class Classifier(nn.Module):
    """Feature extractor `body` followed by a linear `head`.

    Args:
        body: Module that maps a batch of inputs to features, `[batch, features]`.
        features: Length of the penultimate feature vector.
        classes: Number of logits.
    """

    def __init__(self, body: nn.Module, features: int, classes: int) -> None:
        if classes < 1:
            raise ConfigError(f"A classifier needs at least one class, not classes={classes}.")
        super().__init__()
        self.body = body
        self.head = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, shape `[batch, classes]`."""
        logits: Tensor = self.head(self.body(x))
        return logits


class VGG11(Classifier):
    """VGG-11 of Fedssyn: eight 3x3 convolutions, no batch norm, dropout 0.5 before two hidden linear layers.

    Pooling layers are omitted when a side of the feature map is one pixel, so the model supports images of any size. On
    images much smaller than 32 pixels most weights see only padding, and the model hardly trains. The first linear layer
    grows with the image. Dropout under `torch.func.vmap` needs `randomness="different"`.

    Args:
        shape: Channels, height and width of an image.
        classes: Number of logits.
        init: Initialization of convolutions: `"he"` draws weights from N(0, 2 / fan_out), as the authors' code does;
            `"default"` uses PyTorch's smaller weights.

    >>> sum(p.numel() for p in VGG11((3, 32, 32), 10).parameters())
    9750922
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, init: str = "he") -> None:
        channels, height, width = image_shape("VGG-11", shape)
        check_choice("VGG-11", "init", init, ("he", "default"))
        layers: list[nn.Module] = []
        for outputs in VGG11_LAYERS:
            if outputs is not None:
                layers += [_vgg_conv(channels, outputs, init), nn.ReLU(inplace=True)]
                channels = outputs
            elif min(height, width) > 1:
                layers.append(nn.MaxPool2d(2))
                height, width = height // 2, width // 2
        hidden = [nn.Dropout(), nn.Linear(channels * height * width, 512), nn.ReLU(inplace=True)]
        hidden += [nn.Dropout(), nn.Linear(512, 512), nn.ReLU(inplace=True)]
        super().__init__(nn.Sequential(*layers, nn.Flatten(), *hidden), 512, classes)


class OneHot(nn.Module):
    """Numeric inputs, followed by an input of 0 and 1 for each code of each categorical input.

    Args:
        categories: Number of codes of each input, 0 for numeric inputs.
    """

    def __init__(self, categories: Sequence[int]) -> None:
        super().__init__()
        self.categories = tuple(categories)
        self.numbers = [j for j, codes in enumerate(categories) if not codes]

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs `[batch, inputs]` to `[batch, features]`."""
        parts = [x[:, self.numbers]] if self.numbers else []
        for j, codes in enumerate(self.categories):
            if codes:
                parts.append((x[:, j, None] == torch.arange(codes, dtype=x.dtype, device=x.device)).to(x.dtype))
        return torch.cat(parts, 1)


class Logistic(Classifier):
    """Multinomial logistic or linear regression: one linear layer with bias on the flattened input.

    Each category has a weight of its own, without a reference category: weights of categories are relative to each other,
    and weight decay shrinks all of them. They start at 0, so that a category without training samples has no effect.

    Args:
        shape: Shape of a sample, `(features,)` or `(channels, height, width)`.
        classes: Number of logits, or of predicted numbers.
        categories: Number of codes of each input, 0 for numeric inputs; empty if all inputs are numeric.
    """

    def __init__(self, shape: tuple[int, ...], classes: int, categories: Sequence[int] = ()) -> None:
        inputs = num_features("Logistic regression", shape)
        if not any(categories):
            super().__init__(nn.Flatten(), inputs, classes)
            return
        features = sum(codes or 1 for codes in categories)
        super().__init__(nn.Sequential(nn.Flatten(), OneHot(categories)), features, classes)
        nn.init.zeros_(self.head.weight[:, sum(not codes for codes in categories) :])


class MLP(Classifier):
    """Multilayer perceptron with ReLU on the flattened input.

    Args:
        shape: Shape of a sample, `(features,)` or `(channels, height, width)`.
        classes: Number of logits.
        hidden: Widths of the hidden layers.
        norm: Normalization before each ReLU: `"none"`, `"batch"` or `"group"`.
    """

    def __init__(
        self, shape: tuple[int, ...], classes: int, hidden: Sequence[int] = (200, 200), norm: str = "none"
    ) -> None:
        check_choice("The MLP", "norm", norm, NORMS)
        layers, features = hidden_layers(num_features("The MLP", shape), hidden, norm)
        super().__init__(nn.Sequential(nn.Flatten(), *layers), features, classes)


def hidden_layers(inputs: int, hidden: Sequence[int], norm: str = "none") -> tuple[list[nn.Module], int]:
    """Create linear layers with ReLU; returns them with the number of output features.

    Args:
        inputs: Number of input features.
        hidden: Width of each layer.
        norm: Normalization before each ReLU, as in `norm_layers`.
    """
    widths = [inputs, *positive_widths("The MLP", "hidden", hidden)]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), *norm_layers(norm, after, nn.BatchNorm1d), nn.ReLU(inplace=True)]
    return layers, widths[-1]


def norm_layers(kind: str, channels: int, batch_norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> list[nn.Module]:
    """Return a list with a normalization layer, or an empty list.

    Args:
        kind: `"none"`, `"batch"`, or `"group"`, which has up to 8 groups and no running statistics.
        channels: Number of channels or features.
        batch_norm: Class for `"batch"`.
    """
    if kind == "none":
        return []
    return [batch_norm(channels) if kind == "batch" else nn.GroupNorm(math.gcd(8, channels), channels)]


def _vgg_conv(inputs: int, outputs: int, init: str) -> nn.Conv2d:
    conv = nn.Conv2d(inputs, outputs, 3, padding=1)
    if init == "he":
        # With PyTorch's default, eight layers without normalization shrink activations until logits ignore the image.
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def image_shape(name: str, shape: Sequence[int]) -> tuple[int, int, int]:
    """Validate and return the shape of an image (raises ``ConfigError`` otherwise).

    Args:
        name: Name of the model, for the error.
        shape: Shape of a sample.
    """
    if len(shape) != 3 or min(shape) < 1:
        raise ConfigError(
            f"{name} needs an image shape (channels, height, width), but got {tuple(shape)}. "
            "Use table-mlp, mlp or logistic for tables, or text-mlp for texts; unskew models lists all models."
        )
    return shape[0], shape[1], shape[2]


def num_features(name: str, shape: Sequence[int]) -> int:
    """Return the number of values in a sample.

    Args:
        name: Name of the model, for the error.
        shape: Shape of a sample.
    """
    if not shape or min(shape) < 1:
        raise ConfigError(f"{name} needs the shape of a sample as positive numbers, but got {tuple(shape)}.")
    return math.prod(shape)


def check_choice(name: str, option: str, value: object, allowed: tuple[object, ...]) -> None:
    """Validate that the value of an option is allowed (raises ``ConfigError`` otherwise).

    Args:
        name: Name of the model, for the error.
        option: Name of the option.
        value: Value of the option.
        allowed: Allowed values.
    """
    if value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise ConfigError(f"{name}: {option!r} must be one of {choices}, not {short_repr(value)}.")


def positive_widths(name: str, option: str, widths: object) -> list[int]:
    """Return the widths of layers after validation (raises ``ConfigError`` if they are not positive integers).

    Args:
        name: Name of the model, for the error.
        option: Name of the option.
        widths: Value of the option.
    """
    if isinstance(widths, list | tuple) and all(isinstance(width, int) and width > 0 for width in widths):
        return list(widths)
    raise ConfigError(f"{name}: {option!r} must be a list of positive integers, not {short_repr(widths)}.")
