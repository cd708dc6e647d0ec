"""Layout of a model as vectors: trainable parameters as a flat tensor ``v [d]``, buffers as another one, ``b [m]``.

``ModelSpec`` maps named parameters, body and head to slices of ``v``, and runs the model for any ``v``. So a model can be
evaluated at a sum of parameter vectors, or mapped over clients.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from unskew.data.packing import SEPARATOR
from unskew.errors import ConfigError
from unskew.models.body_head import find_head, last_layer, split_parts
from unskew.models.keyed_dropout import restore_dropout, use_keyed_dropout
from unskew.models.user_modules import (
    call_with_tensors,
    check_no_complex_numbers,
    convert_dtype,
    copy_module,
    describe_error,
    inspect_training,
    tied_names,
)

T = TypeVar("T")


class GroupedForm(Protocol):
    """Form in which a model runs several clients at once (``unskew.models.grouped``)."""

    def forward(self, v: Tensor, b: Tensor, x: Tensor, train: bool) -> tuple[ModelOutput, Tensor] | None:
        """Run a mapped pass; None if the model itself must run it.

        Args:
            v: Parameters under the mapping over clients, ``[d]``.
            b: Buffers, ``[m]``.
            x: Inputs, ``[B, ...]``.
            train: Whether the model is in training mode.
        """

    def gradient(self, value: Callable[[Tensor], tuple[Tensor, T]], v: Tensor) -> tuple[Tensor, T]:
        """Return the gradient of the first output of ``value`` at ``v``, and the second output.

        Args:
            value: Function of the parameters that returns a loss and further results.
            v: Parameters under the mapping over clients, ``[d]``.
        """


class ModelOutput(NamedTuple):
    """Logits ``[B, C]`` and penultimate features ``[B, f]`` (the input of the head)."""

    logits: Tensor
    features: Tensor


def _in_float32(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Convert activations to float32, for accurate statistics and because vmap does not support mixed normalization."""
    return (args[0].float(), *args[1:])


