"""Inputs of all libraries: drawn from fixed seeds with NumPy, so that only outputs have to be stored."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

Array = np.ndarray

TABLE = ((120 / 3383, 1.2, 100, 1e-5), (0.1, 1.0, 100, 1e-3), (0.01, 1.0, 1000, 1e-5), (0.01, 0.8, 1500, 1e-6))
"""Sampling rate, noise multiplier, rounds and delta of published and common settings with Poisson cohorts."""
EXACT_TABLE = ((1.0, 10.0, 100, 1e-5), (1.0, 4.0, 30, 1e-2), (1.0, 2.0, 10, 1e-3))
"""The same without amplification."""
TARGETS = ((2.0, 1e-5, 120 / 3383, 100), (8.0, 1e-6, 0.01, 1500))
"""Epsilon, delta, sampling rate and rounds for which a noise multiplier is computed."""
ORDERS = (*[1 + x / 10 for x in range(1, 100)], *range(12, 64), 72, 80, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Orders of unskew's Renyi accountant: those of opacus and some larger ones."""

SUSPECTED = 2
"""Number ``f`` of suspected points."""
SHARE = 0.2
"""Share of suspected points; 0.2 of 13 points is not an integer."""
ATTACKERS = 3
"""Number of attackers, the last of the points."""
TAU, CLIP_STEPS, WEISZFELD_STEPS, SMOOTHING = 1.0, 3, 4, 1e-5
SCALE, IPM_EPSILON, ALIE_Z = 1.0, 0.5, 0.75

CLIENTS, ROUNDS, CLIP_LR = 20, 40, 0.2
"""Clients and rounds of adaptive clipping, and its step size."""
CLIPPINGS = ((0.3, 0.5), (3.0, 0.5), (0.3, 0.8), (3.0, 0.8))
"""Initial clipping norm and quantile."""
NOISES = ((1.0, 50), (1.2, 120), (0.5, 20), (2.0, 50))
"""Noise multiplier and cohort size."""

LEVELS = 16
"""Levels of QSGD: a power of two, as FedLab needs."""
SHARES = ((0.01, 100), (0.05, 40), (0.25, 60), (0.07, 100))
"""Share of entries that top-k sends, and length of the vector; 0.07 * 100 is slightly above 7 in floating point."""
SHAPES, RANK = ((8, 7), (8,), (6, 8), (6,)), 1
"""Shapes of the parameters of two linear layers, and the rank of PowerSGD."""
EDGE_SHAPES, EDGE_RANK = ((8, 8),), 2
"""Matrix that shrinks exactly twofold."""


class Setting(NamedTuple):
    """Rounds whose epsilon is computed."""

    rate: float
    noise: float
    rounds: int
    delta: float


def sampled_settings() -> list[Setting]:
    """Return the settings of the table with Poisson cohorts, and 15 random ones."""
    rng = np.random.default_rng(0)
    settings = [Setting(*row) for row in TABLE]
    while len(settings) < 19:
        rate, noise = float(np.exp(rng.uniform(np.log(0.002), np.log(0.3)))), float(rng.uniform(0.7, 4.0))
        rounds, delta = int(np.exp(rng.uniform(np.log(10), np.log(1000)))), float(10 ** rng.uniform(-7, -3))
        if rate * math.sqrt(rounds) / noise < 1:  # so that epsilon is of practical size
            settings.append(Setting(rate, noise, rounds, delta))
    return settings


def exact_settings() -> list[Setting]:
    """Return the settings of the table without amplification, and 5 random ones."""
    rng = np.random.default_rng(1)
    settings = [Setting(*row) for row in EXACT_TABLE]
    for _ in range(5):
        rounds, delta = int(np.exp(rng.uniform(0, np.log(1000)))), float(10 ** rng.uniform(-7, -2))
        settings.append(Setting(1.0, float(rng.uniform(0.5, 4.0)) * math.sqrt(rounds), rounds, delta))
    return settings


def point_sets() -> list[Array]:
    """Return 12 sets of 13 or 12 points ``[n, 3]``; in half of them, ``SUSPECTED`` are far away."""
    sets = []
    for seed in range(12):
        points = np.random.default_rng(100 + seed).normal(size=(13 - seed % 2, 3))
        points[-SUSPECTED:] += 4.0 * (seed % 4 < 2)
        sets.append(points)
    return sets


def norms() -> Array:
    """Return the norms of the clients' updates in adaptive clipping, ``[CLIENTS]``."""
    return np.linspace(0.5, 1.5, CLIENTS)


def updates() -> Array:
    """Return updates with these norms, ``[CLIENTS, 3]``."""
    directions = np.random.default_rng(2).normal(size=(CLIENTS, 3))
    return directions / np.linalg.norm(directions, axis=1, keepdims=True) * norms()[:, None]


def vectors() -> list[Array]:
    """Return three vectors for QSGD, ``[32]``, whose entries are float32 numbers."""
    rng = np.random.default_rng(3)
    return [rng.normal(size=32).astype(np.float32).astype(np.float64) for _ in range(3)]


def sparse_vectors() -> list[Array]:
    """Return a vector for each of ``SHARES``, whose entries are float32 numbers."""
    rng = np.random.default_rng(4)
    return [rng.normal(size=n).astype(np.float32).astype(np.float64) for _, n in SHARES]


def matrices(shapes: tuple[tuple[int, ...], ...], rounds: int, seed: int) -> Array:
    """Return the updates of some rounds as vectors, ``[rounds, d]``.

    Args:
        shapes: Shapes of the parameters.
        rounds: Number of rounds.
        seed: Random seed.
    """
    return np.random.default_rng(seed).normal(size=(rounds, sum(math.prod(shape) for shape in shapes)))


def start(shapes: tuple[tuple[int, ...], ...], rank: int) -> Array:
    """Return the initial matrices ``Q [columns, rank]`` of PowerSGD, as one vector.

    Args:
        shapes: Shapes of the parameters.
        rank: Rank of the approximation.
    """
    return np.random.default_rng(5).normal(size=sum(rank * shape[1] for shape in shapes if len(shape) > 1))
