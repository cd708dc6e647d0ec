"""Layer groups in order of depth, which define "the first L layers" of any model.

Depth is the order of first use in a forward pass. A normalization belongs to the layer before it, a projection in a shortcut
to the block that it bypasses, and running statistics to their normalization (Gholami and Seferoglu 2024, arXiv:2404.11754:
ResNet-20 has 20 such groups, the stem, 18 convolutions and the classifier).

The layers of a transformer are its blocks. Layers before the first block form the group of embeddings, which is always in the
body and not counted: "the first 10 layers" of OPT-125M are its embeddings and ten of its twelve blocks. Parameters that are
used twice, such as embeddings tied to the output layer, belong to the group of their first use, the embeddings.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from torch import Tensor, nn

from unskew.errors import ConfigError
from unskew.models.body_head import merge_slices
from unskew.models.spec import ModelSpec, slices_mask

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.LocalResponseNorm)
EMBEDDINGS = "embeddings"
BRIDGE = re.compile(r"(^|\.)(shortcut|downsample|skip)(\.|$)")


@dataclass(frozen=True)
class LayerGroup:
    """Layer with the normalizations and projections that belong to it.

    Attributes:
        name: Name of the group: that of its first layer or block.
        layers: Names of all layers in the group.
        slices: Slices of the parameter vector ``v [d]``.
        buffers: Slices of the buffer vector ``b [m]``.
        leading: Whether the group is always in the body and not counted: a transformer's embeddings.
    """

    name: str
    layers: tuple[str, ...]
    slices: tuple[slice, ...]
    buffers: tuple[slice, ...]
    leading: bool = False

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(s.stop - s.start for s in self.slices)


@lru_cache(maxsize=16)
def layer_groups(spec: ModelSpec) -> tuple[LayerGroup, ...]:
    """Return the groups of a model in order of depth; each parameter and buffer is in exactly one group.

    A parameter that no forward pass uses is added to the last group before the head.
    """
    modules = dict(spec.module.named_modules())
    groups: list[list[str]] = []
    names: list[str] = []
    for name in spec.layers:
        unit = _unit(name, spec)
        joins = isinstance(modules[name], NORMS) or BRIDGE.search(name) is not None if unit is None else unit in names
        if joins and groups:
            groups[-1].append(name)
        else:
            groups.append([name])
            names.append(unit or name)
    owner = {layer: index for index, layers in enumerate(groups) for layer in layers}
    rest = max(0, len(groups) - 2)
    parameters: list[list[slice]] = [[] for _ in groups]
    buffers: list[list[slice]] = [[] for _ in groups]
    for tensors, sizes, target in (
        (spec.names, spec.sizes, parameters),
        (spec.buffer_names, spec.buffer_sizes, buffers),
    ):
        ends = accumulate(sizes, initial=0)
        for name, (start, stop) in zip(tensors, pairwise(ends), strict=True):
            index = owner.get(name.rpartition(".")[0])
            if index is None:
                index = _nearest_group(name, spec, owner, rest)
            target[index].append(slice(start, stop))
    return tuple(
        LayerGroup(
            name, tuple(layers), merge_slices(parameters[index]), merge_slices(buffers[index]), name == EMBEDDINGS
        )
        for index, (name, layers) in enumerate(zip(names, groups, strict=True))
    )


def _unit(name: str, spec: ModelSpec) -> str | None:
    """Return the block of a layer, or the embeddings for layers before the first block; None for other layers."""
    if spec.blocks is None:
        return None
    prefix = spec.blocks + "."
    if name.startswith(prefix):
        return prefix + name.removeprefix(prefix).partition(".")[0]
    first = next((at for at, used in enumerate(spec.used) if used.startswith(prefix)), 0)
    return EMBEDDINGS if spec.used.index(name) < first else None


def _nearest_group(name: str, spec: ModelSpec, owner: dict[str, int], rest: int) -> int:
    """Return the group of a tensor of a module that is not a layer: that of the first layer inside it, or the one before.

    For example, a class token belongs to the embeddings, and buffers of a norm without weights to the layer before it.
    """
    order = spec.used
    module = name.rpartition(".")[0]
    inside = next((index for layer, index in owner.items() if module and layer.startswith(module + ".")), None)
    if inside is not None:
        return inside
    if module not in order:
        return rest
    earlier = [owner[layer] for layer in order[: order.index(module)] if layer in owner]
    return earlier[-1] if earlier else 0


@lru_cache(maxsize=256)
def parameter_slices(spec: ModelSpec, wanted: tuple[bool, ...]) -> tuple[slice, ...]:
    """Return the parameter slices of the selected groups.

    Args:
        spec: Layout of the model.
        wanted: Whether each layer group is selected.
    """
    pairs = zip(layer_groups(spec), wanted, strict=True)
    return merge_slices([span for group, is_wanted in pairs if is_wanted for span in group.slices])


def split_at_depth(groups: tuple[LayerGroup, ...], depth: int) -> tuple[tuple[LayerGroup, ...], tuple[LayerGroup, ...]]:
    """Split groups into body and head.

    Args:
        groups: Layer groups in order of depth.
        depth: Number of groups in the body, not counting embeddings; -1: all but the last.

    Raises:
        ConfigError: If the model has fewer groups.
    """
    leading = sum(group.leading for group in groups)
    if depth < 0:
        return groups[:-1], groups[-1:]
    if depth > len(groups) - leading:
        raise ConfigError(
            f"split={depth} is too large: the model has {len(groups) - leading} layers (see unskew models)."
        )
    return groups[: leading + depth], groups[leading + depth :]


@lru_cache(maxsize=64)
def _buffer_mask(spec: ModelSpec, edges: tuple[tuple[int, int], ...]) -> Tensor:
    v = slices_mask([slice(*pair) for pair in edges], spec.size)
    b = slices_mask((), sum(spec.buffer_sizes))
    for group in layer_groups(spec):
        if all(bool(v[span].all()) for span in group.slices):
            for span in group.buffers:
                b[span] = True
    return b


def buffer_mask(spec: ModelSpec, slices: Sequence[slice]) -> Tensor:
    """Return a mask ``[m]`` of the buffers that are sent with slices of the parameters: those of complete layers.

    Args:
        spec: Layout of the model.
        slices: Slices of the parameter vector.
    """
    return _buffer_mask(spec, tuple((span.start, span.stop) for span in slices))