def in_row_order(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Copy inputs, because normalized ones have their channels last in memory, even if ``contiguous`` sees no difference.

    Args:
        _module: The model.
        args: Its arguments, with the inputs first.
    """
    return (args[0].clone(memory_format=torch.contiguous_format), *args[1:])


class ModelSpec:
    """Layout of a model as a vector.

    The model is a copy of ``module``, whose current weights are the initial model.

    Args:
        module: Module that maps ``[B, *shape]`` to logits ``[B, classes]``. Parameters with ``requires_grad=False`` are
            constants: they are not part of the vector, and all copies of the model share them.
        shape: Shape of one input, channels first.
        classes: Required number of logits.
        head: Name of the head module; by default the last linear layer that a forward pass uses, or of pixels, the last
            1x1 convolution.
        dtype: Data type of the vector.
        input_dtype: Data type of inputs (token ids are int64); by default ``dtype``.
        autocast: Run forward passes in bfloat16, with weights and normalization in ``dtype``.
        per_token: Logits are ``[B, L, V]`` for inputs ``[B, L]``, with ``V`` at least ``classes``: a language model.
        per_pixel: Logits are ``[B, C, *sides]`` for inputs ``[B, channels, *sides]``.

    Raises:
        ConfigError: If the model does not accept inputs of this shape, its output or head do not fit, or it has complex
            parameters or buffers.

    Attributes:
        names: Names of the trainable parameters, in the order of the vector.
        shapes: Shapes of the trainable parameters.
        sizes: Numbers of elements of the trainable parameters.
        size: Number ``d`` of trainable parameters.
        tied: Names of parameters and buffers that are those of another layer, too, with their names there.
        buffer_names: Names of the floating-point buffers (BatchNorm statistics), in the order of the vector ``[m]``.
        buffer_shapes: Shapes of these buffers.
        buffer_sizes: Numbers of elements of these buffers.
        parts: Slices of the vector, ``{"body": slices, "head": slices}``.
        layers: Names of the layers with trainable parameters, in order of first use in a forward pass.
        used: Names of all modules in order of first use.
        shape: Shape of one input.
        classes: Number of classes.
        head_trains: Whether the head has its own trainable parameters. If they are frozen, or tied to the embeddings of a
            language model, the part ``head`` is the last layer (or block) with trainable parameters.
        blocks: Name of the list of a transformer's blocks, each of which is one layer; None for other models.
        intensities: Whether inputs must be pixel intensities from 0 to 1, which the model normalizes itself.
        outputs: Number of values that each layer without parts outputs for one sample, by name.
        widest: Largest number of values that a layer outputs for one sample.
        grouped_model: Grouped form that runs passes mapped over clients, or None.
        draws_globally: Whether a pass in training mode draws from global generators, so that clients are trained one at a
            time, each with seeds of its own.
        unseeded_layer: Layer whose random numbers no seed determines, or None.
        counts: Whether a pass in training mode changes an integer buffer that outputs may depend on, so that clients are
            trained one at a time.
        others: Further architectures, if clients have models of different ones.
    """

    names: list[str]
    shapes: list[tuple[int, ...]]
    sizes: list[int]
    size: int
    tied: dict[str, str]
    buffer_names: list[str]
    buffer_shapes: list[tuple[int, ...]]
    buffer_sizes: list[int]
    parts: dict[str, list[slice]]
    layers: list[str]
    used: list[str]
    shape: tuple[int, ...]
    classes: int
    head_trains: bool
    blocks: str | None
    intensities: bool
    outputs: dict[str, int]
    widest: int
    grouped_model: GroupedForm | None
    draws_globally: bool
    unseeded_layer: str | None
    counts: bool
    others: tuple[ModelSpec, ...] = ()

    def __init__(
        self,
        module: nn.Module,
        shape: Sequence[int],
        classes: int,
        head: str | None = None,
        dtype: torch.dtype = torch.float32,
        input_dtype: torch.dtype | None = None,
        autocast: bool = False,
        per_token: bool = False,
        per_pixel: bool = False,
    ):
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
            raise ConfigError("The model has uninitialized lazy layers. Run it once on an example before passing it.")
        self.module = copy_module(module)
        check_no_complex_numbers(self.module)
        convert_dtype(self.module, dtype)
        self.stream = use_keyed_dropout(self.module)
        self.shape = tuple(shape)
        self.classes = classes
        self.dtype = dtype
        self.input_dtype = input_dtype or dtype
        self.integers = input_dtype == torch.int64
        self.autocast, self.per_token, self.per_pixel = autocast, per_token, per_pixel
        self.blocks = getattr(module, "blocks", None)
        self.grouped_model = None
        self.draws_globally, self.unseeded_layer, self.counts = False, None, False
        self.intensities = bool(getattr(module, "intensities", False))
        if autocast:
            for module in self.module.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.register_forward_pre_hook(_in_float32)
        trainable = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        if not trainable:
            raise ConfigError("The model has no trainable parameters.")
        self.tied = tied_names(self.module)
        self.names = list(trainable)
        self.shapes = [tuple(p.shape) for p in trainable.values()]
        self.sizes = [p.numel() for p in trainable.values()]
        self.size = sum(self.sizes)
        state = self.module.state_dict()
        floats = {n: b for n, b in self.module.named_buffers() if n in state and b.is_floating_point()}
        self.buffer_names = list(floats)
        self.buffer_shapes = [tuple(b.shape) for b in floats.values()]
        self.buffer_sizes = [b.numel() for b in floats.values()]
        self.counters = {n: b for n, b in self.module.named_buffers() if n in state and not b.is_floating_point()}
        self.outputs, self.widest = {}, 1
        self.layers, self.used = self._trace()
        if not self._accepts_channels_last():
            self.module.register_forward_pre_hook(in_row_order)
        self.head_name = find_head(self.module, head, self.used, per_pixel)
        self.head_trains = any(name.startswith(self._prefix) for name in self.names)
        if not self.head_trains and head is not None:
            raise ConfigError(f"The head {head!r} has no trainable parameters.")
        beginnings = (self._prefix,) if self.head_trains else last_layer(self.layers, self.blocks)
        self.parts = split_parts(self.names, self.sizes, beginnings)

    def inspect_training(self, x: Tensor) -> None:
        """Find what a pass in training mode draws and counts, and store it.

        Args:
            x: Model inputs of at least two samples.

        Raises:
            ConfigError: If the model raises an error in training mode.
        """
        with self.precision(x.device):
            found = inspect_training(self.module, x)
        self.draws_globally, self.unseeded_layer, self.counts = found.draws_globally, found.unseeded_layer, found.counts

    def _trace(self) -> tuple[list[str], list[str]]:
        """Run a forward pass on zeros to validate shapes; returns names of layers and of modules in order of first use."""
        order: list[str] = []

        def seen(name: str, out: object) -> None:
            order.append(name)
            if isinstance(out, Tensor):
                values = out.numel() // 2
                self.outputs[name] = self.outputs.get(name, 0) + values
                self.widest = max(self.widest, values)

        hooks = [
            m.register_forward_hook(lambda _m, _a, out, name=n: seen(name, out))
            for n, m in self.module.named_modules()
            if not list(m.children())
        ]
        training = self.module.training
        try:
            with torch.no_grad():
                out = self.module.eval()(example_inputs(self))
        except Exception as error:  # a model of a user may raise any error
            reason = describe_error(error)
            hint = ""
            if self.integers and getattr(self.module, "tokens", None) is not None:
                tokens = getattr(self.module, "longest_text", None) or self.shape[0]
                hint = (
                    f" The longest text has {tokens} tokens. If the model has fewer positions, set text.block to a "
                    "smaller number."
                )
            elif self.integers:
                hint = (
                    " The inputs are integers, such as the token ids of texts. Use text-mlp or hf:NAME for texts; convert "
                    "features to floats."
                )
            elif "Long" in reason:
                hint = " The model needs token ids of texts. For numbers use table-mlp, mlp or logistic."
            raise ConfigError(f"The model does not accept inputs of shape {self.shape}: {reason}.{hint}") from error
        finally:
            for hook in hooks:
                hook.remove()
            self.module.train(training)
        got = tuple(out.shape) if isinstance(out, Tensor) else ()
        if self.per_token and got[:-1] == (2, *self.shape) and got[-1] < self.classes:
            raise ConfigError(
                f"The model has {got[-1]} tokens, but the tokenizer of the data has {self.classes}. Use the same tokenizer."
            )
        sides = self.shape[1:] if self.per_pixel else ()
        expected = (2, *self.shape, got[-1] if got else "V") if self.per_token else (2, self.classes, *sides)
        if got != expected:
            text = ", ".join(map(str, expected))
            hint = " A segmentation needs a model of pixels, such as unet." if self.per_pixel else ""
            raise ConfigError(
                f"The model returns {got or type(out).__name__} for 2 inputs of shape {self.shape}; expected ({text}) logits."
                f"{hint}"
            )
        used = list(dict.fromkeys(order))
        owners = {name.rpartition(".")[0] for name in self.names}
        return [n for n in used if n in owners], used

    def _accepts_channels_last(self) -> bool:
        """Return whether a forward pass works on inputs with the channels last in memory; ``view`` may reject them."""
        if len(self.shape) < 2 or self.integers:
            return True
        x = torch.zeros(2, *self.shape[1:], self.shape[0], dtype=self.input_dtype).movedim(-1, 1)
        training = self.module.training
        try:
            with torch.no_grad():
                self.module.eval()(x)
        except Exception:  # a model of a user may raise any error; it accepted these values in row order
            return False
        finally:
            self.module.train(training)
        return True

    @property
    def _prefix(self) -> str:
        """Name prefix of the head's parameters."""
        return self.head_name + "." if self.head_name else ""

    @property
    def architectures(self) -> tuple[ModelSpec, ...]:
        """Layouts of all architectures; only this one unless clients have different ones."""
        return (self, *self.others)

    @property
    def largest_size(self) -> int:
        """Number of parameters of the largest architecture."""
        return max(spec.size for spec in self.architectures)

    def of_client(self, client: int) -> ModelSpec:
        """Return the layout of a client's model: client ``k`` has architecture number ``k`` modulo their count."""
        return self.architectures[client % (1 + len(self.others))]

    @cached_property
    def frozen(self) -> str:
        """Hash of the frozen parameters, 16 hexadecimal digits, which a resumed run compares; empty if there are none."""
        named = [pair for spec in self.architectures for pair in spec.module.named_parameters()]
        constants = [(name, p) for name, p in named if not p.requires_grad]
        digest = hashlib.sha256()
        for name, tensor in constants:
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16] if constants else ""

    def copied(self) -> nn.Module:
        """Return a copy of the module for training; frozen parameters are shared, not copied."""
        return copy_module(self.module, {id(p): p for p in self.module.parameters() if not p.requires_grad})

    def to(self, device: torch.device) -> ModelSpec:
        """Move the modules to ``device`` in place; returns ``self``."""
        for spec in self.architectures:
            spec.module.to(device)
            spec.counters = {n: b.to(device) for n, b in spec.counters.items()}
        return self

    def flatten(self, module: nn.Module | None = None) -> Tensor:
        """Return the trainable parameters of ``module`` (default: the initial model) as a vector ``[d]``."""
        named = dict((module or self.module).named_parameters())
        return torch.cat([named[n].detach().reshape(-1).to(self.dtype) for n in self.names])

    def flatten_buffers(self, module: nn.Module | None = None) -> Tensor:
        """Return the floating-point buffers of ``module`` as a vector ``[m]``; empty if it has none."""
        named = dict((module or self.module).named_buffers())
        flat = [named[n].detach().reshape(-1).to(self.dtype) for n in self.buffer_names]
        return torch.cat(flat) if flat else self.flatten()[:0]

    def parameters(self, v: Tensor) -> dict[str, Tensor]:
        """Return named parameters as differentiable views of ``v [d]``."""
        tensors = torch.split(v, self.sizes)
        return {n: p.view(s) for n, p, s in zip(self.names, tensors, self.shapes, strict=True)}

    def buffers(self, b: Tensor) -> dict[str, Tensor]:
        """Return named buffers as views of ``b [m]``."""
        tensors = torch.split(b, self.buffer_sizes) if self.buffer_sizes else ()
        return {n: p.view(s) for n, p, s in zip(self.buffer_names, tensors, self.buffer_shapes, strict=True)}

    def precision(self, device: torch.device) -> AbstractContextManager[None]:
        """Return the autocast context of forward passes."""
        return torch.autocast(device.type, dtype=torch.bfloat16) if self.autocast else nullcontext()

    def forward(self, v: Tensor, b: Tensor | dict[str, Tensor], x: Tensor, train: bool = False) -> ModelOutput:
        """Run the model.

        Args:
            v: Parameters, ``[d]``; differentiable.
            b: Buffers, ``[m]``, which are not changed; or a dictionary of tensors, which a forward pass in training mode
                updates in place. Integer buffers that it lacks are the initial ones.
            x: Inputs, ``[B, ...]``.
            train: Training mode (batch statistics, dropout) or eval mode.
        """
        if self.grouped_model is not None and isinstance(b, Tensor):
            known = self.grouped_model.forward(v, b, x, train)
            if known is not None:
                return known[0]
        self.module.train(train)
        captured: list[Tensor] = []
        hook = self.module.get_submodule(self.head_name).register_forward_pre_hook(
            lambda _m, args: captured.append(args[0])
        )
        buffers = {n: t.clone() for n, t in self.buffers(b).items()} if isinstance(b, Tensor) else b
        tensors = {
            **self.parameters(v),
            **{n: c.clone() for n, c in self.counters.items() if n not in buffers},
            **buffers,
        }
        try:
            with self.precision(x.device):
                logits = call_with_tensors(self.module, tensors, self.tied, x)
        finally:
            hook.remove()
        return ModelOutput(logits.to(v.dtype), captured[-1])

    @cached_property
    def feature_shape(self) -> tuple[int, ...]:
        """Shape of one sample's features, the input of the head."""
        v = self.flatten()
        x = example_inputs(self).to(v.device)
        with torch.no_grad():
            return tuple(self.forward(v, self.flatten_buffers(), x).features.shape[1:])

    @property
    def head_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the head's own trainable parameters, by their names in the head."""
        pairs = zip(self.names, self.shapes, strict=True)
        return {n.removeprefix(self._prefix): s for n, s in pairs if n.startswith(self._prefix)}

    def head_of(self, v: Tensor) -> Tensor:
        """Return the head's slices of ``v [d]`` as one vector."""
        return torch.cat([v[part] for part in self.parts["head"]])

    def head(self, v: Tensor, features: Tensor) -> Tensor:
        """Compute the logits ``[B, C]`` of the head alone, in eval mode.

        Args:
            v: Parameters of the model, ``[d]``, or only of its head, as returned by ``head_of``; differentiable.
            features: Inputs of the head, ``[B, f]``; differentiable.
        """
        own = self.head_shapes
        sizes = [math.prod(shape) for shape in own.values()]
        pieces_of_head = torch.split(v if len(v) == sum(sizes) else self.head_of(v), sizes)
        tensors = {name: p.view(own[name]) for name, p in zip(own, pieces_of_head, strict=True)}
        head = self.module.get_submodule(self.head_name).eval()
        with self.precision(v.device):
            logits: Tensor = call_with_tensors(head, tensors, tied_names(head), features)
        return logits.to(v.dtype)

    def load(self, v: Tensor, b: Tensor) -> nn.Module:
        """Return a standalone copy of the model with parameters ``v`` and buffers ``b``, in eval mode.

        Args:
            v: Parameters of the model, ``[d]``.
            b: Buffers of the model, ``[m]``.
        """
        module = copy_module(self.module)
        restore_dropout(module)
        named = {**self.parameters(v.detach()), **self.buffers(b.detach())}
        module.load_state_dict({n: t.clone() for n, t in named.items()}, strict=False)
        return module.eval()

    def __repr__(self) -> str:
        head = sum(s.stop - s.start for s in self.parts["head"])
        return f"ModelSpec(d={self.size}, body={self.size - head}, head={head}, buffers={sum(self.buffer_sizes)})"


