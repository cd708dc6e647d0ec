"""CUDA devices: settings that make runs reproducible, and memory.

Nothing here affects a CPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.utils.deterministic

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextlib.contextmanager
def device_modes(device: torch.device, precision: str) -> Iterator[None]:
    """Context manager in which a CUDA device computes reproducibly and in a given precision.

    TensorFloat-32 rounds the inputs of float32 products to 10 bits, and PyTorch uses it for convolutions by default.
    Benchmarking of algorithms and nondeterministic kernels would give a resumed run other bits. Operators without a
    deterministic kernel warn.

    Args:
        device: Device of the run.
        precision: Value of ``precision``; only ``tf32`` allows TensorFloat-32.

    Yields:
        None.
    """
    if device.type != "cuda":
        yield
        return
    cuda, cudnn, fast = torch.backends.cuda.matmul, torch.backends.cudnn, precision == "tf32"
    values: list[tuple[Any, str, bool]] = [
        (cuda, "allow_tf32", fast),
        (cudnn, "allow_tf32", fast),
        (cudnn, "benchmark", False),
        (cudnn, "deterministic", True),
        (torch.utils.deterministic, "fill_uninitialized_memory", False),  # takes a kernel per empty tensor
    ]
    # PyTorch 2.9 and later also have one setting per operator, which the older ones overwrite.
    newer = [part for part in (cuda, *(getattr(cudnn, name, None) for name in ("conv", "rnn"))) if part is not None]
    settings = [(owner, name) for owner, name, _ in values] + [(part, "fp32_precision") for part in newer]
    before = [(owner, name, value) for owner, name in settings if (value := _read(owner, name)) is not None]
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    workspace = os.environ.get(_WORKSPACE)
    try:
        os.environ.setdefault(_WORKSPACE, ":4096:8")
        for owner, name, value in values:
            setattr(owner, name, value)
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        for owner, name, value in before:
            setattr(owner, name, value)
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)


def _read(owner: Any, name: str) -> Any:
    """Return a setting; None if it does not exist, or if the caller has replaced it by the newer ones."""
    try:
        return getattr(owner, name, None)
    except RuntimeError:
        return None


class DeviceMemory(Protocol):
    """Memory of a device, as far as it determines how many clients are trained at once."""

    def start(self) -> None:
        """Start to measure the peak."""

    def peak(self) -> int:
        """Return the largest number of bytes that were allocated since ``start``, beyond those allocated then."""

    def free(self) -> int:
        """Return the number of bytes that can still be allocated."""

    def release(self) -> None:
        """Return unused memory to the device after an allocation failed."""


class CudaMemory:
    """Memory of a CUDA device.

    Args:
        device: CUDA device.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.before = 0

    def start(self) -> None:
        """Start to measure the peak."""
        torch.cuda.reset_peak_memory_stats(self.device)
        self.before = torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        """Return the largest number of bytes that were allocated since ``start``, beyond those allocated then."""
        return torch.cuda.max_memory_allocated(self.device) - self.before

    def free(self) -> int:
        """Return the number of bytes that can still be allocated, including those that PyTorch keeps for reuse."""
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + kept

    def release(self) -> None:
        """Return unused memory to the device after an allocation failed."""
        torch.cuda.empty_cache()
