"""ResNet-20: He et al. 2015, arXiv:1512.03385; the 3x3 shortcut is from FedALS, arXiv:2404.11754."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from unskew.models.zoo.basic import Classifier, check_choice, image_shape, norm_layers


class ResNet20(Classifier):
    """ResNet-20 for small images: a 16-channel stem and three stages of three basic blocks.

    Args:
        shape: Channels, height and width of an image.
        classes: Number of logits.
        shortcut: Shortcut of the two blocks that increase the number of channels: a `"3x3"` convolution (FedALS), a
            `"1x1"` convolution, or `"none"`, which subsamples and appends zero channels (no parameters).
        norm: Normalization: `"batch"`, or `"group"`, which has no running statistics.

    >>> sum(p.numel() for p in ResNet20((3, 32, 32), 10).parameters())
    292954
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, shortcut: str = "3x3", norm: str = "batch") -> None:
        channels, _, _ = image_shape("ResNet-20", shape)
        check_choice("ResNet-20", "shortcut", shortcut, ("3x3", "1x1", "none"))
        check_choice("ResNet-20", "norm", norm, ("batch", "group"))
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            stem=nn.Conv2d(channels, 16, 3, padding=1, bias=False),
            norm=norm_layers(norm, 16)[0],
            relu=nn.ReLU(inplace=True),
        )
        widths = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)
        for block, (inputs, outputs) in enumerate(pairwise(widths), start=1):
            layers[f"block{block}"] = BasicBlock(inputs, outputs, shortcut, norm)
        layers["pool"] = nn.AdaptiveAvgPool2d(1)
        layers["flatten"] = nn.Flatten()
        super().__init__(nn.Sequential(layers), widths[-1], classes)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with normalization, added to a shortcut; a block with more output channels halves the image.

    Args:
        inputs: Number of input channels.
        outputs: Number of output channels.
        shortcut: Shortcut as in `ResNet20`, used only if the numbers of channels differ.
        norm: Normalization as in `ResNet20`.
    """

    def __init__(self, inputs: int, outputs: int, shortcut: str, norm: str) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = norm_layers(norm, outputs)[0]
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = norm_layers(norm, outputs)[0]
        self.shortcut: nn.Module
        if inputs == outputs:
            self.shortcut = nn.Identity()
        elif shortcut == "none":
            self.shortcut = PaddedShortcut(outputs - inputs)
        else:
            kernel = 3 if shortcut == "3x3" else 1
            projection = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
            self.shortcut = nn.Sequential(projection, *norm_layers(norm, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class PaddedShortcut(nn.Module):
    """Shortcut without parameters: every second pixel, with zero channels appended (option A).

    Args:
        extra: Number of zero channels to append.
    """

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        """Return the subsampled and padded input."""
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.extra))
