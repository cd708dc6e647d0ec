"""The layers of a stacked twin (``unskew.models.grouped.network``): what each does to ``k`` clients' values at once."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from unskew.models.grouped.values import Pass, Stacked, Unknown
from unskew.models.keyed_dropout import Dropout
from unskew.seeding import uniform


class Layer(NamedTuple):
    """A kind of module: ``run(pass, module, name, value)``, and ``check(module)``, which raises ``Unknown``."""

    run: Callable[..., Stacked]
    check: Callable[[Any], None] = lambda module: None


def _need(true: bool, what: str) -> None:
    if not true:
        raise Unknown(what)


# ---- layers with parameters ---------------------------------------------------------------------------------------------


def _convolution(run: Pass, layer: Any, name: str, x: Stacked) -> Stacked:
    function = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(layer.kernel_size)]
    weight, bias = run.of(layer.weight), run.of(layer.bias)
    assert weight is not None
    if type(layer) is nn.Conv2d and layer.in_channels == 3 and layer.groups == 1:
        # The gradient of grouped filters over three channels takes three to four times as long as over four.
        data = _fourth_channel(run.rows(x))
        weight = F.pad(weight, (0, 0, 0, 0, 0, 1)).contiguous(memory_format=torch.channels_last)
    else:
        data = run.image(x)
    out = function(
        data, weight, None if bias is None else bias.reshape(-1),
        layer.stride, layer.padding, layer.dilation, layer.groups * run.k,
    )  # fmt: skip
    return Stacked(out, True)


def _fourth_channel(rows: Tensor) -> Tensor:
    """Pictures ``[k, B, 3, H, W]`` as ``[B, 4 k, H, W]``, channels last; the fourth channel is empty."""
    k, batch, channels, height, width = rows.shape
    data = rows.new_zeros(batch, height, width, k, 4)
    data[..., :channels] = rows.permute(1, 3, 4, 0, 2)
    return data.flatten(3).permute(0, 3, 1, 2)


def _linear(run: Pass, layer: nn.Linear, name: str, x: Stacked) -> Stacked:
    rows, weight, bias = run.rows(x), run.of(layer.weight), run.of(layer.bias)
    assert weight is not None
    flat = rows.reshape(run.k, -1, rows.shape[-1])
    turned = weight.transpose(1, 2)
    out = torch.bmm(flat, turned) if bias is None else torch.baddbmm(bias.unsqueeze(1), flat, turned)
    return Stacked(out.view(*rows.shape[:-1], -1), False)


def _batch_norm(run: Pass, layer: Any, name: str, x: Stacked) -> Stacked:
    mean, var = (run.buffers.get(f"{name}.{part}") for part in ("running_mean", "running_var"))
    weight, bias = (None if p is None else p.reshape(-1) for p in (run.of(layer.weight), run.of(layer.bias)))
    own = run.train or mean is None
    return Stacked(F.batch_norm(run.image(x), mean, var, weight, bias, own, layer.momentum, layer.eps), True)


def _group_norm(run: Pass, layer: nn.GroupNorm, name: str, x: Stacked) -> Stacked:
    weight, bias = (None if p is None else p.reshape(-1) for p in (run.of(layer.weight), run.of(layer.bias)))
    return Stacked(F.group_norm(run.image(x), layer.num_groups * run.k, weight, bias, layer.eps), True)


def _layer_norm(run: Pass, layer: nn.LayerNorm, name: str, x: Stacked) -> Stacked:
    rows = run.rows(x)
    out = F.layer_norm(rows, layer.normalized_shape, eps=layer.eps)
    between = [1] * (rows.dim() - 1 - len(layer.normalized_shape))
    for parameter, function in ((run.of(layer.weight), torch.mul), (run.of(layer.bias), torch.add)):
        if parameter is not None:
            own = parameter.reshape(run.k, *layer.normalized_shape)
            out = function(out, own.view(run.k, *between, *layer.normalized_shape))
    return Stacked(out, False)


def _embedding(run: Pass, layer: nn.Embedding, name: str, x: Stacked) -> Stacked:
    rows, weight = run.rows(x), run.of(layer.weight)
    assert weight is not None
    first = torch.arange(run.k, device=rows.device) * layer.num_embeddings
    return Stacked(F.embedding(rows + first.view(-1, *[1] * (rows.dim() - 1)), weight.flatten(0, 1)), False)


def _dropout(run: Pass, layer: Dropout, name: str, x: Stacked) -> Stacked:
    if not run.train or layer.p == 0 or run.keys is None:
        return x
    key, rows = run.keys[:, run.dropped], run.rows(x)
    run.dropped += 1
    if layer.p >= 1:
        return Stacked(rows * 0, False)
    keep = torch.func.vmap(lambda own: uniform(own, tuple(rows.shape[1:])))(key) >= layer.p
    return Stacked(rows * keep.to(rows.dtype) * (1 / (1 - layer.p)), False)


# ---- layers without parameters ------------------------------------------------------------------------------------------


def _flatten(run: Pass, x: Stacked, start_dim: int = 0, end_dim: int = -1) -> Stacked:
    rows = run.rows(x)
    ends = [d % (rows.dim() - 1) + 1 for d in (start_dim, end_dim)]
    return Stacked(rows.flatten(*ends), False)


def _reshape(run: Pass, x: Stacked, *shape: Any) -> Stacked:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    return Stacked(run.rows(x).reshape(run.k, *sizes), False)


def _mean(run: Pass, x: Stacked, dim: Any, keepdim: bool = False) -> Stacked:
    rows = run.rows(x)
    axes = [dim] if isinstance(dim, int) else list(dim)
    return Stacked(rows.mean([d % (rows.dim() - 1) + 1 for d in axes], keepdim), False)


def _size(run: Pass, x: Stacked, dim: int | None = None) -> Any:
    shape = run.rows(x).shape[1:]
    return shape if dim is None else shape[dim]


def _pointwise(function: Callable[..., Tensor]) -> Callable[..., Stacked]:
    return lambda run, x, *args, **kwargs: run.each(x, lambda t: function(t, *args, **kwargs))


def _by_channel(function: Callable[..., Tensor]) -> Callable[..., Stacked]:
    return lambda run, x, *args, **kwargs: run.channels(x, lambda t: function(t, *args, **kwargs))


def _by_sample(function: Callable[..., Tensor]) -> Callable[..., Stacked]:
    return lambda run, x, *args, **kwargs: run.samples(x, lambda t: function(t, *args, **kwargs))


def _together(function: Callable[..., Tensor]) -> Callable[..., Stacked]:
    """Of two values, or a value and a number."""

    def both(run: Pass, a: Any, b: Any) -> Any:
        if not (isinstance(a, Stacked) or isinstance(b, Stacked)):
            return function(a, b)  # sizes
        if isinstance(a, Stacked) and isinstance(b, Stacked):
            if a.image and b.image and a.data.dim() == b.data.dim():
                return Stacked(function(a.data, b.data), True)
            rows = run.rows(a), run.rows(b)
            _need(rows[0].dim() == rows[1].dim(), "a sum of different shapes")
            return Stacked(function(*rows), False)
        whole = a if isinstance(a, Stacked) else b
        data = [t.data if isinstance(t, Stacked) else t for t in (a, b)]
        return Stacked(function(*data), whole.image)

    return both


def _item(run: Pass, x: Any, index: Any) -> Any:
    if not isinstance(x, Stacked):
        return x[index]  # of a size
    index = index if isinstance(index, tuple) else (index,)
    if x.image and index[:2] == (slice(None), slice(None)):
        return Stacked(x.data[index], True)
    return Stacked(run.rows(x)[(slice(None), *index)], False)


def _joined(run: Pass, parts: list[Stacked], dim: int = 0) -> Stacked:
    rows = [run.rows(part) for part in parts]
    return Stacked(torch.cat(rows, dim % (rows[0].dim() - 1) + 1), False)


def _attribute(run: Pass, x: Stacked, name: str) -> Any:
    return _size(run, x)


def _given(shape: str) -> Callable[..., Stacked]:
    """A module without parameters, by what it treats."""
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


MODULES: dict[type, Layer] = {
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), Layer(_convolution, _frozen_size)),
    nn.Linear: Layer(_linear),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), Layer(_batch_norm, _average)),
    nn.GroupNorm: Layer(_group_norm),
    nn.LayerNorm: Layer(_layer_norm),
    nn.Embedding: Layer(_embedding, _plain_embedding),
    Dropout: Layer(_dropout),
    nn.Flatten: Layer(lambda run, layer, name, x: _flatten(run, x, layer.start_dim, layer.end_dim)),
    **dict.fromkeys(
        (
            nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid,
            nn.Softplus, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Identity, nn.LogSigmoid, nn.Softsign,
        ),
        Layer(_given("each")),
    ),
    **dict.fromkeys(
        (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
        Layer(_given("channels")),
    ),
    **dict.fromkeys(
        (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
        Layer(_given("channels"), _without_indices),
    ),
}  # fmt: skip
"""What is known of modules; a subclass may do anything else and is unknown."""

FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **{f: _together(f) for f in (operator.add, operator.mul, operator.sub, torch.add, torch.mul, torch.sub)},
    operator.iadd: _together(operator.add),
    **{f: _pointwise(f) for f in (F.relu, torch.relu, torch.tanh, torch.sigmoid, F.gelu, F.silu, F.leaky_relu, F.elu)},
    **{f: _by_channel(f) for f in (F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d)},
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
VIEWS = {nn.Flatten, nn.Identity, Dropout, torch.flatten, operator.getitem, "flatten", "view", "reshape"}


def writes(node: fx.Node, layers: dict[str, nn.Module]) -> bool:
    """Whether a node overwrites its input."""
    if node.op == "call_module":
        return bool(getattr(layers[str(node.target)], "inplace", False))
    return node.target is operator.iadd or bool(node.kwargs.get("inplace", False))
