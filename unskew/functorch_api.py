"""Access to PyTorch's private ``torch.func.vmap`` interface; no other module of unskew uses it.

If PyTorch lacks one of these functions, clients are trained one at a time, with the same results.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

_functorch: Any = None
_interpreter: Any = None
try:
    from torch._C import _functorch
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter as _interpreter
except ImportError:
    pass
_NAMES = (
    "_add_batch_dim",
    "current_level",
    "get_unwrapped",
    "is_batchedtensor",
    "is_functorch_wrapped_tensor",
    "maybe_get_bdim",
    "maybe_get_level",
)


def missing_functions() -> str:
    """Return the reason why this version of PyTorch cannot train clients as one network; empty if it can."""
    missing = [name for name in _NAMES if not hasattr(_functorch, name)]
    if _interpreter is None:
        missing.append("retrieve_current_functorch_interpreter")
    return f"PyTorch {torch.__version__} without {', '.join(missing)}" if missing else ""


def is_mapped(*tensors: object) -> bool:
    """Return whether any tensor is under a transform such as the mapping over clients; False if that is not known."""
    wrapped = getattr(_functorch, "is_functorch_wrapped_tensor", None)
    return wrapped is not None and any(isinstance(t, Tensor) and wrapped(t) for t in tensors)


def outside_vmap() -> AbstractContextManager[None]:
    """Return a context manager outside of the innermost transform."""
    context: AbstractContextManager[None] = _interpreter().lower()
    return context


def unwrap_batched(t: Tensor) -> tuple[Tensor, bool] | None:
    """Remove the client axis of a tensor.

    Args:
        t: Tensor, which may be mapped over clients.

    Returns:
        The tensor without the wrapper, and whether it has a client axis, which is then the first axis. None if another
        transform is in between.
    """
    if not is_mapped(t):
        return t, False
    if not _functorch.is_batchedtensor(t) or _functorch.maybe_get_level(t) != _functorch.current_level():
        return None
    inner: Tensor = _functorch.get_unwrapped(t)
    if is_mapped(inner):
        return None
    return inner.movedim(_functorch.maybe_get_bdim(t), 0), True


def wrap_batched(t: Tensor) -> Tensor:
    """Make the first axis of a tensor its client axis, the inverse of ``unwrap_batched``."""
    wrapped: Tensor = _functorch._add_batch_dim(t, 0, _functorch.current_level())
    return wrapped


def constant(values: tuple[float, ...], like: Tensor) -> Tensor:
    """Return numbers as a tensor that is created once and must not be modified; its creation waits for a GPU.

    Args:
        values: The numbers.
        like: Tensor with the data type and device of the result.
    """
    return _constant(values, like.dtype, like.device)


@cache
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    outside = getattr(torch._C, "_DisableFuncTorch", nullcontext)  # a tensor of a transform would not outlive it
    with outside(), torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)
