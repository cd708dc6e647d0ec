"""CUDA devices: settings that make runs reproducible, and memory. Nothing here affects a CPU."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextlib.contextmanager
def device_modes(device: torch.device, precision: str) -> Iterator[None]:
    """Context manager in which a CUDA device computes reproducibly and in a given precision.

    TensorFloat-32 rounds the inputs of float32 products to 10 bits, and PyTorch uses it for convolutions by default.
    Nondeterministic kernels would give a resumed run other bits; operators without a deterministic kernel warn.

    Args:
        device: Device of the run.
        precision: Value of ``precision``; only ``tf32`` allows TensorFloat-32.
    """
    if device.type != "cuda":
        yield
        return
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    values: list[tuple[Any, str, bool]] = [
        (cuda, "allow_tf32", precision == "tf32"),
        (cudnn, "allow_tf32", precision == "tf32"),
        (cudnn, "benchmark", False),
        (cudnn, "deterministic", True),
        (torch.utils.deterministic, "fill_uninitialized_memory", False),  # takes a kernel per empty tensor
    ]
    # PyTorch 2.9 and later also have one setting per operator, which the older ones overwrite.
    newer = [(part, "fp32_precision") for part in (cuda, getattr(cudnn, "conv", None), getattr(cudnn, "rnn", None))]
    before = []
    for owner, name in [*((owner, name) for owner, name, _ in values), *newer]:
        # Reading an older setting raises RuntimeError if the caller has used the newer ones.
        with contextlib.suppress(AttributeError, RuntimeError):
            before.append((owner, name, getattr(owner, name)))
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    workspace = os.environ.get(WORKSPACE)
    try:
        os.environ.setdefault(WORKSPACE, ":4096:8")
        for owner, name, value in values:
            setattr(owner, name, value)
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        for owner, name, value in before:
            setattr(owner, name, value)
        if workspace is None:
            os.environ.pop(WORKSPACE, None)


def send(values: Tensor, device: torch.device) -> Tensor:
    """Copy values of the host to a device without waiting for it.

    Args:
        values: Tensor to copy.
        device: Device of the copy.
    """
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def time_mark(device: torch.device) -> float | torch.cuda.Event:
    """Return a mark of the time at which all work queued so far on a device is done, without waiting for it.

    Args:
        device: Device of the work.
    """
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def elapsed(first: float | torch.cuda.Event, last: float | torch.cuda.Event) -> float:
    """Return the seconds between two marks; waits for the last one.

    Args:
        first: Earlier mark.
        last: Later mark.
    """
    if isinstance(first, float) or isinstance(last, float):
        return float(last) - float(first)  # type: ignore[arg-type]
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


class DeviceMemory:
    """Memory of a CUDA device, which determines how many clients are trained at once."""

    def __init__(self, device: torch.device):
        self.device = device

    def peak_of(self, work: Callable[[], object]) -> int:
        """Run a function and return the largest number of bytes that it allocated."""
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        work()
        return torch.cuda.max_memory_allocated(self.device) - before

    def free(self) -> int:
        """Return the number of bytes that can still be allocated, including those that PyTorch keeps for reuse."""
        reusable = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + reusable

    def release(self) -> None:
        """Return unused memory to the device after an allocation failed."""
        torch.cuda.empty_cache()
