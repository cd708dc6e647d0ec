"""Layers of a grouped network (``unskew.models.grouped.network``), which process ``k`` clients' values at once."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from unskew.models.grouped.values import GroupedPass, GroupedValue, UnsupportedLayerError
from unskew.models.keyed_dropout import KeyedDropout
from unskew.models.zoo.proportional import SharedEffect
from unskew.seeding import uniform


class LayerKind(NamedTuple):
    """Grouped implementation of a module type.

    Attributes:
        run: Called as ``run(pass, module, name, value)``.
        check: Called as ``check(module)``; raises ``UnsupportedLayerError`` for unsupported options.
    """

    run: Callable[..., GroupedValue]
    check: Callable[[Any], None] = lambda module: None


def _need(true: bool, what: str) -> None:
    if not true:
        raise UnsupportedLayerError(what)


# ---- layers with parameters ---------------------------------------------------------------------------------------------


def _convolution(run: GroupedPass, layer: Any, name: str, x: GroupedValue) -> GroupedValue:
    function = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(layer.kernel_size)]
    weight, bias = run.of(layer.weight), run.of(layer.bias)
    assert weight is not None
    if type(layer) is nn.Conv2d and layer.in_channels == 3 and layer.groups == 1:
        # The gradient of grouped filters with three channels takes three to four times as long as with four.
        data = _fourth_channel(run.rows(x))
        weight = F.pad(weight, (0, 0, 0, 0, 0, 1)).contiguous(memory_format=torch.channels_last)
    else:
        data = run.image(x)
    out = function(
        data, weight, None if bias is None else bias.reshape(-1),
        layer.stride, layer.padding, layer.dilation, layer.groups * run.k,
    )  # fmt: skip
    return GroupedValue(out, True)


def _fourth_channel(rows: Tensor) -> Tensor:
    """Convert images ``[k, B, 3, H, W]`` to ``[B, 4 k, H, W]`` in channels-last memory; the fourth channel is zero."""
    k, batch, channels, height, width = rows.shape
    data = rows.new_zeros(batch, height, width, k, 4)
    data[..., :channels] = rows.permute(1, 3, 4, 0, 2)
    return data.flatten(3).permute(0, 3, 1, 2)


DIRECT = 16
"""Inputs and outputs from which the gradient of a weight is computed in the layout of the weight."""


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    turned = weight.transpose(1, 2)
    return torch.bmm(x, turned) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, turned)


class _Linear(torch.autograd.Function):
    """Linear layers whose weight gradient is not transposed, as autograd's is, which takes long to copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            torch.bmm(g, weight) if wants_x else None,
            torch.bmm(g.transpose(1, 2), x) if wants_weight else None,
            g.sum(1) if wants_bias else None,
        )


def _linear(run: GroupedPass, layer: nn.Linear, name: str, x: GroupedValue) -> GroupedValue:
    rows = run.rows(x)
    weight = run.of(layer.weight)
    bias = run.of(layer.bias)
    assert weight is not None
    flat = rows.reshape(run.k, -1, rows.shape[-1])
    if min(layer.weight.shape) >= DIRECT:
        out: Tensor = _Linear.apply(flat, weight, bias)  # type: ignore[no-untyped-call]
    else:
        out = _product(flat, weight, bias)
    return GroupedValue(out.view(*rows.shape[:-1], -1), False)


def _shared_effect(run: GroupedPass, layer: SharedEffect, name: str, x: GroupedValue) -> GroupedValue:
    weight, bias = run.of(layer.weight), run.of(layer.bias)
    assert weight is not None
    assert bias is not None
    return GroupedValue(
        _product(run.rows(x).reshape(run.k, -1, weight.shape[-1]), weight, None) + bias.unsqueeze(1), False
    )


def _batch_norm(run: GroupedPass, layer: Any, name: str, x: GroupedValue) -> GroupedValue:
    mean, var = (run.buffers.get(f"{name}.{part}") for part in ("running_mean", "running_var"))
    weight, bias = (None if p is None else p.reshape(-1) for p in (run.of(layer.weight), run.of(layer.bias)))
    own = run.train or mean is None
    return GroupedValue(F.batch_norm(run.image(x), mean, var, weight, bias, own, layer.momentum, layer.eps), True)


