"""Least squares at every client: ``f_k(v) = mean_j 1/2 (a_kj v - b_kj)^2``, whose optimum is known."""

import numpy as np
import torch

from support.protocol import server_of
from unskew.data.federation import ArrayClients, Federation
from unskew.engines.base import EngineConfig
from unskew.engines.inline import InlineEngine
from unskew.engines.vectorized import VectorizedEngine
from unskew.methods.registry import method
from unskew.models.spec import ModelSpec
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.training_config import Training
from unskew.simulation.network import Network
from unskew.simulation.round_loop import run_rounds
from unskew.simulation.sampler import Sampler
from unskew.tasks.base import Task

LR, STEPS = 0.05, 5
"""The budget of a client where a test names none: full batches."""


class HalfSquares(Task):
    name = "least squares"

    def loss(self, logits, y):
        return self.losses(logits, y).mean()

    def losses(self, logits, y):
        return 0.5 * (logits[:, 0] - y).square()


def problem(sizes=(3, 7, 5, 4), d=3, seed=0, equal=False):
    """Lists ``A_k [n_k, d]``, ``b_k [n_k]`` of clients that disagree; ``equal`` makes the optima of all the same."""
    draws = np.random.default_rng(seed)
    A = [draws.normal(size=(n, d)) for n in sizes]
    shared = draws.normal(size=d)
    return A, [a @ (shared if equal else draws.normal(size=d) * 2) + (0 if equal else 0.3) for a in A]


def optimum(A, b, p):
    H = sum(w * a.T @ a / len(a) for a, w in zip(A, p, strict=True))
    g = sum(w * a.T @ y / len(a) for a, y, w in zip(A, b, p, strict=True))
    return np.linalg.solve(H, g)


def gradient(a, b, v):
    return a.T @ (a @ v - b) / len(a)


def oracle(A, b, rounds, cohort, p, correct=lambda k, g, v, x: g):
    """FedAvg on full batches, ten lines of NumPy; ``correct`` changes a client's gradient."""
    x, path = np.zeros(A[0].shape[1]), []
    for t in range(rounds):
        chosen = cohort(t)
        total = sum(p[k] for k in chosen)
        new = np.zeros_like(x)
        for k in chosen:
            v = x.copy()
            for _ in range(STEPS):
                v -= LR * correct(k, gradient(A[k], b[k], v), v, x)
            new += p[k] / total * v
        x = new
        path.append(x)
    return path


def sizes(A):
    return np.array([len(a) for a in A]) / sum(len(a) for a in A)


class Quadratics:
    """A run on quadratics in float64 that exposes the server."""

    def __init__(
        self, A, b, chosen, training=None, weights=None, participation=1.0, seed=0, engine="inline", module=None
    ):
        x, y = torch.tensor(np.concatenate(A)), torch.tensor(np.concatenate(b))
        offsets = np.concatenate([[0], np.cumsum([len(a) for a in A])])
        fed = Federation(ArrayClients(x, y, offsets, offsets[1:]), test=(x, y), classes=1)
        if module is None:
            module = torch.nn.Linear(x.shape[1], 1, bias=False)
            torch.nn.init.zeros_(module.weight)
        self.spec = ModelSpec(module, (x.shape[1],), 1, dtype=torch.float64)
        self.method = chosen if not isinstance(chosen, str) else method(chosen)
        training = training or Training(local_steps=STEPS, batch_size=100, lr=LR, precision="fp64")
        device, plan = torch.device("cpu"), RoundPlan(rounds=1000)  # more than any test asks for
        setup = EngineConfig(self.spec, fed, self.method.client, HalfSquares(), training, seed, device, plan=plan)
        self.engine = {"inline": InlineEngine, "vectorized": VectorizedEngine}[engine](setup)
        self.server = server_of(self.method, self.spec, fed, weights)
        self.sampler, self.network = Sampler(len(A), participation, seed), Network(0.0, seed)
        self.done = 0

    def rounds(self, n):
        vectors = []
        run_rounds(
            range(self.done, self.done + n), self.sampler, self.server, self.engine, self.network,
            lambda t, figures: vectors.append(self.server.state.v.numpy().copy()),
        )  # fmt: skip
        self.done += n
        return vectors
