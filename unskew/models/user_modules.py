"""Modules of users: copies of them, errors of their code, and what they draw and count in training."""

from __future__ import annotations

import copy
import pickle
import random
import traceback
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
        ConfigError: If the module raises an error in training mode.
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
    unused = _unused_counters(module)
    for _ in range(2):
        passes.append([])
        tensors = {name: b.clone() for name, b in module.named_buffers()}
        with torch.no_grad(), seeded_globals(True, 0, x.device):
            before = _global_states()
            try:
                listen("the output", functional_call(module, tensors, (x,)))
            except Exception as error:
                raise ConfigError(f"The model raises an error in training mode: {describe_error(error)}.") from error
            draws = draws or _global_states() != before
        counts = counts or any(
            not b.is_floating_point() and name not in unused and not torch.equal(tensors[name], b)
            for name, b in module.named_buffers()
        )
    for (label, first), (_, second) in zip(*passes, strict=False):
        if any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=False)):
            return TrainingPass(draws, label, counts)
    return TrainingPass(draws, None, counts)


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
