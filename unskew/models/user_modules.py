"""Modules of users: copies of them, errors of their code, and what they draw and count in training."""

from __future__ import annotations

import copy
import pickle
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from unskew.errors import ConfigError
from unskew.seeding import seeded_globals

LIBRARIES = (Path(__file__).parents[1], Path(traceback.__file__).parent)
"""Folders whose code a user did not write, in addition to installed packages."""


def copy_module(module: nn.Module, shared: dict[int, Any] | None = None) -> nn.Module:
    """Copy a module, including tensors that a forward pass has stored in it, which ``copy.deepcopy`` rejects.

    Args:
        module: The module; of one compiled by ``torch.compile``, the module that was compiled is copied.
        shared: Objects that the copy shares with the module, by their id.

    Raises:
        ConfigError: If the module cannot be copied.
    """
    module = getattr(module, "_orig_mod", module)
    copies = dict(shared or {})
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ConfigError(
                "Modules of torch.jit.script and torch.jit.trace cannot be trained by unskew. Pass the nn.Module from which "
                "the model was made."
            )
        for leaf in pytree.tree_leaves(vars(part)):
            if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) and id(leaf) not in copies:
                copies[id(leaf)] = _copied_tensor(leaf)
    try:
        return copy.deepcopy(module, copies)
    except Exception as error:  # a class of a user may fail in any way
        raise ConfigError(
            f"The model cannot be copied, but each client trains a copy of it: {describe_error(error)}. Create such objects "
            "in the forward pass, or exclude it from copies with __deepcopy__."
        ) from error


def _copied_tensor(tensor: Tensor) -> Tensor:
    """Copy a tensor without its graph; one of a finished function transform has no values that could be copied."""
    try:
        return copy.deepcopy(tensor) if tensor.is_leaf else tensor.detach().clone()
    except (RuntimeError, NotImplementedError):
        return torch.empty(0)


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return the names of parameters and buffers that are those of another layer, too, with their names there.

    A layer that has two names is listed once, with its first name.

    Args:
        module: The module.
    """
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for prefix, layer in module.named_modules():
        for key, tensor in (*layer._parameters.items(), *layer._buffers.items()):
            name = f"{prefix}.{key}" if prefix else key
            if tensor is not None and first.setdefault(id(tensor), name) != name:
                tied[name] = first[id(tensor)]
    return tied


def call_with_tensors(module: nn.Module, tensors: dict[str, Tensor], tied: dict[str, str], x: Tensor) -> Any:
    """Run a module with other parameters and buffers; buffers in ``tensors`` are updated.

    PyTorch ties tensors by all names of their layers, and then does not restore those of a layer with two names.

    Args:
        module: The module.
        tensors: Parameters and buffers by name; the others are those of the module.
        tied: Result of ``tied_names``.
        x: Inputs.
    """
    if not tied:
        return functional_call(module, tensors, (x,), tie_weights=False)
    given = {**tensors, **{name: tensors[first] for name, first in tied.items() if first in tensors}}
    output = functional_call(module, given, (x,), tie_weights=False)
    tensors.update((name, given[name]) for name in tensors)
    return output


def describe_error(error: BaseException) -> str:
    """Return the first line of an error without its final period, and the user's line of code that raised it.

    >>> describe_error(RuntimeError("shapes differ. "))
    'shapes differ'
    >>> describe_error(KeyError("q"))
    "KeyError: 'q'"
    """
    text = str(error).strip().partition("\n")[0].rstrip(". ")
    if not isinstance(error, RuntimeError | ValueError | TypeError | IndexError) or not text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    paths = [(Path(frame.filename), frame.lineno) for frame in frames if "site-packages" not in frame.filename]
    own = [(path, line) for path, line in paths if not any(path.is_relative_to(folder) for folder in LIBRARIES)]
    return f"{text} ({own[-1][0].name}, line {own[-1][1]})" if own else text


@dataclass(frozen=True)
class TrainingPass:
    """Side effects of a pass of a module in training mode.

    Attributes:
        draws_globally: Whether it draws from the global generators of PyTorch, NumPy or Python.
        unseeded_layer: First layer whose outputs differ although these generators were seeded equally, or None.
        counts: Whether it changes an integer buffer that outputs may depend on, such as a number of steps.
    """

    draws_globally: bool
    unseeded_layer: str | None
    counts: bool


def inspect_training(module: nn.Module, x: Tensor) -> TrainingPass:
    """Run a module twice in training mode with equal seeds, to find the random numbers that it draws and what it counts.

    Args:
        module: The module, which is not changed.
        x: Model inputs of at least two samples.

    Raises:
        ConfigError: If the module raises an error in training mode, or changes buffers that are not part of the model.
    """
    module = copy_module(module).train()
    passes: list[list[tuple[str, list[Tensor]]]] = []

    def listen(label: str, output: object) -> None:
        passes[-1].append((label, [t.clone() for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]))

    for name, layer in module.named_modules():
        if name and not list(layer.children()):
            label = f"the layer {name} ({type(layer).__name__})"
            layer.register_forward_hook(lambda _m, _i, output, label=label: listen(label, output))
    draws = counts = False
    unused, tied = _unused_counters(module), tied_names(module)
    for _ in range(2):
        passes.append([])
        clones = {name: b.clone() for name, b in module.named_buffers()}
        tensors = dict(clones)
        with torch.no_grad(), seeded_globals(True, 0, x.device):
            before = _global_states()
            try:
                listen("the output", call_with_tensors(module, tensors, tied, x))
            except Exception as error:
                raise ConfigError(f"The model raises an error in training mode: {describe_error(error)}.") from error
            draws = draws or _global_states() != before
        counts = counts or any(
            not b.is_floating_point() and name not in unused and not _equal_tensors(tensors[name], b)
            for name, b in module.named_buffers()
        )
    _check_changed_buffers(
        module, clones, tensors, lambda: call_with_tensors(module, tensors, tied, x[:1].expand_as(x).clone())
    )
    for (label, first), (_, second) in zip(*passes, strict=False):
        if any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=False)):
            return TrainingPass(draws, label, counts)
    return TrainingPass(draws, None, counts)


def _equal_tensors(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same data type, shape and values."""
    return a.dtype == b.dtype and torch.equal(a, b)


