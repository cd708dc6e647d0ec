"""Clients trained together on a CPU: within ``with together(spec, form)`` mapped passes of a model run as one network.

The rules of methods stay functions that ``torch.func.vmap`` maps, with any term added to the loss and any number of passes:
to them the model is one operator (``unskew.models.grouped.vmap_op``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from unskew.models.grouped import vmap_op
from unskew.models.grouped.network import Twin
from unskew.models.grouped.values import Unknown
from unskew.models.grouped.vmap_op import Inputs, NotTogether, Pass
from unskew.models.keyed_dropout import Dropout, KeyStream
from unskew.models.spec import ModelSpec, Output

T = TypeVar("T")


class Together:
    """The stacked form of a model.

    Raises:
        Unknown: It has none.
    """

    def __init__(self, spec: ModelSpec):
        if spec.autocast:
            raise Unknown("precision bf16")
        self.spec = spec
        self.twins = {train: Twin(spec, train) for train in (True, False)}
        self.norms = [m for m in spec.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def forward(self, v: Tensor, b: Tensor, x: Tensor, train: bool) -> tuple[Output, Tensor] | None:
        """Outputs at ``v`` and the statistics afterwards; None where nothing is mapped or someone listens inside."""
        if any(norm._forward_pre_hooks for norm in self.norms) or not vmap_op.is_mapped(v, b, x):
            return None
        twin, stream = self.twins[train], self.spec.stream
        drawn = [stream.next() for _ in range(twin.dropouts)] if stream is not None else []
        keys = [key for key in drawn if key is not None]
        one = Pass(self.spec, twin, torch.is_grad_enabled())
        logits, features, after = vmap_op.run(one, Inputs(v, b, x, torch.stack(keys) if keys else None))
        return Output(logits, features), after

    def gradient(self, value: Callable[[Tensor], tuple[Tensor, T]], v: Tensor) -> tuple[Tensor, T]:
        """Gradient of the first thing that ``value`` returns with respect to ``v``, and the second.

        Clients do not mix, so the gradient of the sum of their losses is each client's own.
        """
        found = vmap_op.below(v)
        if found is None or not found[1]:
            gradient, also = torch.func.grad(value, has_aux=True)(v)
            return gradient, also
        with vmap_op.lower():
            leaf = found[0].detach().requires_grad_()
        with torch.enable_grad():
            loss, also = value(vmap_op.above(leaf))
        summed = vmap_op.below(loss)
        if summed is None:
            raise NotTogether("a loss of another mapping")
        with vmap_op.lower():
            slope = (
                torch.autograd.grad(summed[0].sum(), leaf, allow_unused=True)[0] if summed[0].requires_grad else None
            )
            slope = torch.zeros_like(leaf) if slope is None else slope
        return vmap_op.above(slope), also

    def check(self) -> None:
        """Compare with the model itself on two small batches.

        Raises:
            Unknown: The outputs differ, or there are none.
        """
        spec, draws = self.spec, torch.Generator().manual_seed(0)
        v, b = spec.flatten(), spec.flatten_buffers()
        vs = torch.stack([v, v + 0.01 * torch.randn(v.shape, generator=draws).to(v)])
        x = torch.randn(2, 2, *spec.shape, generator=draws).to(v)
        if spec.input_dtype == torch.int64:
            x = (x > 0).long()
        for train, twin in self.twins.items():
            keys = torch.arange(2 * twin.dropouts, device=v.device).view(2, -1) if twin.dropouts else None
            with torch.no_grad():
                try:
                    found = Pass(spec, twin, False).through(2, Inputs(vs, b, x, keys), (True, False, True, True))
                except Exception as error:  # whatever a layer says of what it cannot take
                    raise Unknown("a shape that the stacked layers do not expect") from error
                for k in range(2):
                    wanted = _with_keys(spec, [] if keys is None else list(keys[k]), vs[k], b, x[k], train)
                    for mine, theirs in zip(found, wanted, strict=False):
                        if mine[k].shape != theirs.shape or not torch.allclose(mine[k], theirs, rtol=1e-3, atol=1e-4):
                            raise Unknown("layers that do something else when they are stacked")


def _with_keys(spec: ModelSpec, keys: list[Tensor], v: Tensor, b: Tensor, x: Tensor, train: bool) -> Output:
    """A pass of the model itself, whose dropout layers take these keys."""
    layers = [m for m in spec.module.modules() if isinstance(m, Dropout)]
    replay, handed = KeyStream(), iter(keys)
    replay.next = lambda: next(handed, None)  # type: ignore[method-assign]
    before = spec.stream
    try:
        for layer in layers:
            layer.stream = replay
        return spec.forward(v, b, x, train)
    finally:
        for layer in layers:
            assert before is not None
            layer.stream = before


def unchecked(spec: ModelSpec) -> Together | None:
    """The stacked form of a model without the comparison, or None if it has none: good enough to be timed."""
    try:
        return Together(spec)
    except Unknown:
        return None


def stacked_form(spec: ModelSpec) -> tuple[Together | None, str]:
    """The stacked form of a model, or None and what it has that has no such form.

    >>> stacked_form(ModelSpec(nn.Sequential(nn.Linear(3, 4), nn.PReLU(), nn.Linear(4, 2)), (3,), 2))
    (None, 'PReLU')
    """
    try:
        form = Together(spec)
        form.check()
    except Unknown as unknown:
        return None, str(unknown)
    return form, ""


def form_of(spec: ModelSpec) -> Together | None:
    """The stacked form of a model, or None if it has none."""
    return stacked_form(spec)[0]


@contextmanager
def together(spec: ModelSpec, form: Together | None) -> Iterator[None]:
    """Within, mapped passes of ``spec`` run as one network; nothing changes if ``form`` is None."""
    spec.together = form
    try:
        yield
    finally:
        spec.together = None
        if spec.stream is not None:  # a key of a mapping that failed must not outlive it
            spec.stream.start(None)
