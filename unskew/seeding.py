"""Random numbers that depend only on their purpose, not on earlier draws.

Each seed is derived from ``(seed, purpose, round, client)``. So all engines draw the same numbers, a resumed run equals an
uninterrupted one, and the order of execution does not matter.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


def derive(seed: int, purpose: str, round: int = 0, client: int = 0) -> int:
    """Return a 63-bit seed for one purpose in one round at one client.

    Args:
        seed: Random seed of the run.
        purpose: Name of the purpose of the numbers.
        round: Number of the round.
        client: Number of the client.

    >>> derive(0, "batches", 1, 2) == derive(0, "batches", 1, 2)
    True
    >>> derive(0, "batches", 1, 2) == derive(0, "batches", 2, 1)
    False
    """
    text = f"{seed}|{purpose}|{round}|{client}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def generator(seed: int, purpose: str, round: int = 0, client: int = 0) -> torch.Generator:
    """Return a CPU generator with the seed from ``derive``.

    Args:
        seed: Random seed of the run.
        purpose: Name of the purpose of the numbers.
        round: Number of the round.
        client: Number of the client.
    """
    return torch.Generator().manual_seed(derive(seed, purpose, round, client))


def numpy_generator(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
    """Return a NumPy generator with the seed from ``derive``.

    Args:
        seed: Random seed of the run.
        purpose: Name of the purpose of the numbers.
        round: Number of the round.
        client: Number of the client.
    """
    return np.random.default_rng(derive(seed, purpose, round, client))


@contextlib.contextmanager
def seeded_globals(enabled: bool, number: int, device: torch.device) -> Iterator[None]:
    """Context manager in which the global generators of PyTorch, NumPy and Python start from a seed.

    Afterwards they continue as if nothing had been drawn.

    Args:
        enabled: Whether to do anything; a model that draws no such numbers needs nothing.
        number: Seed, such as the result of ``derive``.
        device: Device of the model, whose generator is seeded in addition to that of the CPU.
    """
    if not enabled:
        yield
        return
    before = global_states(device)
    random.seed(number)
    np.random.seed(number % (1 << 32))  # noqa: NPY002 - models draw from this generator
    for each in _torch_generators(device):
        each.manual_seed(number)
    try:
        yield
    finally:
        set_global_states(before, device)


def _torch_generators(device: torch.device) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if device.type in ("cuda", "xpu"):
        module = torch.get_device_module(device)
        generators.append(module.default_generators[module.current_device() if device.index is None else device.index])
    return generators


def global_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the global generators of PyTorch, NumPy and Python.

    Args:
        device: Device whose generator is included in addition to that of the CPU.
    """
    name, key, *others = np.random.get_state()  # noqa: NPY002
    text = json.dumps([random.getstate(), [name, np.asarray(key).tolist(), *others]])
    states = {f"torch-{n}": each.get_state() for n, each in enumerate(_torch_generators(device))}
    return {**states, "others": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}


def set_global_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Set the global generators to the result of ``global_states``.

    Args:
        states: Result of ``global_states``.
        device: The same device.
    """
    (version, numbers, gauss), numpy_state = json.loads(bytes(states["others"].tolist()))
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(numpy_state))  # noqa: NPY002
    for n, each in enumerate(_torch_generators(device)):
        each.set_state(states[f"torch-{n}"])


def _mix(z: Tensor) -> Tensor:
    """Apply the finalizer of SplitMix64; right shifts are masked, because int64 shifts extend the sign."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _MIX1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _MIX2
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def _wrapped(number: int) -> int:
    """Wrap an integer to signed 64 bits."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def fold(key: Tensor, number: int | Tensor) -> Tensor:
    """Derive a new key from a key and a number, such as a step or layer.

    Args:
        key: Random key, int64.
        number: Number to fold into the key.
    """
    if isinstance(number, int):  # in Python, because creating a tensor on a GPU would synchronize
        return _mix(key + _wrapped((number + 1) * _GOLDEN))
    return _mix(key + (number + 1) * _GOLDEN)


def uniform(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return uniform float32 numbers in [0, 1), a pure function of the int64 tensor ``key``.

    Unlike a generator, it can be mapped over clients and returns the same numbers on every device.

    Args:
        key: Random key, int64.
        shape: Shape of the result.
    """
    counter = torch.arange(math.prod(shape), device=key.device).reshape(shape)
    bits = _mix(_mix(counter * _GOLDEN + key) + counter)
    return ((bits >> 40) & 0xFFFFFF).to(torch.float32) * (1.0 / (1 << 24))


def normal(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return standard normal float64 numbers, a pure function of ``key`` (Box-Muller transform).

    Args:
        key: Random key, int64.
        shape: Shape of the result.
    """
    radius = torch.sqrt(-2 * torch.log1p(-uniform(fold(key, 1), shape).to(torch.float64)))
    return radius * torch.cos(2 * math.pi * uniform(fold(key, 2), shape).to(torch.float64))
