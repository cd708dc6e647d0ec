"""Pass of a grouped network as one operator under ``torch.func.vmap``.

There are two cases. For a client's gradient, the client axis is removed (``unwrap_batched``), and autograd differentiates
network and loss. If a rule itself differentiates (``torch.func.grad`` with respect to inputs), the pass is an autograd
function with its own ``vmap`` rule and gradient, which cannot be differentiated twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unskew.functorch_api import is_mapped, outside_vmap, unwrap_batched, wrap_batched
from unskew.models.grouped.network import GroupedNetwork
from unskew.models.spec import ModelSpec

Outputs = tuple[Tensor, Tensor, Tensor]
"""Logits and features, ``[k, B, ...]``, and the updated buffers, ``[k, m]``."""


class GroupingError(Exception):
    """A rule needs an operation that grouped networks do not support."""


class PassInputs(NamedTuple):
    """Inputs of a pass: parameters, buffers, model inputs, and keys of dropout layers."""

    v: Tensor
    b: Tensor
    x: Tensor
    keys: Tensor | None


def joined_gradient(like: Tensor, k: int, spec: ModelSpec, gradients: Sequence[Tensor | None]) -> Tensor:
    """Return gradients of parameters in the layouts of their layers as one tensor, ``[k, d]``, which copies each once.

    Args:
        like: Tensor with the data type and device of the result.
        k: Number of clients.
        spec: Layout of the model.
        gradients: Gradient of each parameter of all clients; None for zeros.
    """
    joined = like.new_empty(k, spec.size)
    for own, g in zip(torch.split(joined, spec.sizes, 1), gradients, strict=True):
        if g is None:
            own.zero_()
        else:
            part = g if g.shape[0] == k else torch.unflatten(g, 0, (k, -1))
            own.view(part.shape).copy_(part)
    return joined


class _Pieces(torch.autograd.Function):
    """Parameters of all clients in the layouts of their layers; autograd would copy each gradient twice."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, spec: ModelSpec, twin: GroupedNetwork) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.like, ctx.k, ctx.spec = v.new_empty(0), len(v), spec
        slices = zip(spec.shapes, torch.split(v, spec.sizes, 1), strict=True)
        return tuple(twin.layout(own.view(len(v), *shape)) for shape, own in slices)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None]:
        return joined_gradient(ctx.like, ctx.k, ctx.spec, gradients), None, None


