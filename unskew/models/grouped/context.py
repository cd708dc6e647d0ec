"""Training of several clients at once on a CPU: within ``use_grouped(spec, form)``, mapped passes run as one network.

The rules of methods remain functions that ``torch.func.vmap`` maps, with any additional loss terms and any number of passes.
For them the network is a single operator (``unskew.models.grouped.vmap_op``). A model with layers that cannot be grouped is
mapped operator by operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from unskew import functorch_api
from unskew.models.grouped import vmap_op
from unskew.models.grouped.network import GroupedNetwork
from unskew.models.grouped.values import UnsupportedLayerError
from unskew.models.grouped.vmap_op import GroupingError, MappedPass, PassInputs
from unskew.models.keyed_dropout import KeyedDropout, KeyStream
from unskew.models.spec import GroupedForm, ModelOutput, ModelSpec

T = TypeVar("T")


class MappedModel(GroupedForm):
    """Model of several clients, each of whose operators ``torch.func.vmap`` maps over them."""

    def forward(self, v: Tensor, b: Tensor, x: Tensor, train: bool) -> tuple[ModelOutput, Tensor] | None:
        """Return None, because the model itself runs the pass."""
        return None

    def gradient(self, value: Callable[[Tensor], tuple[Tensor, T]], v: Tensor) -> tuple[Tensor, T]:
        """Compute the gradient. Clients are independent, so that of the sum of their losses contains the gradient of each."""
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


class GroupedModel(MappedModel):
    """Model of several clients as one network.

    Args:
        spec: Layout of the model of one client.

    Raises:
        UnsupportedLayerError: If the model has a layer that cannot be grouped, or PyTorch lacks a required function.
    """

    def __init__(self, spec: ModelSpec):
        if reason := functorch_api.missing_functions():
            raise UnsupportedLayerError(reason)
        if spec.autocast:
            raise UnsupportedLayerError("precision bf16")
        if spec.draws_globally:
            raise UnsupportedLayerError("random numbers other than those of nn.Dropout")
        if spec.counts:
            raise UnsupportedLayerError("integer buffers that training changes")
        self.spec = spec
        self.twins = {train: GroupedNetwork(spec, train) for train in (True, False)}
        self.norms = [m for m in spec.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def forward(self, v: Tensor, b: Tensor, x: Tensor, train: bool) -> tuple[ModelOutput, Tensor] | None:
        """Compute outputs at ``v`` and the updated buffers; None if no input is mapped or a BatchNorm layer has hooks."""
        if any(norm._forward_pre_hooks for norm in self.norms) or not functorch_api.is_mapped(v, b, x):
            return None
        twin, stream = self.twins[train], self.spec.stream
        drawn = [stream.next() for _ in range(twin.dropouts)] if stream is not None else []
        keys = [key for key in drawn if key is not None]
        passes = MappedPass(self.spec, twin, torch.is_grad_enabled())
        logits, features, after = vmap_op.run_pass(passes, PassInputs(v, b, x, torch.stack(keys) if keys else None))
        return ModelOutput(logits, features), after

    def check(self) -> None:
        """Validate the grouped network against the model on two small batches.

        Raises:
            UnsupportedLayerError: If the outputs differ, or the grouped network cannot be run.
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
                except Exception as error:  # a layer may raise any error for unsupported inputs
                    raise UnsupportedLayerError("a shape that grouped layers do not support") from error
                for k in range(2):
                    wanted = _with_keys(spec, [] if keys is None else list(keys[k]), vs[k], b, x[k], train)
                    for actual, expected in zip(outputs, wanted, strict=False):
                        if actual[k].shape != expected.shape or not torch.allclose(
                            actual[k], expected, rtol=1e-3, atol=1e-4
                        ):
                            raise UnsupportedLayerError("layers with other results when they are grouped")


def _with_keys(spec: ModelSpec, keys: list[Tensor], v: Tensor, b: Tensor, x: Tensor, train: bool) -> ModelOutput:
    """Run the model itself, with given keys for its dropout layers."""
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


def trains_alone(spec: ModelSpec) -> bool:
    """Return whether clients are trained one at a time.

    One client of a pretrained model fills a device. Random numbers that a model draws itself would differ in a mapping, and
    integer buffers are not mapped.
    """
    pretrained = any(type(part).__module__.startswith("transformers.") for part in spec.module.modules())
    return pretrained or spec.draws_globally or spec.counts


def group_form(spec: ModelSpec, check: bool = True) -> MappedModel | None:
    """Return the form in which several clients are trained at once on a CPU; None if they are trained one at a time.

    Args:
        spec: Layout of the model.
        check: Whether to validate a grouped network, which is not needed for timing.
    """
    if trains_alone(spec):
        return None
    form, _ = grouped_form_or_reason(spec, check)
    return form or (None if functorch_api.missing_functions() else MappedModel())


def grouped_form_or_reason(spec: ModelSpec, check: bool = True) -> tuple[GroupedModel | None, str]:
    """Return the grouped form of a model, or None and the part of the model that does not support it.

    Args:
        spec: Layout of the model.
        check: Whether to validate the grouped network.

    >>> grouped_form_or_reason(ModelSpec(nn.Sequential(nn.Linear(3, 4), nn.PReLU(), nn.Linear(4, 2)), (3,), 2))
    (None, 'PReLU')
    """
    try:
        form = GroupedModel(spec)
        if check:
            form.check()
    except UnsupportedLayerError as unknown:
        return None, str(unknown)
    return form, ""


def grouped_form(spec: ModelSpec) -> GroupedModel | None:
    """Return the grouped form of a model, or None if it has none."""
    return grouped_form_or_reason(spec)[0]


@contextmanager
def use_grouped(spec: ModelSpec, form: MappedModel | None) -> Iterator[None]:
    """Context manager in which passes of ``spec`` mapped over clients take a form; no effect if ``form`` is None.

    Args:
        spec: Layout of the model whose passes are grouped.
        form: Form of the passes, or None.
    """
    spec.grouped_model = form
    try:
        yield
    finally:
        spec.grouped_model = None
        if spec.stream is not None:  # remove the key of a failed vmap
            spec.stream.start(None)
