"""Body and head of a model: choice of the head module, and slices of the parameter vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from torch import nn

from unskew.errors import ConfigError


def find_head(module: nn.Module, head: str | None, used: Sequence[str], pixels: bool = False) -> str:
    """Return the name of the head: ``head`` if given, otherwise the last linear layer in ``used``.

    The head of a model of pixels is its last 1x1 convolution, a linear layer of each pixel, or without one its last
    convolution.

    Args:
        module: The model.
        head: Name of the head; None chooses one.
        used: Names of the modules in order of first use.
        pixels: Whether the model returns logits of pixels.

    Raises:
        ConfigError: If the module does not exist, or the model has no such layer.
    """
    modules = dict(module.named_modules())
    if head is not None:
        if head not in modules:
            names = ", ".join(filter(None, modules))
            raise ConfigError(f"The model has no module {head!r} to use as head. Modules: {names}.")
        return head
    for is_head in (is_pixelwise, is_convolution) if pixels else (lambda m: isinstance(m, nn.Linear),):
        heads = [n for n in used if is_head(modules[n])] or [n for n, m in modules.items() if is_head(m)]
        if heads:
            return heads[-1]
    kind = "convolution" if pixels else "linear layer"
    raise ConfigError(f"The model has no {kind} to use as head. Choose a module with head='module.name'.")


def is_convolution(module: nn.Module) -> bool:
    """Return whether a module is a convolution, or a transposed one, of images or volumes."""
    return isinstance(module, nn.Conv2d | nn.Conv3d | nn.ConvTranspose2d | nn.ConvTranspose3d)


def is_pixelwise(module: nn.Module) -> bool:
    """Return whether a module is a linear layer of each pixel: a convolution with a kernel of one pixel."""
    return isinstance(module, nn.Conv2d | nn.Conv3d) and set(module.kernel_size) == {1}


def last_layer(layers: Sequence[str], blocks: str | None) -> tuple[str, ...]:
    """Return the name prefixes of the last layer's parameters; with blocks, of the last block and everything after it.

    Args:
        layers: Names of the layers in order of depth.
        blocks: Name of the list of blocks, or None if the model has none.

    >>> last_layer(["embed", "h.0.fc", "h.1.fc", "h.1.out", "norm"], "h")
    ('h.1.fc.', 'h.1.out.', 'norm.')
    """
    if not layers:
        return ("",)
    start = len(layers) - 1
    inside = [n for n in layers if blocks is not None and n.startswith(blocks + ".")]
    if inside:
        number = inside[-1].removeprefix(f"{blocks}.").partition(".")[0]
        start = next(i for i, n in enumerate(layers) if n.startswith(f"{blocks}.{number}."))
    return tuple(f"{name}." for name in layers[start:])


def split_parts(names: Sequence[str], sizes: Sequence[int], beginnings: tuple[str, ...]) -> dict[str, list[slice]]:
    """Return ``{"body": slices, "head": slices}`` of the parameter vector.

    Args:
        names: Names of the parameters.
        sizes: Number of entries of each parameter.
        beginnings: Prefixes of the head's parameters.

    >>> split_parts(["a.w", "b.w", "b.b", "c.w"], [2, 3, 1, 4], ("b.",))
    {'body': [slice(0, 2, None), slice(6, 10, None)], 'head': [slice(2, 6, None)]}
    """
    return {
        "body": list(slices_where(names, sizes, lambda name: not name.startswith(beginnings))),
        "head": list(slices_where(names, sizes, lambda name: name.startswith(beginnings))),
    }


def slices_where(names: Sequence[str], sizes: Sequence[int], wanted: Callable[[str], bool]) -> tuple[slice, ...]:
    """Return the slices of selected parameters.

    Args:
        names: Names of the parameters.
        sizes: Number of entries of each parameter.
        wanted: Returns whether the parameter of a name is selected.
    """
    spans = zip(names, pairwise(accumulate(sizes, initial=0)), strict=True)
    return merge_slices([slice(*span) for name, span in spans if wanted(name)])


def merge_slices(slices: list[slice]) -> tuple[slice, ...]:
    """Merge adjacent slices.

    >>> merge_slices([slice(4, 6), slice(0, 2), slice(2, 4)])
    (slice(0, 6, None),)
    """
    result: list[slice] = []
    for span in sorted(slices, key=lambda s: s.start):
        if result and result[-1].stop == span.start:
            result[-1] = slice(result[-1].start, span.stop)
        else:
            result.append(span)
    return tuple(result)