def _check_changed_buffers(
    module: nn.Module, clones: dict[str, Tensor], tensors: dict[str, Tensor], run_again: Callable[[], object]
) -> None:
    """Validate that a pass in training mode changes only stored buffers, and these in place.

    Args:
        module: The module, with its buffers before the pass.
        clones: Copies of the buffers, with which the pass began.
        tensors: Buffers after the pass.
        run_again: Runs a pass with other inputs, which begins with ``tensors`` and updates them. Buffers that it does not
            change are caches.

    Raises:
        ConfigError: If another buffer changes, or one is replaced.
    """
    stored = module.state_dict().keys()
    changed = [name for name, b in module.named_buffers() if not _equal_tensors(tensors[name], b)]
    replaced = next((name for name in changed if name in stored and tensors[name] is not clones[name]), None)
    if replaced is not None:
        raise ConfigError(
            f"The model assigns a new tensor to the buffer {replaced} in training, so that the buffer of the client does not "
            f"change. Change it in place, as in self.{replaced.rpartition('.')[2]}.copy_(...)."
        )
    others = {name: tensors[name].clone() for name in changed if name not in stored}
    if others:
        with torch.no_grad(), seeded_globals(True, 0, torch.device("cpu")):
            run_again()
        lost = next((name for name, tensor in others.items() if not _equal_tensors(tensors[name], tensor)), None)
        if lost is not None:
            raise ConfigError(
                f"Training changes the buffer {lost}, which is registered with persistent=False, so that it is not part of "
                "the client's model. Register it with persistent=True."
            )


def _unused_counters(module: nn.Module) -> set[str]:
    """Return the names of the counters of BatchNorm layers that have a momentum, and therefore do not use them."""
    return {
        f"{name}.num_batches_tracked" if name else "num_batches_tracked"
        for name, layer in module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.momentum is not None
    }


def _global_states() -> bytes:
    """Return the states of all generators that ``seeded_globals`` seeds on a CPU."""
    state = torch.default_generator.get_state().numpy().tobytes()
    return state + pickle.dumps((random.getstate(), np.random.get_state()))  # noqa: NPY002


def check_no_complex_numbers(module: nn.Module) -> None:
    """Validate that no parameter or buffer is complex, whose imaginary part a conversion to real numbers would discard.

    Args:
        module: The module.

    Raises:
        ConfigError: If one is complex.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_complex():
            raise ConfigError(
                f"{name} of the model has complex numbers, but the vector of a model has real ones. Store real and imaginary "
                "parts, as torch.view_as_real returns them, and use torch.view_as_complex in the forward pass."
            )


def convert_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert parameters and buffers in place; frozen parameters keep their data type if the module says so.

    Args:
        module: Module; ``keeps_frozen_dtype`` is true if its frozen weights have their own data type.
        dtype: Data type of the others.
    """
    if not getattr(module, "keeps_frozen_dtype", False):
        module.to(dtype)
        return
    trained = [p for p in module.parameters() if p.requires_grad]
    for tensor in (*trained, *module.buffers()):
        tensor.data = tensor.data.to(dtype) if tensor.is_floating_point() else tensor.data