def _group_norm(run: GroupedPass, layer: nn.GroupNorm, name: str, x: GroupedValue) -> GroupedValue:
    weight, bias = (None if p is None else p.reshape(-1) for p in (run.of(layer.weight), run.of(layer.bias)))
    return GroupedValue(F.group_norm(run.image(x), layer.num_groups * run.k, weight, bias, layer.eps), True)


def _layer_norm(run: GroupedPass, layer: nn.LayerNorm, name: str, x: GroupedValue) -> GroupedValue:
    rows = run.rows(x)
    out = F.layer_norm(rows, layer.normalized_shape, eps=layer.eps)
    between = [1] * (rows.dim() - 1 - len(layer.normalized_shape))
    for parameter, function in ((run.of(layer.weight), torch.mul), (run.of(layer.bias), torch.add)):
        if parameter is not None:
            own = parameter.reshape(run.k, *layer.normalized_shape)
            out = function(out, own.view(run.k, *between, *layer.normalized_shape))
    return GroupedValue(out, False)


def _embedding(run: GroupedPass, layer: nn.Embedding, name: str, x: GroupedValue) -> GroupedValue:
    rows, weight = run.rows(x), run.of(layer.weight)
    assert weight is not None
    first = torch.arange(run.k, device=rows.device) * layer.num_embeddings
    return GroupedValue(F.embedding(rows + first.view(-1, *[1] * (rows.dim() - 1)), weight.flatten(0, 1)), False)


def _dropout(run: GroupedPass, layer: KeyedDropout, name: str, x: GroupedValue) -> GroupedValue:
    if not run.train or layer.p == 0 or run.keys is None:
        return x
    key, rows = run.keys[:, run.dropped], run.rows(x)
    run.dropped += 1
    if layer.p >= 1:
        return GroupedValue(rows * 0, False)
    keep = torch.func.vmap(lambda own: uniform(own, tuple(rows.shape[1:])))(key) >= layer.p
    return GroupedValue(rows * keep.to(rows.dtype) * (1 / (1 - layer.p)), False)


# ---- layers without parameters ------------------------------------------------------------------------------------------


def _flatten(run: GroupedPass, x: GroupedValue, start_dim: int = 0, end_dim: int = -1) -> GroupedValue:
    rows = run.rows(x)
    ends = [d % (rows.dim() - 1) + 1 for d in (start_dim, end_dim)]
    return GroupedValue(rows.flatten(*ends), False)


def _reshape(run: GroupedPass, x: GroupedValue, *shape: Any) -> GroupedValue:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    return GroupedValue(run.rows(x).reshape(run.k, *sizes), False)


def _mean(run: GroupedPass, x: GroupedValue, dim: Any, keepdim: bool = False) -> GroupedValue:
    rows = run.rows(x)
    axes = [dim] if isinstance(dim, int) else list(dim)
    return GroupedValue(rows.mean([d % (rows.dim() - 1) + 1 for d in axes], keepdim), False)


def _size(run: GroupedPass, x: GroupedValue, dim: int | None = None) -> Any:
    shape = run.rows(x).shape[1:]
    return shape if dim is None else shape[dim]


def _pointwise(function: Callable[..., Tensor]) -> Callable[..., GroupedValue]:
    return lambda run, x, *args, **kwargs: run.each(x, lambda t: function(t, *args, **kwargs))


def _by_channel(function: Callable[..., Tensor]) -> Callable[..., GroupedValue]:
    return lambda run, x, *args, **kwargs: run.channels(x, lambda t: function(t, *args, **kwargs))


def _by_sample(function: Callable[..., Tensor]) -> Callable[..., GroupedValue]:
    return lambda run, x, *args, **kwargs: run.samples(x, lambda t: function(t, *args, **kwargs))


def _together(function: Callable[..., Tensor]) -> Callable[..., GroupedValue]:
    """Return the layer for a function of two values, or of a value and a number."""

    def both(run: GroupedPass, a: Any, b: Any) -> Any:
        if not (isinstance(a, GroupedValue) or isinstance(b, GroupedValue)):
            return function(a, b)  # sizes
        if isinstance(a, GroupedValue) and isinstance(b, GroupedValue):
            if a.image and b.image and a.data.dim() == b.data.dim():
                return GroupedValue(function(a.data, b.data), True)
            rows = run.rows(a), run.rows(b)
            _need(rows[0].dim() == rows[1].dim(), "a sum of different shapes")
            return GroupedValue(function(*rows), False)
        grouped = a if isinstance(a, GroupedValue) else b
        data = [t.data if isinstance(t, GroupedValue) else t for t in (a, b)]
        return GroupedValue(function(*data), grouped.image)

    return both


