"""Secret random draws, on which privacy guarantees rely: noise, Poisson cohorts and batches, and what else must stay unknown.

``unskew.seeding`` derives draws from the seed, which everybody may know. Here they are derived from a key of 256 bits from
the system's entropy. They are still pure functions of the key, their purpose, the round and the client, so all engines draw
the same numbers, and a resumed run repeats no draw and adds none.

Keyed BLAKE2b derives a key of 128 bits for each purpose, round and client. Numbers are drawn from it by Threefry-2x64 with 20
rounds, a reduced form of the cipher Threefish (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3",
2011). It has no known attack, needs only integer additions, rotations and exclusive or, and so runs on every device and under
``torch.func.vmap``. Streams that are read sequentially on the CPU come from SHAKE-256. Uniform numbers have 53 bits, and
normal ones are computed from them in float64 (Box-Muller transform). Like all normal numbers in floating point, they are not
exactly those of the proof (Mironov 2012, "On significance of the least significant bits for differential privacy").
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unskew.errors import CheckpointError
from unskew.filesystem import NOFOLLOW, disk_errors
from unskew.seeding import derive, fold, normal

KEY_FILE = "privacy.key"
"""File with the key of an unfinished private run."""
KEY_BYTES = 32
_ROTATIONS = (16, 42, 12, 31, 16, 32, 24, 21)
_PARITY = 0x1BD11BDAA9FC1A22
_MANTISSA = (1 << 53) - 1
_CHUNK = 1 << 20
"""Largest number of normal numbers that are computed at a time; more would not fit into the cache of a processor."""


def new_key() -> bytes:
    """Return a new key from the system's entropy."""
    return os.urandom(KEY_BYTES)


class SecretKey:
    """Secret key of the draws of one run. Its representation does not show it.

    Args:
        key: Key of 32 bytes; None draws one from the system's entropy.
    """

    def __init__(self, key: bytes | None = None):
        self._key = new_key() if key is None else key

    def _derived(self, purpose: str, round: int, client: int) -> bytes:
        return hashlib.blake2b(f"{purpose}|{round}|{client}".encode(), digest_size=16, key=self._key).digest()

    def subkey(self, purpose: str, round: int = 0, client: int = 0) -> Tensor:
        """Return the key of one purpose in one round at one client, int64 ``[2]``.

        Args:
            purpose: Name of the purpose of the numbers.
            round: Number of the round.
            client: Number of the client.
        """
        return torch.frombuffer(bytearray(self._derived(purpose, round, client)), dtype=torch.int64)

    def within(self, what: str) -> SecretKey:
        """Return a key that depends on this one and on a text.

        Args:
            what: The text.
        """
        return SecretKey(hashlib.blake2b(what.encode(), digest_size=KEY_BYTES, key=self._key).digest())

    def stream(self, purpose: str, round: int = 0, client: int = 0) -> Callable[[int], np.ndarray]:
        """Return a function that returns the next uniform numbers in [0, 1), float64 with 53 bits.

        Args:
            purpose: Name of the purpose of the numbers.
            round: Number of the round.
            client: Number of the client.
        """
        key, calls = self._derived(purpose, round, client), count()

        def uniform(size: int) -> np.ndarray:
            data = hashlib.shake_256(key + next(calls).to_bytes(8, "big")).digest(8 * size)
            return (np.frombuffer(data, np.uint64) >> np.uint64(11)) * 2.0**-53

        return uniform


class SystemEntropy(SecretKey):
    """Key that is new for every purpose each time.

    It is used at real sites and servers. They may be asked twice, with other inputs: noise that is repeated for other inputs
    would cancel in the difference of both answers.
    """

    def _derived(self, purpose: str, round: int, client: int) -> bytes:
        return os.urandom(16)


def stored_key(path: Path, begun: bool) -> SecretKey:
    """Return the key in a file; create it if it is missing and nothing was drawn yet. Only its owner can read the file.

    Args:
        path: Path of the file.
        begun: Whether draws from the key may have been released.

    Raises:
        CheckpointError: If the key of draws that may have been released is missing or corrupted.
    """
    key = b""
    if os.path.lexists(path):
        with disk_errors(path), open(os.open(path, os.O_RDONLY | NOFOLLOW), "rb") as file:
            key = file.read()
    if len(key) == KEY_BYTES:
        return SecretKey(key)
    if begun:
        raise CheckpointError(
            f"The key of the unfinished private run, {path}, is missing or incomplete. New noise for rounds that may have "
            "been released would weaken the guarantee. Restore the file, or start a new run, whose epsilon adds to that of "
            "this one."
        )
    path.unlink(missing_ok=True)
    key = new_key()
    with disk_errors(path), open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW, 0o600), "wb") as file:
        file.write(key)
        file.flush()
        os.fsync(file.fileno())
    return SecretKey(key)


