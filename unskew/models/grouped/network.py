"""Grouped network: ``k`` clients' copies of a model as one network, with ordinary autograd.

Images of all copies are one tensor ``[B, k C, ...]`` in channels-last memory, so a convolution is one *grouped* convolution,
and pooling has enough channels to be vectorized. Other values are ``[k, B, ...]``, and a linear layer is one batched product.
``torch.fx`` traces the module; ``unskew.models.grouped.layers`` lists the supported layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from unskew.models.grouped.layers import FUNCTIONS, METHODS, MODULES, VIEWS, is_in_place
from unskew.models.grouped.values import GroupedPass, GroupedValue, UnsupportedLayerError
from unskew.models.keyed_dropout import KeyedDropout
from unskew.models.spec import ModelSpec, in_row_order
from unskew.models.zoo.proportional import SharedEffect


class _Tracer(fx.Tracer):
    """Tracer of a forward pass down to PyTorch's layers, which records the input of the head."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head
        self.features: Any = None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, KeyedDropout | SharedEffect) or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if m is self.head:
            self.features = args[0]
        return super().call_module(m, forward, args, kwargs)


class GroupedNetwork:
    """Network that runs ``k`` copies of a model in one pass.

    Args:
        spec: Layout of the model.
        train: Training or eval mode.

    Raises:
        UnsupportedLayerError: If a part of the model cannot be grouped; the message names it.
    """

    def __init__(self, spec: ModelSpec, train: bool):
        self.spec, self.train = spec, train
        module = spec.module
        before = module.training
        # The order of the inputs in memory does not matter here.
        if any(m._forward_hooks or {*m._forward_pre_hooks.values()} - {in_row_order} for m in module.modules()):
            raise UnsupportedLayerError("a hook")
        tracer = _Tracer(module.get_submodule(spec.head_name))
        try:
            graph = tracer.trace(module.train(train))
        except Exception as error:  # a module's code may raise any error for symbolic values
            raise UnsupportedLayerError("a forward pass that torch.fx cannot trace") from error
        finally:
            module.train(before)
        self.layers = dict(module.named_modules())
        self.owner = {id(p): name for name, p in module.named_parameters()}
        self.nodes = list(graph.nodes)
        self.images = len(spec.shape) > 1 and not spec.integers
        if not isinstance(tracer.features, fx.Proxy):
            raise UnsupportedLayerError("a head that is the whole model")
        self.features = tracer.features.node
        for node in self.nodes:
            self._check(node)
        self.dropouts = sum(
            isinstance(layer := self.layers.get(str(n.target)), KeyedDropout) and n.op == "call_module" and layer.p > 0
            for n in self.nodes
        ) * int(train)  # fmt: skip

    def _check(self, node: fx.Node) -> None:
        if node.op in ("placeholder", "output"):
            if node.op == "placeholder" and node.target != self.nodes[0].target:
                raise UnsupportedLayerError("a second input")
            return
        if node.op == "get_attr":
            raise UnsupportedLayerError(f"the tensor {node.target}")
        if node.op == "call_module":
            layer = self.layers[str(node.target)]
            if type(layer) not in MODULES or node.kwargs or len(node.args) != 1:
                raise UnsupportedLayerError(type(layer).__name__)
            MODULES[type(layer)].check(layer)
        elif node.op == "call_function" and node.target not in FUNCTIONS:
            raise UnsupportedLayerError(getattr(node.target, "__name__", str(node.target)))
        elif node.op == "call_method" and node.target not in METHODS:
            raise UnsupportedLayerError(f".{node.target}()")
        if is_in_place(node, self.layers) and not self._own(node.args[0]):
            raise UnsupportedLayerError("an in-place layer whose input is used elsewhere")

    def _own(self, node: Any) -> bool:
        """Return whether a node's result is used only once, so that it may be overwritten in place."""
        if not isinstance(node, fx.Node) or node.op == "placeholder" or len(node.users) > 1:
            return False
        layer = self.layers.get(str(node.target)) if node.op == "call_module" else None
        viewed = type(layer) in VIEWS or node.target in VIEWS
        return self._own(node.args[0]) if viewed else True

    def __call__(
        self, k: int, parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, keys: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute logits ``[k, B, C]`` and features ``[k, B, ...]``.

        Args:
            k: Number of copies.
            parameters: Parameters by name, in the form that ``layout`` returns.
            buffers: Buffers by name, ``[k C]``; a pass in training mode updates them in place.
            x: Inputs, ``[k, B, ...]``.
            keys: Random keys of the active dropout layers, ``[k, n]``, or None.
        """
        run = GroupedPass(k, parameters, buffers, self.owner, self.train, keys)
        known: dict[fx.Node, Any] = {}

        def value(node: fx.Node) -> Any:
            return known[node]

        for node in self.nodes:
            if node.op == "placeholder":
                known[node] = GroupedValue(x, False)
            elif node.op == "output":
                logits = value(node.args[0])
            else:
                args, kwargs = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
                if node.op == "call_module":
                    layer = self.layers[str(node.target)]
                    known[node] = MODULES[type(layer)].run(run, layer, str(node.target), *args)
                else:
                    table = FUNCTIONS if node.op == "call_function" else METHODS
                    known[node] = table[node.target](run, *args, **kwargs)
        return run.rows(logits), run.rows(known[self.features])

    def layout(self, piece: Tensor) -> Tensor:
        """Convert a parameter of all copies, ``[k, *shape]``, to the layout of its layer, as a view if possible."""
        if piece.dim() >= 4:  # filters of a convolution: copies are groups
            order = torch.channels_last if piece.dim() == 5 else torch.contiguous_format
            return piece.reshape(-1, *piece.shape[2:]).contiguous(memory_format=order)
        return piece
