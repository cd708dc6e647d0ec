"""Two ways to run a model during local training; rules call both as ``model(v, x) -> ModelOutput``.

``BoundModel`` is for one client: the module's parameters are views of one flat leaf, so a whole model is loaded and updated
by single operations. ``FunctionalModel`` is a pure function, for many clients at once under ``torch.func.vmap``. Both compute
the same results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from unskew.errors import ConfigError, short_repr
from unskew.models.keyed_dropout import KeyedDropout, KeyStream
from unskew.models.spec import ModelOutput, ModelSpec
from unskew.seeding import seeded_globals


class Batch(NamedTuple):
    """Mini-batch of a local step.

    Attributes:
        x: Normalized inputs, ``[B, ...]``.
        y: Targets, ``[B, ...]``.
        key: Random key of the step.
        step: Index of the local step.
        track: Whether a pass updates the normalization buffers.
        lr: Learning rate of the local step.
        weight: Weight of each sample, ``[B]``: 1, or 0 for rows that only fill up a Poisson batch; None if all count.
        trainable: Mask of the parameters that no rule freezes in this step, boolean ``[d]``; None if none is frozen.
    """

    x: Tensor
    y: Tensor
    key: Tensor
    step: Tensor
    track: bool = True
    lr: float = math.nan
    weight: Tensor | None = None
    trainable: Tensor | None = None

    def untracked(self) -> Batch:
        """Return the same batch with ``track=False``, so that its pass does not update normalization buffers."""
        return self._replace(track=False)


LossFn = Callable[[Tensor, Batch], Tensor]
GradFn = Callable[[Tensor, Batch], Tensor]


class Model(Protocol):
    """Model during local training, with its buffers ``b`` as state and the last ``loss``."""

    b: Tensor
    loss: Tensor

    def __call__(self, v: Tensor, x: Tensor, track: bool = True) -> ModelOutput:
        """Compute training-mode outputs at ``v``; ``track=False`` does not update the normalization buffers."""

    def gradient(self, loss_fn: LossFn) -> GradFn:
        """Return the function ``(v, batch) -> gradient [d]`` of a loss; it stores the loss in ``self.loss``."""


class _LastOutput:
    """Cache of the last output, so that rules that need the same pass share it and its graph."""

    def __init__(self) -> None:
        self.key: tuple[Tensor, Tensor, bool] | None = None
        self.output: ModelOutput | None = None

    def get(self, v: Tensor, x: Tensor, track: bool) -> ModelOutput | None:
        key = self.key
        return self.output if key and key[0] is v and key[1] is x and key[2] is track else None

    def put(self, v: Tensor, x: Tensor, track: bool, output: ModelOutput) -> ModelOutput:
        self.key, self.output = (v, x, track), output
        return output

    def clear(self) -> None:
        self.key = self.output = None


def check_scalar_loss(loss: Tensor) -> Tensor:
    """Validate that the loss of a batch is a tensor with one element (raises ``ConfigError``), and return it."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"one of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else short_repr(loss)
        raise ConfigError(f"The loss of a batch must be a tensor with one number, not {what}.")
    return loss