def seeded_sentence(epsilon: float, delta: float) -> str:
    """Return the guarantee of a run whose noise was computed from the seed, as a sentence.

    Args:
        epsilon: Value of ``epsilon`` with secret noise.
        delta: Probability ``delta`` of that guarantee.
    """
    return (
        "None: noise was computed from the seed (reproducible=true), so no guarantee holds against anyone who knows the "
        f"configuration; for experiments on public data. With secret noise, epsilon would be {epsilon:.4g} for "
        f"delta={delta:.3g}."
    )


def seeded_warnings(name: str, reproducible: bool) -> list[str]:
    """Return a warning if the noise of a rule can be computed from the seed.

    Args:
        name: Name of the rule.
        reproducible: Option of the rule.
    """
    if not reproducible:
        return []
    return [
        f"{name}:reproducible=true computes the noise from the seed, so there is no privacy against anyone who knows the "
        "configuration. Use it for experiments on public data only."
    ]


def is_seeded(spent: Tensor) -> bool:
    """Return whether the noise of a round was computed from the seed; its row in the record has a negative noise.

    Args:
        spent: Record of the rounds.
    """
    return bool((spent < 0).any())


def seeded_report(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a report on rounds whose noise was computed from the seed, for which no epsilon holds.

    Args:
        fields: Fields as they would be with secret noise.
    """
    spent, text = fields["epsilon"], seeded_sentence(fields["epsilon"], fields["delta"])
    return {**fields, "epsilon": None, "epsilon_if_secret": spent, "privacy": text}


class NoiseSource:
    """Source of the server's standard normal noise.

    Args:
        seed: Seed of the run.
        secret: Secret key to draw from instead, because the guarantee relies on noise that nobody can compute.
    """

    def __init__(self, seed: int, secret: SecretKey | None = None):
        self.seed, self.secret = seed, secret

    def normal(self, round: int, number: int, like: Tensor) -> Tensor:
        """Return standard normal noise like a tensor, a pure function of key or seed and the arguments.

        Args:
            round: Number of the round, from 0.
            number: Number of the draw within the round.
            like: Tensor with the shape, dtype and device of the noise.
        """
        if self.secret is not None:
            key = self.secret.subkey("server noise", round).to(like.device)
            return secret_normal(key, number, like.numel()).reshape(like.shape).to(like.dtype)
        seeded = torch.tensor(derive(self.seed, "server noise", round), device=like.device)
        return normal(fold(seeded, number), tuple(like.shape)).to(like.dtype)


def _rotated(x: Tensor, bits: int) -> Tensor:
    return (x << bits) | ((x >> (64 - bits)) & ((1 << bits) - 1))


def threefry(first: Tensor, second: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Encrypt counters of two words with Threefry-2x64-20.

    Args:
        first: First words of the counters, int64.
        second: Second words, int64 of the same shape.
        key: Key, int64 ``[2]``.

    Returns:
        The two words of each block.
    """
    keys = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    first, second = first + keys[0], second + keys[1]
    for number in range(20):
        first = first + second
        second = _rotated(second, _ROTATIONS[number % 8]) ^ first
        if number % 4 == 3:
            injection = number // 4 + 1
            first = first + keys[injection % 3]
            second = second + keys[(injection + 1) % 3] + injection
    return first, second


def secret_words(key: Tensor, number: int | Tensor, size: int, start: int = 0) -> Tensor:
    """Return random 64-bit words, int64 ``[size]``, a pure function of key and number.

    Args:
        key: Key from ``SecretKey.subkey``, int64 ``[2]``.
        number: Number of the draw with this key.
        size: Number of words.
        start: First value of the counter.
    """
    counter = torch.arange(start, start + (size + 1) // 2, device=key.device)
    return torch.cat(threefry(counter, torch.zeros_like(counter) + number, key))[:size]


def secret_uniform(key: Tensor, number: int | Tensor, size: int, start: int = 0) -> Tensor:
    """Return uniform numbers in [0, 1), float64 ``[size]``, a pure function of key and number.

    Args:
        key: Key from ``SecretKey.subkey``, int64 ``[2]``.
        number: Number of the draw with this key.
        size: Number of draws.
        start: First value of the counter.
    """
    return ((secret_words(key, number, size, start) >> 11) & _MANTISSA).to(torch.float64) * 2.0**-53


def secret_normal(key: Tensor, number: int | Tensor, size: int) -> Tensor:
    """Return standard normal numbers, float64 ``[size]``, a pure function of key and number.

    Args:
        key: Key from ``SecretKey.subkey``, int64 ``[2]``.
        number: Number of the draw with this key.
        size: Number of draws.
    """
    parts = []
    for start in range(0, size, _CHUNK):
        half = (min(size - start, _CHUNK) + 1) // 2
        uniform = secret_uniform(key, number, 2 * half, start)
        radius, angle = torch.sqrt(-2 * torch.log1p(-uniform[:half])), 2 * math.pi * uniform[half:]
        parts += [radius * torch.cos(angle), radius * torch.sin(angle)]
    return torch.cat(parts)[:size] if parts else torch.zeros(0, dtype=torch.float64, device=key.device)
