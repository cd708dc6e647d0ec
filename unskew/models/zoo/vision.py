"""Image classifiers of the papers, and two small models for any flat input.

Every model is a `body` that ends in one feature vector a sample, followed by a linear `head`. Modules are
registered in the order in which the data passes them, so the order of the parameters is their depth.

References:
    CNN-A and CNN-B: Ye et al. 2023 (FedCOG), arXiv:2312.05966.
    ResNet-20: He et al. 2015, arXiv:1512.03385; the 3x3 shortcut is from FedALS, arXiv:2404.11754.
    VGG-11: Simonyan and Zisserman 2014, arXiv:1409.1556, as used by Li et al. 2023 (Fedssyn), arXiv:2306.13263.
    MLP: the "2NN" of McMahan et al. 2016 (FedAvg), arXiv:1602.05629.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from unskew.errors import ConfigError

VGG11_LAYERS: tuple[int | None, ...] = (64, None, 128, None, 256, 256, None, 512, 512, None, 512, 512, None)
"""Output channels of the convolutions of VGG-11; `None` is a pooling layer."""


class Classifier(nn.Module):
    """A feature extractor `body` followed by a linear `head`.

    Args:
        body: Maps a batch of inputs to features of shape `[batch, features]`.
        features: Length of the penultimate feature vector.
        classes: Number of logits.
    """

    def __init__(self, body: nn.Module, features: int, classes: int) -> None:
        if classes < 1:
            raise ConfigError(f"A classifier needs at least one class, but got classes={classes}.")
        super().__init__()
        self.body = body
        self.head = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, shape `[batch, classes]`."""
        logits: Tensor = self.head(self.body(x))
        return logits


class CNNA(Classifier):
    """CNN-A of FedCOG: two 5x5 convolutions and three linear layers (a LeNet-5).

    The convolutions have no padding. An image with a side below 16 pixels is too small for that, so its
    convolutions are padded by 2; such an image needs at least 4 pixels a side.

    Args:
        shape: Channels, height and width of an image.
        classes: Number of logits.

    >>> sum(p.numel() for p in CNNA((3, 32, 32), 10).parameters())
    62006
    """

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        channels, height, width = image_shape("CNN-A", shape)
        padding, flat = _fit("CNN-A", (height, width), kernel=5, stages=2)
        body = nn.Sequential(
            *_stage(channels, 6, 5, padding),
            *_stage(6, 16, 5, padding),
            nn.Flatten(),
            nn.Linear(16 * flat, 120),
            nn.ReLU(inplace=True),
            nn.Linear(120, 84),
            nn.ReLU(inplace=True),
        )
        super().__init__(body, 84, classes)


class CNNB(Classifier):
    """CNN-B of FedCOG: three 3x3 convolutions and two linear layers.

    The convolutions have no padding. An image with a side below 22 pixels is too small for that, so its
    convolutions are padded by 1; such an image needs at least 8 pixels a side.

    Args:
        shape: Channels, height and width of an image.
        classes: Number of logits.

    >>> sum(p.numel() for p in CNNB((3, 32, 32), 100).parameters())
    69380
    """

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        channels, height, width = image_shape("CNN-B", shape)
        padding, flat = _fit("CNN-B", (height, width), kernel=3, stages=3)
        body = nn.Sequential(
            *_stage(channels, 16, 3, padding),
            *_stage(16, 32, 3, padding),
            *_stage(32, 64, 3, padding),
            nn.Flatten(),
            nn.Linear(64 * flat, 128),
            nn.ReLU(inplace=True),
        )
        super().__init__(body, 128, classes)


