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

from unskew.models.grouped import functorch_api, vmap_op
from unskew.models.grouped.network import GroupedNetwork
from unskew.models.grouped.values import UnsupportedLayerError
from unskew.models.grouped.vmap_op import GroupingError, MappedPass, PassInputs
from unskew.models.keyed_dropout import KeyedDropout, KeyStream
from unskew.models.spec import ModelOutput, ModelSpec

T = TypeVar("T")


class GroupedModel:
    """Model of several clients as one network.

    Args:
        spec: Layout of the model of one client.

    Raises:
        UnsupportedLayerError: The model has a layer that cannot be grouped, or PyTorch lacks a function for it.
    """

    def __init__(self, spec: ModelSpec):
        if reason := functorch_api.missing_functions():
            raise UnsupportedLayerError(reason)
        if spec.autocast:
            raise UnsupportedLayerError("precision bf16")
        self.spec = spec
        self.twins = {train: GroupedNetwork(spec, train) for train in (True, False)}
        self.norms = [m for m in spec.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def forward(self, v: Tensor, b: Tensor, x: Tensor, train: bool) -> tuple[ModelOutput, Tensor] | None:
        """Outputs at ``v`` and the statistics afterwards; None where nothing is mapped or someone listens inside.

        Args:
            v: Parameters under the mapping over clients, ``[d]``.
            b: Buffers, ``[m]``.
            x: Inputs, ``[B, ...]``.
            train: Whether the model is in training mode.
        """
        if any(norm._forward_pre_hooks for norm in self.norms) or not functorch_api.is_mapped(v, b, x):
            return None
        twin, stream = self.twins[train], self.spec.stream
        drawn = [stream.next() for _ in range(twin.dropouts)] if stream is not None else []
        keys = [key for key in drawn if key is not None]
        passes = MappedPass(self.spec, twin, torch.is_grad_enabled())
        logits, features, after = vmap_op.run_pass(passes, PassInputs(v, b, x, torch.stack(keys) if keys else None))
        return ModelOutput(logits, features), after

    def gradient(self, value: Callable[[Tensor], tuple[Tensor, T]], v: Tensor) -> tuple[Tensor, T]:
        """Gradient of the first thing that ``value`` returns with respect to ``v``, and the second.

        Clients do not mix, so the gradient of the sum of their losses is each client's own.

        Args:
            value: Function of the parameters that returns a loss and further results.
            v: Parameters under the mapping over clients, ``[d]``.
        """
        unwrapped = functorch_api.unwrap_batched(v)
        if unwrapped is None or not unwrapped[1]:
            gradient, also = torch.func.grad(value, has_aux=True)(v)
            return gradient, also
        with functorch_api.outside_vmap():
            leaf = unwrapped[0].detach().requires_grad_()
        with torch.enable_grad():
            loss, also = value(functorch_api.wrap_batched(leaf))
        summed = functorch_api.unwrap_batched(loss)
        if summed is None:
            raise GroupingError("a loss of another mapping")
        with functorch_api.outside_vmap():
            slope = (
                torch.autograd.grad(summed[0].sum(), leaf, allow_unused=True)[0] if summed[0].requires_grad else None
            )
            slope = torch.zeros_like(leaf) if slope is None else slope
        return functorch_api.wrap_batched(slope), also

    def check(self) -> None:
        """Compare with the model itself on two small batches.

        Raises:
            UnsupportedLayerError: The outputs differ, or the model cannot be run.
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
                    outputs = MappedPass(spec, twin, False).through(
                        2, PassInputs(vs, b, x, keys), (True, False, True, True)
                    )
                except Exception as error:  # whatever a layer says of what it cannot take
                    raise UnsupportedLayerError("a shape that the stacked layers do not expect") from error
                for k in range(2):
                    wanted = _with_keys(spec, [] if keys is None else list(keys[k]), vs[k], b, x[k], train)
                    for actual, expected in zip(outputs, wanted, strict=False):
                        if actual[k].shape != expected.shape or not torch.allclose(
                            actual[k], expected, rtol=1e-3, atol=1e-4
                        ):
                            raise UnsupportedLayerError("layers that do something else when they are stacked")


def _with_keys(spec: ModelSpec, keys: list[Tensor], v: Tensor, b: Tensor, x: Tensor, train: bool) -> ModelOutput:
    """A pass of the model itself, whose dropout layers take these keys."""
    layers = [m for m in spec.module.modules() if isinstance(m, KeyedDropout)]
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


def grouped_unchecked(spec: ModelSpec) -> GroupedModel | None:
    """The stacked form of a model without the comparison, or None if it has none: good enough to be timed."""
    try:
        return GroupedModel(spec)
    except UnsupportedLayerError:
        return None


def grouped_form_or_reason(spec: ModelSpec) -> tuple[GroupedModel | None, str]:
    """The stacked form of a model, or None and what it has that has no such form.

    >>> grouped_form_or_reason(ModelSpec(nn.Sequential(nn.Linear(3, 4), nn.PReLU(), nn.Linear(4, 2)), (3,), 2))
    (None, 'PReLU')
    """
    try:
        form = GroupedModel(spec)
        form.check()
    except UnsupportedLayerError as unknown:
        return None, str(unknown)
    return form, ""


def grouped_form(spec: ModelSpec) -> GroupedModel | None:
    """The stacked form of a model, or None if it has none."""
    return grouped_form_or_reason(spec)[0]


@contextmanager
def use_grouped(spec: ModelSpec, form: GroupedModel | None) -> Iterator[None]:
    """Context manager in which mapped passes of ``spec`` run as one grouped network; no effect if ``form`` is None.

    Args:
        spec: Layout of the model whose passes are grouped.
        form: Grouped form of the model, or None.
    """
    spec.grouped_model = form
    try:
        yield
    finally:
        spec.grouped_model = None
        if spec.stream is not None:  # a key of a mapping that failed must not outlive it
            spec.stream.start(None)