class MappedPass:
    """Pass of ``k`` clients.

    Args:
        spec: Layout of the model.
        twin: Grouped network in training or eval mode.
        grad: Whether a gradient may be computed.
    """

    def __init__(self, spec: ModelSpec, twin: GroupedNetwork, grad: bool):
        self.spec = spec
        self.twin = twin
        self.grad = grad
        self.pieces: dict[str, Tensor] = {}
        self.out: list[Tensor] = []

    def through(self, k: int, given: PassInputs, mapped: tuple[bool, ...]) -> Outputs:
        """Compute outputs with their autograd graph.

        Args:
            k: Number of clients.
            given: Inputs of the pass.
            mapped: Whether each input has a client axis, which is then its first axis.
        """
        if self._shared(mapped):
            return self._one_batch(k, given, given.x)
        every = self._every(k, given, mapped)
        with torch.set_grad_enabled(self.grad):
            return self._stacked(k, every, self._pieces(k, every.v), every.x)

    def begin(self, k: int, given: PassInputs, mapped: tuple[bool, ...]) -> Outputs:
        """Compute detached outputs; the graph is stored for ``backward``.

        Args:
            k: Number of clients.
            given: Inputs of the pass.
            mapped: Whether each input has a client axis, which is then its first axis.
        """
        if self.grad and (given.v.requires_grad or given.x.requires_grad):
            raise GroupingError("a derivative within the loss")
        self.k = k
        self.given = given
        self.mapped = mapped
        x = given.x if mapped[2] else given.x.expand(k, *given.x.shape)
        self.x = x.detach().requires_grad_() if self.grad and x.is_floating_point() else x
        outputs = self._one_batch(k, given, self.x) if self._shared(mapped) else self._leaves()
        self.out = list(outputs[:2])
        return outputs[0].detach(), outputs[1].detach(), outputs[2]

    def _leaves(self) -> Outputs:
        every = self._every(self.k, self.given, self.mapped)
        with torch.no_grad():
            leaves = self._pieces(self.k, every.v)
        self.pieces = {name: tensor.detach().requires_grad_(self.grad) for name, tensor in leaves.items()}
        with torch.set_grad_enabled(self.grad):
            return self._stacked(self.k, every, self.pieces, self.x)

    def backward(self, wants_v: bool, wants_x: bool, slopes: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Compute the gradients of the parameters ``[k, d]`` and of the inputs ``[k, B, ...]``.

        Args:
            wants_v: Whether the gradient of the parameters is needed; otherwise it is undefined.
            wants_x: Whether the gradient of the inputs is needed; otherwise it is undefined.
            slopes: Gradients of the outputs.
        """
        if wants_v and not self.pieces:  # the pass used one shared model, but each client needs its own gradient
            self.out = list(self._leaves()[:2])
        leaves = [*(self.pieces.values() if wants_v else ()), *([self.x] if wants_x else [])]
        known = [(out, slope) for out, slope in zip(self.out, slopes, strict=True) if out.requires_grad]
        gradients = list(
            torch.autograd.grad(
                [out for out, _ in known], leaves, [slope for _, slope in known], retain_graph=True, allow_unused=True
            )
        )
        slope_x = gradients.pop() if wants_x else None
        slope_x = torch.zeros_like(self.x) if slope_x is None else slope_x
        if not wants_v:
            return slopes[0].new_zeros(self.k, 1), slope_x
        return joined_gradient(slopes[0], self.k, self.spec, gradients), slope_x

    def _shared(self, mapped: tuple[bool, ...]) -> bool:
        """Return whether all clients use one model without dropout, so that their inputs form one batch."""
        return not (mapped[0] or mapped[1] or self.twin.train) and mapped[2]

    def _one_batch(self, k: int, given: PassInputs, x: Tensor) -> Outputs:
        form, self.spec.grouped_model = self.spec.grouped_model, None
        try:
            with torch.set_grad_enabled(self.grad):
                logits, features = self.spec.forward(given.v, given.b, x.flatten(0, 1))
        finally:
            self.spec.grouped_model = form
        b = given.b.expand(k, *given.b.shape)
        return torch.unflatten(logits, 0, (k, -1)), torch.unflatten(features, 0, (k, -1)), b

    @staticmethod
    def _every(k: int, given: PassInputs, mapped: tuple[bool, ...]) -> PassInputs:
        """Add a client axis to the inputs without one."""
        spread = [t if t is None or own else t.expand(k, *t.shape) for t, own in zip(given, mapped, strict=True)]
        return PassInputs(*spread)  # type: ignore[arg-type]

    def _pieces(self, k: int, v: Tensor) -> dict[str, Tensor]:
        """Return the parameters of all clients by name, in the layouts of their layers."""
        pieces: tuple[Tensor, ...] = _Pieces.apply(v, self.spec, self.twin)  # type: ignore[no-untyped-call]
        return dict(zip(self.spec.names, pieces, strict=True))

    def _stacked(self, k: int, every: PassInputs, pieces: dict[str, Tensor], x: Tensor) -> Outputs:
        spec, b = self.spec, every.b
        statistics = torch.split(b, spec.buffer_sizes, 1) if spec.buffer_sizes else ()
        buffers = {n: s.reshape(-1).clone() for n, s in zip(spec.buffer_names, statistics, strict=True)}
        logits, features = self.twin(k, pieces, buffers, x, every.keys)
        if self.twin.train and buffers:
            b = torch.cat([t.view(k, -1) for t in buffers.values()], 1)
        return logits, features, b


def run_pass(one: MappedPass, given: PassInputs) -> tuple[Tensor, ...]:
    """Run a pass under the mapping over clients.

    Args:
        one: Pass to run.
        given: Inputs of the pass, under the mapping over clients.
    """
    unwrapped = [(None, False) if t is None else unwrap_batched(t) for t in given]
    plain = [pair for pair in unwrapped if pair is not None]
    if len(plain) < len(unwrapped) or not any(own for _, own in plain):
        outputs: tuple[Tensor, ...] = _Forward.apply(one, *given)  # type: ignore[no-untyped-call]
        return outputs
    k = next(len(t) for t, own in plain if own and t is not None)
    with outside_vmap():
        through = one.through(k, PassInputs(*(t for t, _ in plain)), tuple(own for _, own in plain))  # type: ignore[arg-type]
    return tuple(wrap_batched(t) for t in through)


def _first(args: tuple[Any, ...], dims: tuple[Any, ...]) -> list[Any]:
    """Move the client axis of the arguments to the front."""
    if is_mapped(*args):
        raise GroupingError("a mapping within the mapping over clients")
    return [a if d is None else a.movedim(d, 0) for a, d in zip(args, dims, strict=True)]


class _Forward(torch.autograd.Function):
    """Autograd function of a pass."""

    @staticmethod
    def forward(*args: Any) -> Any:
        raise GroupingError("a pass outside of the mapping over clients")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.one, ctx.looked_at = inputs[0], (inputs[1], inputs[3])
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        _, wants_v, _, wants_x, _ = ctx.needs_input_grad
        # Pass parameters and inputs as arguments, so that second derivatives are detected.
        args = (ctx.one, wants_v, wants_x, *slopes[:2], *ctx.looked_at)
        g_v, g_x = _Backward.apply(*args)  # type: ignore[no-untyped-call]
        return None, g_v if wants_v else None, None, g_x if wants_x else None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], one: MappedPass, *args: Any) -> Any:
        dims = in_dims[1:]
        return one.begin(info.batch_size, PassInputs(*_first(args, dims)), tuple(d is not None for d in dims)), (
            0,
            0,
            0,
        )

    @staticmethod
    def jvp(*args: Any) -> Any:
        raise GroupingError("forward-mode derivatives")


class _Backward(torch.autograd.Function):
    """Gradient of ``_Forward``, which is not differentiable itself."""

    @staticmethod
    def forward(*args: Any) -> Any:
        raise GroupingError("a gradient outside of the mapping over clients")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        raise GroupingError("second derivatives")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], one: MappedPass, wants_v: bool, wants_x: bool, *args: Any) -> Any:
        first_values = zip(_first(args[:2], in_dims[3:5]), in_dims[3:5], strict=True)
        slopes = [s if d is not None else s.expand(one.k, *s.shape) for s, d in first_values]
        return one.backward(wants_v, wants_x, slopes), (0, 0)