def _item(run: GroupedPass, x: Any, index: Any) -> Any:
    if not isinstance(x, GroupedValue):
        return x[index]  # of a size
    index = index if isinstance(index, tuple) else (index,)
    if x.image and index[:2] == (slice(None), slice(None)):
        return GroupedValue(x.data[index], True)
    return GroupedValue(run.rows(x)[(slice(None), *index)], False)


def _joined(run: GroupedPass, parts: list[GroupedValue], dim: int = 0) -> GroupedValue:
    rows = [run.rows(part) for part in parts]
    return GroupedValue(torch.cat(rows, dim % (rows[0].dim() - 1) + 1), False)


def _attribute(run: GroupedPass, x: GroupedValue, name: str) -> Any:
    return _size(run, x)


def _given(shape: str) -> Callable[..., GroupedValue]:
    """Return the layer for a module without parameters, from the name of a ``GroupedPass`` method."""
    return lambda run, layer, name, x: getattr(run, shape)(x, layer)


def _frozen_size(layer: Any) -> None:
    _need(layer.padding_mode == "zeros", f"padding_mode={layer.padding_mode!r}")


def _average(layer: Any) -> None:
    _need(layer.momentum is not None, "BatchNorm with momentum=None")


def _plain_embedding(layer: nn.Embedding) -> None:
    odd = layer.padding_idx is not None or layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse
    _need(not odd, "Embedding with options")


def _without_indices(layer: Any) -> None:
    _need(not layer.return_indices, "pooling that returns indices")


MODULES: dict[type, LayerKind] = {
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), LayerKind(_convolution, _frozen_size)),
    nn.Linear: LayerKind(_linear),
    SharedEffect: LayerKind(_shared_effect),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), LayerKind(_batch_norm, _average)),
    nn.GroupNorm: LayerKind(_group_norm),
    nn.LayerNorm: LayerKind(_layer_norm),
    nn.Embedding: LayerKind(_embedding, _plain_embedding),
    KeyedDropout: LayerKind(_dropout),
    nn.Flatten: LayerKind(lambda run, layer, name, x: _flatten(run, x, layer.start_dim, layer.end_dim)),
    **dict.fromkeys(
        (
            nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid,
            nn.Softplus, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Identity, nn.LogSigmoid, nn.Softsign,
        ),
        LayerKind(_given("each")),
    ),
    **dict.fromkeys(
        (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
        LayerKind(_given("channels")),
    ),
    **dict.fromkeys(
        (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
        LayerKind(_given("channels"), _without_indices),
    ),
}  # fmt: skip
"""Supported module types; a subclass may compute anything else and is not supported."""

FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **{f: _together(f) for f in (operator.add, operator.mul, operator.sub, torch.add, torch.mul, torch.sub)},
    operator.iadd: _together(operator.add),
    **{f: _pointwise(f) for f in (F.relu, torch.relu, torch.tanh, torch.sigmoid, F.gelu, F.silu, F.leaky_relu, F.elu)},
    **{
        f: _by_channel(f)
        for f in (F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d, F.interpolate)
    },
    F.pad: _by_sample(F.pad),
    torch.flatten: _flatten,
    torch.cat: _joined,
    operator.getitem: _item,
    getattr: _attribute,
}
METHODS: dict[str, Callable[..., Any]] = {
    "long": _pointwise(torch.Tensor.long),
    "clamp": _pointwise(torch.clamp),
    "relu": _pointwise(torch.relu),
    "tanh": _pointwise(torch.tanh),
    "sigmoid": _pointwise(torch.sigmoid),
    "flatten": _flatten,
    "view": _reshape,
    "reshape": _reshape,
    "mean": _mean,
    "size": _size,
}
VIEWS = {nn.Flatten, nn.Identity, KeyedDropout, torch.flatten, operator.getitem, "flatten", "view", "reshape"}


def is_in_place(node: fx.Node, layers: dict[str, nn.Module]) -> bool:
    """Return whether a node overwrites its input.

    Args:
        node: Node of the traced graph.
        layers: Modules of the model by name.
    """
    if node.op == "call_module":
        return bool(getattr(layers[str(node.target)], "inplace", False))
    return node.target is operator.iadd or bool(node.kwargs.get("inplace", False))