class BoundModel:
    """Model whose parameters and buffers are views of two flat tensors."""

    def __init__(self, spec: ModelSpec, device: torch.device | str = "cpu"):
        self.spec = spec
        self.device = torch.device(device)
        self.module = spec.copied().to(self.device).train()
        if getattr(self.module, "checkpoints", False):
            # Only here: a pure function has no parameters left when a block is computed again.
            self.module.enable_checkpointing()  # type: ignore[operator]
        self.stream: KeyStream | None = next(
            (m.stream for m in self.module.modules() if isinstance(m, KeyedDropout)), None
        )
        self.leaf = spec.flatten().to(self.device).requires_grad_()
        self.b = spec.flatten_buffers().to(self.device)
        self.loss = torch.zeros((), device=self.device)
        named = dict(self.module.named_parameters())
        self.parameters = [named[name] for name in spec.names]
        for parameter, view in zip(self.parameters, spec.parameters(self.leaf.detach()).values(), strict=True):
            parameter.data = view
        views = spec.buffers(self.b)
        tied = {name: views[first] for name, first in spec.tied.items() if first in views}
        for name, view in (*views.items(), *tied.items()):
            owner, _, attribute = name.rpartition(".")
            self.module.get_submodule(owner)._buffers[attribute] = view
        self._counters = [
            (n, b, spec.counters[n].clone()) for n, b in self.module.named_buffers() if n in spec.counters
        ]
        self._features = torch.empty(0)
        self.module.get_submodule(spec.head_name).register_forward_pre_hook(self._capture)
        self._once = _LastOutput()
        self._precision = spec.precision(self.device)

    def _capture(self, _module: object, args: tuple[Tensor, ...]) -> None:
        self._features = args[0]

    def start(self, b: Tensor, train: bool = True) -> None:
        """Start the training of a client: set the buffers and reset step counters.

        Args:
            b: Initial buffers, ``[m]``; they are copied.
            train: Training mode; otherwise eval mode, in which buffers do not change.
        """
        self._switch(train)
        self.b.copy_(b)
        for _, counter, initial in self._counters:
            counter.copy_(initial)

    def mutable_state(self) -> dict[str, Tensor]:
        """Return the buffers ``[m]`` and the step counters, not copied."""
        return {"b": self.b, **{f"counter-{n}": counter for n, (_, counter, _) in enumerate(self._counters)}}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore the result of ``mutable_state``."""
        for name, tensor in self.mutable_state().items():
            tensor.copy_(state[name])

    def _switch(self, train: bool) -> None:
        """Set training or eval mode if it changes; iterating over all layers costs as much as a small forward pass."""
        if self.module.training is not train:
            self.module.train(train)

    def __call__(self, v: Tensor, x: Tensor, track: bool = True) -> ModelOutput:
        """Compute training-mode outputs at ``v``; parameters are copied unless ``v`` is ``self.leaf``."""
        shared = self._once.get(v, x, track)
        if shared is not None:
            return shared
        if v is not self.leaf:
            return self._once.put(v, x, track, self._at(v, x, track))
        before = None if track else (self.b.clone(), self._counts())
        with self._precision:
            output = ModelOutput(self.module(x).to(v.dtype), self._features)
        if before is not None:
            # Use .data: a versioned write would make autograd raise an error for buffers that it saved but does not use.
            self.b.data.copy_(before[0])
            self._set_counts(before[1])
        return self._once.put(v, x, track, output)

    def _at(self, v: Tensor, x: Tensor, track: bool) -> ModelOutput:
        """Compute training-mode outputs at another vector, with the dropout keys and buffers of this model."""
        buffers = {name: view.clone() for name, view in self.spec.buffers(self.b).items()}
        counts = self._counts()
        other = self.spec.stream
        if other is not None and self.stream is not None:
            other.key, other.calls = self.stream.key, self.stream.calls
        output = self.spec.forward(v, {**buffers, **counts}, x, train=True)
        if other is not None and self.stream is not None:
            self.stream.calls = other.calls
            other.start(None)
        if track and buffers:
            self.b.data.copy_(torch.cat([view.reshape(-1) for view in buffers.values()]))
        if track:
            self._set_counts(counts)
        return output

    def _counts(self) -> dict[str, Tensor]:
        """Return copies of the counters that outputs may depend on."""
        return {name: counter.clone() for name, counter, _ in self._counters} if self.spec.counts else {}

    def _set_counts(self, counts: dict[str, Tensor]) -> None:
        """Set the counters to the result of ``_counts``."""
        if counts:
            for name, counter, _ in self._counters:
                counter.copy_(counts[name])

    def predict(self, v: Tensor, b: Tensor) -> Callable[[Tensor], ModelOutput]:
        """Return the model in eval mode at ``v`` and ``b`` as a function of inputs, without gradients.

        Args:
            v: Parameters of the model, ``[d]``.
            b: Buffers of the model, ``[m]``.
        """
        self.leaf.data.copy_(v)
        self.b.copy_(b)
        self._switch(False)

        def run(x: Tensor) -> ModelOutput:
            # A model may draw numbers in eval mode, too; equal seeds give equal metrics.
            with torch.no_grad(), self._precision, seeded_globals(self.spec.draws_globally, 0, self.device):
                logits = self.module(x)
            return ModelOutput(logits.to(v.dtype), self._features)

        return run

    def gradient(self, loss_fn: LossFn) -> GradFn:
        """Return the gradient function; see ``Model``."""

        def grad_fn(v: Tensor, batch: Batch) -> Tensor:
            self._once.clear()
            if self.stream is not None:
                self.stream.start(batch.key)
            self.leaf.data.copy_(v)
            loss = check_scalar_loss(loss_fn(self.leaf, batch))
            self.loss = loss.detach()
            # Concatenating gradients costs a tenth of accumulating them into views of one flat tensor.
            inputs = [self.leaf, *self.parameters]
            direct, *gradients = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=False)
            joined = torch.cat(
                [
                    g.reshape(-1) if g is not None else torch.zeros_like(p).view(-1)
                    for g, p in zip(gradients, self.parameters, strict=True)
                ]
            )
            # `direct` is the gradient of terms that depend on the vector directly and not through the model.
            return joined if direct is None else joined.add_(direct)

        return grad_fn


class FunctionalModel:
    """Model as a pure function; ``b`` is replaced and never written in place, so a step can be mapped over clients."""

    def __init__(self, spec: ModelSpec, b: Tensor):
        self.spec, self.b = spec, b
        self.loss = torch.zeros(())
        self._once = _LastOutput()

    def __call__(self, v: Tensor, x: Tensor, track: bool = True) -> ModelOutput:
        """Compute training-mode outputs at ``v``."""
        shared = self._once.get(v, x, track)
        if shared is not None:
            return shared
        if self.spec.grouped_model is not None:
            known = self.spec.grouped_model.forward(v, self.b, x, train=True)
            if known is not None:
                if track and len(self.spec.buffer_names):
                    self.b = known[1]
                return self._once.put(v, x, track, known[0])
        # Separate memory for each buffer: vmap reshapes buffers before updates, which copies slices of a longer vector.
        buffers = {n: t.clone() for n, t in self.spec.buffers(self.b).items()}
        output = self.spec.forward(v, buffers, x, train=True)
        if track and buffers:
            self.b = torch.cat([t.reshape(-1) for t in buffers.values()])
        return self._once.put(v, x, track, output)

    def gradient(self, loss_fn: LossFn) -> GradFn:
        """Return the gradient function; see ``Model``."""

        def grad_fn(v: Tensor, batch: Batch) -> Tensor:
            self._once.clear()
            if self.spec.stream is not None:
                self.spec.stream.start(batch.key)
            before = self.b

            def value(v: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
                self.b = before
                loss = check_scalar_loss(loss_fn(v, batch))
                return loss, (loss.detach(), self.b)

            form = self.spec.grouped_model
            gradient, (self.loss, self.b) = (
                torch.func.grad(value, has_aux=True)(v) if form is None else form.gradient(value, v)
            )
            self._once.clear()  # tensors of a finished transform must not outlive it
            if self.spec.stream is not None:
                self.spec.stream.start(None)
            return gradient

        return grad_fn
