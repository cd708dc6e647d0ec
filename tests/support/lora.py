"""A model with LoRA factors, and a loop that trains it."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from support.batch_loop import CLASSES, DECAY, FEATURES, HIDDEN, LR, MOMENTUM, Recorder

RANK, SCALE = 3, 2.0
"""Rank of the factors, and ``alpha / r``."""


def model(transposed=False, freeze_a=False):
    """A hidden layer with factors, and a head that is trained as it is."""
    import peft
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(1)
    first = Conv1D(HIDDEN, FEATURES) if transposed else nn.Linear(FEATURES, HIDDEN)
    net = nn.Sequential(first, nn.Tanh(), nn.Linear(HIDDEN, CLASSES))
    factors = peft.LoraConfig(r=RANK, lora_alpha=SCALE * RANK, target_modules=["0"], fan_in_fan_out=transposed)
    net = peft.inject_adapter_in_model(factors, net)
    net[2].requires_grad_(True)
    net[0].lora_A["default"].weight.requires_grad_(not freeze_a)
    return net


class Starts(Recorder):
    """Also records the parameters that training starts from."""

    def __init__(self):
        super().__init__()
        self.starts = []

    def begin(self, ctx):
        self.starts.append(split(ctx.v_global))
        return super().begin(ctx)


def split(v):
    """Weight, factors and head of a parameter vector."""
    shapes = [(HIDDEN, FEATURES), (RANK, FEATURES), (HIDDEN, RANK), (CLASSES, HIDDEN), (CLASSES,)]
    pieces = torch.split(v, [torch.Size(shape).numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def train(w, bias, parts, batches, penalty=lambda a, b: 0.0):
    """Local SGD of factors and head, with a penalty on the factors; ``w`` is ``[out, in]``."""
    parts = [p.clone().requires_grad_(True) for p in parts]
    optimizer = torch.optim.SGD(parts, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    for x, y in batches:
        optimizer.zero_grad()
        a, b, head, head_bias = parts
        hidden = torch.tanh(x @ (w + SCALE * b @ a).T + bias)
        (cross_entropy(hidden @ head.T + head_bias, y) + penalty(a, b)).backward()
        optimizer.step()
    return [p.detach() for p in parts]


def initial(transposed=False):
    """The initial weight ``[out, in]``, its bias, and the trained parameters: both factors, and the head."""
    net = model(transposed).double()
    layer = net[0]
    w, bias = layer.base_layer.weight.detach(), layer.base_layer.bias.detach()
    factors = [layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach()]
    return w.T if transposed else w, bias, [*factors, net[2].weight.detach(), net[2].bias.detach()]
