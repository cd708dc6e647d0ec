"""Layers in order of depth: what "the first L layers" means, the same for every model.

Depth is the order of first use in a forward pass. A normalization belongs to the layer before it, a projection in a
shortcut to the block that it bridges, and running statistics to the normalization that keeps them (Gholami and Seferoglu
2024, arXiv:2404.11754: ResNet-20 has 20 such groups, the stem, 18 convolutions and the classifier).

A transformer's layers are its blocks. What comes before the first one, the embeddings, is a group that is always in the
body and is not counted: "the first 10 layers" of OPT-125M are its embeddings and ten of its twelve blocks. Parameters that
are used twice, as embeddings tied to the output layer, belong to where they are used first: the embeddings.
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
    """One layer with what belongs to it.

    Attributes:
        name: Of the layer that the group is named after.
        layers: All its layers.
        slices: Its parameters in the vector ``v [d]``.
        buffers: Its statistics in ``b [m]``.
        leading: Whether it is always in the body and not counted: a transformer's embeddings.
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
    """The groups of a model in order of depth; together they hold every parameter and statistic once.

    A parameter that no forward pass uses joins the last group before the head.
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
    """The block that a layer is in, or the embeddings, if it comes before the first block; None for a layer of its own."""
    if spec.blocks is None:
        return None
    prefix = spec.blocks + "."
    if name.startswith(prefix):
        return prefix + name.removeprefix(prefix).partition(".")[0]
    first = next((at for at, used in enumerate(spec.used) if used.startswith(prefix)), 0)
    return EMBEDDINGS if spec.used.index(name) < first else None


def _nearest_group(name: str, spec: ModelSpec, owner: dict[str, int], rest: int) -> int:
    """The group of a tensor whose module is no layer: that of the first layer inside the module, or else the one before it.

    So a class token goes with the embeddings around it, and statistics of a norm without weights with the layer before.
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
    """The parameters of the groups that are wanted.

    Args:
        spec: Layout of the model.
        wanted: Whether each layer group is selected.
    """
    pairs = zip(layer_groups(spec), wanted, strict=True)
    return merge_slices([span for group, is_wanted in pairs if is_wanted for span in group.slices])


def split_at_depth(groups: tuple[LayerGroup, ...], depth: int) -> tuple[tuple[LayerGroup, ...], tuple[LayerGroup, ...]]:
    """Body and head: the first ``depth`` groups, and the others; -1 stands for all but the last. Embeddings are not counted.

    Args:
        groups: Layer groups in order of depth.
        depth: Number of groups in the body; -1: all but the last.

    Raises:
        ConfigError: The model has fewer groups.
    """
    leading = sum(group.leading for group in groups)
    if depth < 0:
        return groups[:-1], groups[-1:]
    if depth > len(groups) - leading:
        raise ConfigError(
            f"split={depth} is not possible: the model has {len(groups) - leading} layers (unskew models shows them)."
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
    """The statistics that travel with slices of the parameters, boolean ``[m]``: those of layers that travel whole.

    Args:
        spec: Layout of the model.
        slices: Slices of the parameter vector.
    """
    return _buffer_mask(spec, tuple((span.start, span.stop) for span in slices))
