"""Combined forward pass of two models with the same architecture on the same inputs.

The first layer processes the inputs once, with the weights of both models. Later convolutions are grouped, and later linear
layers are batched matrix products. The first convolution dominates the cost of an input gradient, so both models together
cost little more than one. Results agree with separate passes up to rounding.
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
    """Return the layers of a sequential model with their names; None if it is not sequential or a layer is not supported."""
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
    """Return a function that computes the logits of two models in eval mode.

    Args:
        spec: Layout of both models.
        first: Parameters ``[d]`` and buffers ``[m]`` of the first model.
        second: Parameters ``[d]`` and buffers ``[m]`` of the second model.
    """
    # Grouped models of several clients have their own implementation.
    layers = sequential_layers(spec) if spec.grouped_model is None else None
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
    """Move each ReLU after a following max pooling: the result is equal, with fewer values to process."""
    layers = list(layers)
    for at in range(len(layers) - 1):
        if isinstance(layers[at][1], nn.ReLU) and isinstance(layers[at + 1][1], nn.MaxPool2d):
            layers[at], layers[at + 1] = layers[at + 1], layers[at]
    return layers


def _step(layer: nn.Module, weights: list[Tensor], biases: list[Tensor], split: bool) -> Step:
    """Return a function that applies one layer of both models.

    Args:
        layer: Layer of the module.
        weights: Weight of each model; empty if the layer has none.
        biases: Bias of each model; empty if the layer has none.
        split: Whether activations are already separate for both models: as groups of channels, or ``[2, n, f]``.
    """
    if isinstance(layer, nn.Conv2d):
        weight, bias = channels_last(torch.cat(weights)), torch.cat(biases) if biases else None
        stride = layer.stride
        padding = layer.padding
        dilation = layer.dilation
        groups = 2 if split else 1
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