class ResNet20(Classifier):
    """ResNet-20 for small images: a 16-channel stem and three stages of three basic blocks.

    Args:
        shape: Channels, height and width of an image.
        classes: Number of logits.
        shortcut: How the two widening blocks match their input to their output: a `"3x3"` convolution (FedALS),
            a `"1x1"` convolution, or `"none"`, which subsamples and appends zero channels (no parameters).
        norm: `"batch"`, or `"group"` for group normalisation, which keeps no running statistics.

    >>> sum(p.numel() for p in ResNet20((3, 32, 32), 10).parameters())
    292954
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, shortcut: str = "3x3", norm: str = "batch") -> None:
        channels, _, _ = image_shape("ResNet-20", shape)
        check_choice("ResNet-20", "shortcut", shortcut, ("3x3", "1x1", "none"))
        check_choice("ResNet-20", "norm", norm, ("batch", "group"))
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            stem=nn.Conv2d(channels, 16, 3, padding=1, bias=False), norm=_norm(norm, 16), relu=nn.ReLU(inplace=True)
        )
        widths = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)
        for block, (inputs, outputs) in enumerate(pairwise(widths), start=1):
            layers[f"block{block}"] = BasicBlock(inputs, outputs, shortcut, norm)
        layers["pool"] = nn.AdaptiveAvgPool2d(1)
        layers["flatten"] = nn.Flatten()
        super().__init__(nn.Sequential(layers), widths[-1], classes)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with normalisation, added to a shortcut; a widening block also halves the image.

    Args:
        inputs: Input channels.
        outputs: Output channels.
        shortcut: As in `ResNet20`; used only when the block widens.
        norm: As in `ResNet20`.
    """

    def __init__(self, inputs: int, outputs: int, shortcut: str, norm: str) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = _norm(norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = _norm(norm, outputs)
        self.shortcut: nn.Module
        if inputs == outputs:
            self.shortcut = nn.Identity()
        elif shortcut == "none":
            self.shortcut = PaddedShortcut(outputs - inputs)
        else:
            kernel = 3 if shortcut == "3x3" else 1
            projection = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
            self.shortcut = nn.Sequential(projection, _norm(norm, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class PaddedShortcut(nn.Module):
    """The shortcut without parameters: every second pixel, with zero channels appended (option A).

    Args:
        extra: Number of zero channels to append.
    """

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        """Return the subsampled and padded input."""
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.extra))


class VGG11(Classifier):
    """VGG-11 of Fedssyn: eight 3x3 convolutions, no batch norm, dropout 0.5 before two hidden linear layers.

    A pooling layer is left out where the feature map is already one pixel wide, so any image fits; on images much
    smaller than 32 pixels, where most weights see only padding, the model hardly trains.
    The first linear layer grows with the image. Dropout under `torch.func.vmap` needs `randomness="different"`.

    Args:
        shape: Channels, height and width of an image.
        classes: Number of logits.
        init: `"he"` draws the convolution weights from N(0, 2 / fan_out), as the authors' code does.
            `"default"` keeps PyTorch's smaller weights.

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


class Logistic(Classifier):
    """Multinomial logistic regression: one linear layer with bias on the flattened input.

    Args:
        shape: Shape of a sample, `(features,)` or `(channels, height, width)`.
        classes: Number of logits.
    """

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(nn.Flatten(), _flat_size("Logistic regression", shape), classes)


class MLP(Classifier):
    """A multilayer perceptron with ReLU on the flattened input.

    Args:
        shape: Shape of a sample, `(features,)` or `(channels, height, width)`.
        classes: Number of logits.
        hidden: Widths of the hidden layers.
    """

    def __init__(self, shape: tuple[int, ...], classes: int, hidden: Sequence[int] = (200, 200)) -> None:
        widths = [_flat_size("The MLP", shape), *_hidden_widths(hidden)]
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU(inplace=True)]
        super().__init__(nn.Sequential(*layers), widths[-1], classes)


def _stage(inputs: int, outputs: int, kernel: int, padding: int) -> list[nn.Module]:
    """Convolution, pooling, ReLU. ReLU after max-pooling gives the same value as before it, on a quarter of it."""
    return [nn.Conv2d(inputs, outputs, kernel, padding=padding), nn.MaxPool2d(2), nn.ReLU(inplace=True)]


def _fit(name: str, sides: tuple[int, int], kernel: int, stages: int) -> tuple[int, int]:
    """The padding that lets `stages` convolutions with pooling fit, and the pixels that are left."""
    for padding in (0, kernel // 2):
        height, width = sides
        for _ in range(stages):
            height, width = ((side + 2 * padding - kernel + 1) // 2 for side in (height, width))
        if min(height, width) >= 1:
            return padding, height * width
    least = 2**stages
    raise ConfigError(f"{name} needs images of at least {least}x{least} pixels, but got {sides[0]}x{sides[1]}.")


def _norm(kind: str, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(math.gcd(8, channels), channels)


def _vgg_conv(inputs: int, outputs: int, init: str) -> nn.Conv2d:
    conv = nn.Conv2d(inputs, outputs, 3, padding=1)
    if init == "he":
        # Eight layers without normalisation shrink PyTorch's default so far that the logits ignore the image.
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def image_shape(name: str, shape: Sequence[int]) -> tuple[int, int, int]:
    """The shape, if it is that of an image."""
    if len(shape) != 3 or min(shape) < 1:
        raise ConfigError(f"{name} needs an image shape (channels, height, width), but got {tuple(shape)}.")
    return shape[0], shape[1], shape[2]


def _flat_size(name: str, shape: Sequence[int]) -> int:
    if not shape or min(shape) < 1:
        raise ConfigError(f"{name} needs the shape of a sample as positive numbers, but got {tuple(shape)}.")
    return math.prod(shape)


def check_choice(name: str, option: str, value: object, allowed: tuple[object, ...]) -> None:
    """Refuse a value that is not ``allowed``."""
    if value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise ConfigError(f"{name} takes one of {choices} as {option!r}, but got {value!r}.")


def _hidden_widths(hidden: object) -> list[int]:
    if isinstance(hidden, list | tuple) and all(isinstance(width, int) and width > 0 for width in hidden):
        return list(hidden)
    raise ConfigError(f"The MLP takes a list of positive whole numbers as 'hidden', but got {hidden!r}.")
