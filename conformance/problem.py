"""Convex problem on which the papers' algorithms are deterministic, and the interface to run them in a library.

The problem is softmax regression without regularization: client ``k`` minimizes the mean cross-entropy of its samples.
Labels are skewed and noisy, inputs are shifted between clients, batches are full, and every model starts at zero. So
there is no randomness, the optimum is finite, and Newton's method finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
CLASSES, FEATURES, CLIENTS = 4, 5, 8


@dataclass(frozen=True)
class Problem:
    """Clients' data: inputs ``x[k]`` of shape ``[n_k, features]``, whose last feature is 1, and labels ``y[k]``."""

    x: tuple[Array, ...]
    y: tuple[NDArray[np.int64], ...]

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.x)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of samples of each client."""
        return tuple(len(y) for y in self.y)

    def shares(self, weights: str) -> Array:
        """Return the weight of each client in the objective, with sum 1: equal (``uniform``), or by ``samples``."""
        counts = np.ones(self.clients) if weights == "uniform" else np.array(self.sizes, float)
        return counts / counts.sum()

    def start(self) -> Array:
        """Model before the first round, ``[classes, features]``."""
        return np.zeros((CLASSES, self.x[0].shape[1]))

    def loss(self, k: int, w: Array) -> float:
        """Return client ``k``'s mean cross-entropy."""
        right = softmax(self.x[k] @ w.T)[np.arange(len(self.y[k])), self.y[k]]
        return float(-np.log(right).mean())

    def gradient(self, k: int, w: Array) -> Array:
        """Return the gradient of client ``k``'s mean cross-entropy."""
        error = softmax(self.x[k] @ w.T)
        error[np.arange(len(error)), self.y[k]] -= 1
        return error.T @ self.x[k] / len(error)

    def optimum(self, weights: str = "uniform") -> Array:
        """Return the minimum of the weighted objective, by Newton's method.

        Adding one row to all rows of a model changes nothing, so the Hessian is singular. The least-squares step keeps
        the sum of rows at zero, as do all the algorithms, which start there.
        """
        w = self.start()
        for _ in range(50):
            g, h = np.zeros_like(w), np.zeros((w.size, w.size))
            for k, share in enumerate(self.shares(weights)):
                p = softmax(self.x[k] @ w.T)
                curvature = p[:, :, None] * (np.eye(CLASSES) - p[:, None, :])
                blocks = np.einsum("nab,ni,nj->aibj", curvature, self.x[k], self.x[k]) / len(p)
                g, h = g + share * self.gradient(k, w), h + share * blocks.reshape(h.shape)
            w = w - np.linalg.lstsq(h, g.ravel(), rcond=1e-12)[0].reshape(w.shape)
        return w


def softmax(logits: Array) -> Array:
    """Return the class probabilities, row by row."""
    e = np.exp(logits - logits.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def problem(sizes: tuple[int, ...] = (40,) * CLIENTS, seed: int = 0) -> Problem:
    """Create clients of these sizes, each with its own input mean and mostly two classes; 30 % of the labels are noise.

    Inputs are rounded to float32, so that libraries that store float32 compute with the same numbers.
    """
    draws = np.random.default_rng(seed)
    truth = draws.normal(size=(CLASSES, FEATURES))
    xs, ys = [], []
    for k, n in enumerate(sizes):
        x = draws.normal(size=(n, FEATURES)) + draws.normal(size=FEATURES) * 0.5
        liked = 3.0 * np.isin(np.arange(CLASSES), [k % CLASSES, (k + 1) % CLASSES])
        y = np.argmax(x @ truth.T + liked + draws.gumbel(size=(n, CLASSES)), axis=1)
        y = np.where(draws.random(n) < 0.3, draws.integers(0, CLASSES, n), y)
        xs.append(np.column_stack([x, np.ones(n)]).astype(np.float32).astype(np.float64))
        ys.append(y.astype(np.int64))
    return Problem(tuple(xs), tuple(ys))


def equal_clients() -> Problem:
    """Create clients that all have the same samples."""
    base = problem()
    return Problem((base.x[0],) * CLIENTS, (base.y[0],) * CLIENTS)


def repeated_points(copies: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)) -> Problem:
    """Create clients with copies of one sample: with batches of one, a client takes one equal step per copy."""
    base = problem()
    xs = (np.repeat(x[:1], n, axis=0) for x, n in zip(base.x, copies, strict=True))
    return Problem(tuple(xs), tuple(np.repeat(y[:1], n) for y, n in zip(base.y, copies, strict=True)))


@dataclass(frozen=True)
class Case:
    """Run that a library is asked to perform.

    Attributes:
        method: Name of a method in ``conformance.papers``.
        options: Options that the paper leaves open.
        rounds: Number of rounds.
        steps: Local steps of every client, on full batches; None for one step per sample, on that sample.
        weights: Weighting of the server's average, ``uniform`` or by ``samples``.
        participation: Share of the clients in each round.
    """

    method: str
    options: Mapping[str, float] = field(default_factory=dict)
    rounds: int = 8
    steps: int | None = 10
    lr: float = 0.5
    weights: str = "uniform"
    participation: float = 1.0
    make: Callable[[], Problem] = problem

    @property
    def cohorts(self) -> list[list[int]]:
        """Return the clients that take part in each round."""
        draws = np.random.default_rng(1)
        clients = self.make().clients
        size = round(self.participation * clients)
        return [sorted(draws.choice(clients, size, replace=False).tolist()) for _ in range(self.rounds)]


@dataclass(frozen=True)
class Trace:
    """Result of a case: the model after each round, and the clients that took part."""

    models: list[Array]
    cohorts: list[list[int]]
