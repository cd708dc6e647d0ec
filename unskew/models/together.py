"""Clients trained together on a CPU: under ``torch.func.vmap`` a whole pass of the model is one operator.

It runs the stacked twin of the network. So the rules of methods stay mapped functions, with any term added to the loss and
any number of passes. There are two ways. In a client's own gradient the client axis is taken off, and ordinary autograd
goes through twin and loss alike: clients do not mix, so the gradient of the sum of their losses is each client's own. Where
a rule differentiates by itself (``torch.func.grad`` with respect to inputs), the pass is a function with a rule for ``vmap``
and a gradient of its own, through which it cannot be differentiated twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

from unskew.models.dropout import Dropout, KeyStream
from unskew.models.stacked import Twin
from unskew.models.stacked_layers import Unknown
from unskew.models.vector import ModelSpec, Output


T = TypeVar("T")


class NotTogether(Exception):
    """A rule asks for something that only single clients, or the operators themselves under ``vmap``, can give."""


class Together:
    """The stacked form of a model, for use within ``with together(spec):``.

    Raises:
        Unknown: The model has none.
    """

    def __init__(self, spec: ModelSpec):
        if spec.autocast:
            raise Unknown("precision bf16")
        self.spec = spec
        self.twins = {train: Twin(spec, train) for train in (True, False)}
        self.ends = list(accumulate(spec.sizes))
        self.norms = [m for m in spec.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def forward(self, v: Tensor, b: Tensor, x: Tensor, train: bool) -> tuple[Output, Tensor] | None:
        """Outputs at ``v`` and the statistics afterwards; None where someone listens inside the model."""
        if any(norm._forward_pre_hooks for norm in self.norms):
            return None
        twin, stream = self.twins[train], self.spec.stream
        keys = [stream.next() for _ in range(twin.dropouts)] if stream is not None else []
        drawn = torch.stack([key for key in keys if key is not None]) if keys and keys[0] is not None else None
        run = _Run(self, train, torch.is_grad_enabled())
        args = (v, b, x, drawn)
        below = [_below(arg) for arg in args]
        if any(found is None for found in below):
            logits, features, after = _Forward.apply(run, *args)
        else:
            plain, dims = zip(*below, strict=True)  # type: ignore[arg-type]
            k = next(len(t) for t, dim in zip(plain, dims, strict=True) if dim is not None)
            with _lower():
                outputs = run.forward(k, *plain, dims, through=True)
            logits, features, after = map(_above, outputs)
        return Output(logits, features), after

    def check(self) -> None:
        """Compare with the model itself on two small batches.

        Raises:
            Unknown: The outputs differ, or there are none.
        """
        spec, draws = self.spec, torch.Generator().manual_seed(0)
        v = spec.flatten()
        vs = torch.stack([v, v + 0.01 * torch.randn(v.shape, generator=draws).to(v)])
        b = spec.flatten_buffers()
        x = torch.randn(2, 2, *spec.shape, generator=draws).to(v)
        if spec.input_dtype == torch.int64:
            x = (x > 0).long()
        keys = torch.arange(2, device=v.device)
        for train, twin in self.twins.items():
            keyed = keys[:, None] + torch.arange(twin.dropouts, device=v.device)
            drawn = keyed if twin.dropouts else None
            with torch.no_grad():
                try:
                    found = _Run(self, train, False).forward(2, vs, b, x, drawn, (0, None, 0, 0))
                except Exception as error:  # whatever a layer says of what it cannot take
                    raise Unknown("a shape that the stacked layers do not expect") from error
                for k in range(2):
                    wanted = _pass_with(spec, None if drawn is None else list(drawn[k]), vs[k], b, x[k], train)
                    for mine, theirs in zip(found, wanted, strict=False):
                        if mine[k].shape != theirs.shape or not torch.allclose(mine[k], theirs, rtol=1e-3, atol=1e-4):
                            raise Unknown("layers that do something else when they are stacked")

    def gradient(self, value: Callable[[Tensor], tuple[Tensor, T]], v: Tensor) -> tuple[Tensor, T]:
        """Gradient of the first thing that ``value`` returns with respect to ``v``, and the second."""
        found = _below(v)
        if found is None or found[1] is None:
            return torch.func.grad(value, has_aux=True)(v)  # type: ignore[no-any-return]
        with _lower():
            leaf = found[0].detach().requires_grad_()
        with torch.enable_grad():
            loss, also = value(_above(leaf))
        below = _below(loss)
        if below is None:
            raise NotTogether("a loss of another mapping")
        with _lower():
            slope = torch.autograd.grad(below[0].sum(), leaf, allow_unused=True)[0] if below[0].requires_grad else None
            slope = torch.zeros_like(leaf) if slope is None else slope
        return _above(slope), also


def stacked_form(spec: ModelSpec) -> tuple[Together | None, str]:
    """The stacked form of a model, or None and what it has that has no such form.

    >>> from torch import nn
    >>> stacked_form(ModelSpec(nn.Sequential(nn.Linear(3, 4), nn.PReLU(), nn.Linear(4, 2)), (3,), 2))
    (None, 'PReLU')
    """
    try:
        form = Together(spec)
        form.check()
    except Unknown as unknown:
        return None, str(unknown)
    return form, ""


def unchecked(spec: ModelSpec) -> Together | None:
    """The stacked form of a model, or None if it has none, without the comparison: good enough to be timed."""
    try:
        return Together(spec)
    except Unknown:
        return None


def form_of(spec: ModelSpec) -> Together | None:
    """The stacked form of a model, or None if it has none."""
    return stacked_form(spec)[0]


@contextmanager
def together(spec: ModelSpec, form: Together | None) -> Iterator[None]:
    """Within, passes of ``spec`` that are mapped over clients run as one network; nothing changes if ``form`` is None."""
    spec.together = form
    try:
        yield
    finally:
        spec.together = None


class _Run:
    """One pass: what its gradient needs."""

    def __init__(self, form: Together, train: bool, grad: bool):
        self.form, self.train, self.grad = form, train, grad

    def forward(
        self,
        k: int,
        v: Tensor,
        b: Tensor,
        x: Tensor,
        keys: Tensor | None,
        dims: tuple[int | None, ...],
        through: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs of ``k`` clients; arguments with a client axis have it first, by ``dims`` (None: all share it).

        With ``through`` the outputs know how they came about, else ``backward`` does.
        """
        self.k, self.v, self.b, self.x, self.dims, self.through = k, v, b, x, dims, through
        self.pieces, self.own_x = None, None
        if dims[0] is None and dims[1] is None and not self.train:
            return self._shared()
        return self._stacked(keys)

    def _input(self, x: Tensor) -> Tensor:
        if self.through or not self.grad or not x.is_floating_point():
            return x
        self.own_x = x.detach().requires_grad_()
        return self.own_x

    def _shared(self) -> tuple[Tensor, Tensor, Tensor]:
        """All clients look with one model that is not trained: their inputs are one batch."""
        spec, k = self.form.spec, self.k
        spec.together = None
        try:
            with torch.set_grad_enabled(self.grad):
                x = self._input(self.x)
                flat = spec.forward(self.v, self.b, x.flatten(0, 1))
                self.out = [t.unflatten(0, (k, -1)) for t in flat]
        finally:
            spec.together = self.form
        return *self._given(), self.b.expand(k, -1)

    def _stacked(self, keys: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        form, k = self.form, self.k
        spec, twin = form.spec, form.twins[self.train]
        v, b, x, keys = (
            t if t is None or d is not None else t.expand(k, *t.shape)
            for t, d in zip((self.v, self.b, self.x, keys), (*self.dims[:3], self.dims[3]), strict=True)
        )
        self.pieces = {}
        with torch.set_grad_enabled(self.grad and self.through):
            # Split at once: the gradient of each slice by itself would be as long as the whole vector.
            for name, shape, piece in zip(spec.names, spec.shapes, torch.split(v, spec.sizes, 1), strict=True):
                laid = twin.layout(piece.view(k, *shape))
                self.pieces[name] = laid if self.through else laid.detach().requires_grad_(self.grad)
        statistics = torch.split(b, spec.buffer_sizes, 1) if spec.buffer_sizes else ()
        buffers = {n: s.reshape(-1).clone() for n, s in zip(spec.buffer_names, statistics, strict=True)}
        with torch.set_grad_enabled(self.grad):
            self.out = list(twin(k, self.pieces, buffers, self._input(x), keys))
        after = torch.cat([t.view(k, -1) for t in buffers.values()], 1) if self.train and buffers else b
        return *self._given(), after

    def _given(self) -> list[Tensor]:
        return self.out if self.through else [out.detach() for out in self.out]

    def backward(self, wants_v: bool, wants_x: bool, *slopes: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients ``[k, d]`` of the model and of its inputs; zero where they are not wanted."""
        if wants_v and self.pieces is None:  # one model for all after all, and each client's own gradient of it
            self._stacked(None)
        assert not wants_x or self.own_x is not None
        pieces = list(self.pieces.values()) if wants_v and self.pieces else []
        leaves = [*pieces, *([self.own_x] if wants_x and self.own_x is not None else [])]
        outs = [(o, s) for o, s in zip(self.out, slopes, strict=True) if o.requires_grad]
        found = list(
            torch.autograd.grad(
                [o for o, _ in outs], leaves, [s for _, s in outs], retain_graph=True, allow_unused=True
            )
        )
        k, zero = self.k, slopes[0].new_zeros(())
        slope_x = found.pop() if wants_x else None
        slope_v = zero.expand(k, 1)
        if wants_v:
            slope_v = slopes[0].new_empty(k, self.form.spec.size)
            start = 0
            for end, g in zip(self.form.ends, found, strict=True):
                if g is None:
                    slope_v[:, start:end] = 0
                else:
                    part = g.unflatten(0, (k, -1)) if g.dim() and g.shape[0] != k else g
                    slope_v[:, start:end].view(part.shape).copy_(part)
                start = end
        if slope_x is None:
            slope_x = torch.zeros_like(self.own_x) if wants_x and self.own_x is not None else zero.expand(k)
        return slope_v, slope_x


def _pass_with(
    spec: ModelSpec, keys: list[Tensor] | None, v: Tensor, b: Tensor, x: Tensor, train: bool
) -> tuple[Tensor, Tensor]:
    """A pass of the model itself, whose dropout layers take these keys."""
    if spec.stream is None:
        return spec.forward(v, b, x, train)
    before, handed = spec.stream, iter(keys or [])
    layers = [m for m in spec.module.modules() if isinstance(m, Dropout)]
    replay = KeyStream()
    replay.next = lambda: next(handed, None)  # type: ignore[method-assign]
    try:
        for layer in layers:
            layer.stream = replay
        return spec.forward(v, b, x, train)
    finally:
        for layer in layers:
            layer.stream = before


def _lower() -> AbstractContextManager[None]:
    """Within, nothing is mapped."""
    return retrieve_current_functorch_interpreter().lower()  # type: ignore[no-any-return]


def _below(t: Tensor | None) -> tuple[Tensor, int | None] | None:
    """The tensor below the client axis with this axis first, and 0; with None if it has none; None if more lies between."""
    if not isinstance(t, Tensor) or not _functorch.is_functorch_wrapped_tensor(t):
        return t, None  # type: ignore[return-value]
    level = _functorch.current_level()
    if not _functorch.is_batchedtensor(t) or _functorch.maybe_get_level(t) != level:
        return None
    inner = _functorch.get_unwrapped(t)
    if _functorch.is_functorch_wrapped_tensor(inner):
        return None
    return inner.movedim(_functorch.maybe_get_bdim(t), 0), 0


def _above(t: Tensor) -> Tensor:
    """Inverse of ``_below``."""
    return _functorch._add_batch_dim(t, 0, _functorch.current_level())


def _front(args: tuple[Any, ...], dims: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with their client axis first."""
    if any(isinstance(a, Tensor) and _functorch.is_functorch_wrapped_tensor(a) for a in args):
        raise NotTogether("a mapping within the mapping over clients")
    return tuple(a if d is None else a.movedim(d, 0) for a, d in zip(args, dims, strict=True))


class _Forward(torch.autograd.Function):
    """The pass of a model."""

    @staticmethod
    def forward(run: _Run, v: Tensor, b: Tensor, x: Tensor, keys: Tensor | None) -> Any:
        raise NotTogether("a pass outside of the mapping over clients")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.run, ctx.inputs = inputs[0], inputs[1:4:2]
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        _, wants_v, _, wants_x, _ = ctx.needs_input_grad
        # The inputs go along, so that whoever differentiates the result is noticed.
        g_v, g_x = _Backward.apply(ctx.run, wants_v, wants_x, *slopes[:2], *ctx.inputs)
        return None, g_v if wants_v else None, None, g_x if wants_x else None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], run: _Run, *args: Any) -> Any:
        dims = in_dims[1:]
        return run.forward(info.batch_size, *_front(args, dims), dims), (0, 0, 0)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotTogether("forward-mode derivatives")


class _Backward(torch.autograd.Function):
    """Its gradient, which has none itself."""

    @staticmethod
    def forward(run: _Run, wants_v: bool, wants_x: bool, *args: Tensor) -> Any:
        raise NotTogether("a gradient outside of the mapping over clients")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        raise NotTogether("second derivatives")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], run: _Run, wants_v: bool, wants_x: bool, *args: Any) -> Any:
        given = _front(args[:2], in_dims[3:5])
        slopes = [s if d is not None else s.expand(run.k, *s.shape) for s, d in zip(given, in_dims[3:5], strict=True)]
        return run.backward(wants_v, wants_x, *slopes), (0, 0)
