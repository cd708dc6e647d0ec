"""Two models of the same layers on the same inputs in one pass.

The first layer reads the inputs once, with the weights of both; later convolutions are grouped, later linear layers are
batched matrix products. Most of the cost of a gradient for the inputs is in the first convolution, so both models together
cost little more than one. Sums are added up in another order than model by model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unskew.generators.learned.inversion import channels_last
from unskew.models.keyed_dropout import KeyedDropout
from unskew.models.spec import ModelSpec
from unskew.models.zoo.basic import Classifier

Step = Callable[[Tensor], Tensor]
POINTWISE: dict[type[nn.Module], Step] = {nn.ReLU: F.relu, nn.Tanh: torch.tanh, nn.Sigmoid: torch.sigmoid}
IDLE = (KeyedDropout, nn.Dropout, nn.Identity)
"""Modules without effect in eval mode."""


def sequential_layers(spec: ModelSpec) -> list[tuple[str, nn.Module]] | None:
    """The layers that inputs pass one after another, by name; None where a layer is not known or the way is another."""
    module = spec.module
    if not isinstance(module, Classifier) or type(module).forward is not Classifier.forward or spec.autocast:
        return None
    layers = [(name, m) for name, m in module.named_modules() if not isinstance(m, nn.Sequential | Classifier)]
    return layers if all(_is_known(layer) for _, layer in layers) else None


def _is_known(layer: nn.Module) -> bool:
    if type(layer) is nn.Conv2d:
        return layer.groups == 1 and layer.padding_mode == "zeros"
    if type(layer) is nn.MaxPool2d:
        return not layer.return_indices
    if type(layer) is nn.Flatten:
        return (layer.start_dim, layer.end_dim) == (1, -1)
    return type(layer) is nn.Linear or type(layer) in POINTWISE or isinstance(layer, IDLE)


def paired_logits(
    spec: ModelSpec, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]
) -> Callable[[Tensor], list[Tensor]]:
    """The logits of two models in eval mode, as a function of inputs.

    Args:
        spec: Layout of both.
        first: Vector ``[d]`` and statistics ``[m]`` of one.
        second: Those of the other.
    """
    layers = (
        sequential_layers(spec) if spec.grouped_model is None else None
    )  # several clients as one network have their own way
    if layers is None:
        return lambda x: [spec.forward(v, b, x).logits for v, b in (first, second)]
    weights = [spec.parameters(v) for v, _ in (first, second)]
    steps, split = [], False
    for name, layer in _pooled_first(layers):
        own, biases = ([w[f"{name}.{what}"] for w in weights if f"{name}.{what}" in w] for what in ("weight", "bias"))
        steps.append(_step(layer, own, biases, split))
        split = split or bool(own)

    def logits(x: Tensor) -> list[Tensor]:
        for step in steps:
            x = step(x)
        return [*x]

    return logits


def _pooled_first(layers: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """The same with each ReLU after the pooling that follows it: the same numbers, of a quarter as many."""
    layers = list(layers)
    for at in range(len(layers) - 1):
        if isinstance(layers[at][1], nn.ReLU) and isinstance(layers[at + 1][1], nn.MaxPool2d):
            layers[at], layers[at + 1] = layers[at + 1], layers[at]
    return layers


def _step(layer: nn.Module, weights: list[Tensor], biases: list[Tensor], split: bool) -> Step:
    """One layer of both models.

    Args:
        layer: What they have in common.
        weights: Of each; none where the layer has none.
        biases: The same.
        split: Whether an earlier layer made two of what came in: channels of one and of the other model, or ``[2, n, f]``.
    """
    if isinstance(layer, nn.Conv2d):
        weight, bias = channels_last(torch.cat(weights)), torch.cat(biases) if biases else None
        stride, padding, dilation, groups = layer.stride, layer.padding, layer.dilation, 2 if split else 1
        return lambda h: F.conv2d(h, weight, bias, stride, padding, dilation, groups)
    if isinstance(layer, nn.Linear):
        rows = torch.stack(weights).transpose(1, 2)
        if not biases:
            return lambda h: torch.matmul(h, rows)
        added = torch.stack(biases)[:, None]
        return lambda h: torch.baddbmm(added, h.expand(2, -1, -1), rows)
    if isinstance(layer, nn.Flatten) and split:
        return lambda h: h.reshape(len(h), 2, -1).transpose(0, 1)
    return POINTWISE.get(type(layer), (lambda h: h) if isinstance(layer, IDLE) else layer)