def example_inputs(spec: ModelSpec) -> Tensor:
    """Return inputs of two samples, all zeros; if the model separates packed texts, these are as long as the longest.

    Args:
        spec: Layout of the model.
    """
    x = torch.zeros(2, *spec.shape, dtype=spec.input_dtype)
    longest = getattr(spec.module, "longest_text", None)
    if longest is not None:
        x[:, longest :: longest + 1] = SEPARATOR
    return x


def slices_mask(slices: Sequence[slice], size: int) -> Tensor:
    """Return a boolean mask ``[d]`` that is true on slices of a vector.

    Args:
        slices: Slices on which the mask is true.
        size: Length ``d`` of the mask.
    """
    mask = torch.zeros(size, dtype=torch.bool)
    for span in slices:
        mask[span] = True
    return mask


def mask_slices(mask: Tensor) -> tuple[slice, ...]:
    """Return the slices of a vector on which a mask is true, in ascending order.

    Args:
        mask: Boolean mask, ``[d]``.

    >>> mask_slices(torch.tensor([True, True, False, True]))
    (slice(0, 2, None), slice(3, 4, None))
    """
    end = torch.zeros(1, dtype=torch.int8)
    changes = torch.nonzero(torch.diff(mask.to(torch.int8), prepend=end, append=end))[:, 0].tolist()
    return tuple(slice(start, stop) for start, stop in zip(changes[::2], changes[1::2], strict=True))
