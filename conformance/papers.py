"""Algorithms of the papers in float64, in a few lines each, written from the papers without any code of unskew.

Each is a generator of the models after each round. ``run.local`` takes a client's steps, ``run.mean`` averages over the
cohort with the weights of the case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from conformance.problem import Array, Case, Trace, softmax

Direction = Callable[[Array, Array], Array]
"""Maps a gradient, and the model where it was computed, to the direction of the step."""


class Run:
    """Shared parts of the algorithms: data, cohorts and local steps."""

    def __init__(self, case: Case, cohorts: list[list[int]]):
        self.case, self.cohorts, self.problem = case, cohorts, case.make()
        self.K, self.lr = self.problem.clients, case.lr
        self.start = self.problem.start()
        self.share = self.problem.shares(case.weights)

    def steps(self, k: int) -> int:
        """Return the number of local steps of client ``k``."""
        return self.problem.sizes[k] if self.case.steps is None else self.case.steps

    def gradient(self, k: int, w: Array) -> Array:
        """Return the gradient of client ``k``'s objective."""
        return self.problem.gradient(k, w)

    def local(self, k: int, w: Array, direction: Direction = lambda g, w: g) -> Array:
        """Return the client's model after its local steps from ``w``."""
        for _ in range(self.steps(k)):
            w = w - self.lr * direction(self.gradient(k, w), w)
        return w

    def mean(self, of: Mapping[int, Array]) -> Array:
        """Return the weighted mean over a cohort."""
        return sum(self.share[k] * v for k, v in of.items()) / sum(self.share[k] for k in of)

    def zeros(self) -> dict[int, Array]:
        """Return a zero for each client."""
        return {k: np.zeros_like(self.start) for k in range(self.K)}


def fedavg(run: Run) -> Iterator[Array]:
    """McMahan et al. 2016, Algorithm 1."""
    x = run.start
    for S in run.cohorts:
        x = run.mean({k: run.local(k, x) for k in S})
        yield x


def fedprox(run: Run, mu: float) -> Iterator[Array]:
    """Li et al. 2018, Algorithm 2: each client also minimizes ``mu/2 ||w - x||^2``."""
    x = run.start
    for S in run.cohorts:
        x = run.mean({k: run.local(k, x, lambda g, w, x=x: g + mu * (w - x)) for k in S})
        yield x


def scaffold(run: Run, option: int = 2, mu: float = 0.0, beta: float = 0.0) -> Iterator[Array]:
    """Karimireddy et al. 2019, Algorithm 1; for compositions also with FedProx's term and FedAvgM's momentum.

    The paper's ``c`` is the plain mean of all ``c_k``; with other weights it is the weighted mean of the objective.
    """
    x, c, c_k, m = run.start, np.zeros_like(run.start), run.zeros(), 0.0
    for S in run.cohorts:
        y, new = {}, {}
        for k in S:
            y[k] = run.local(k, x, lambda g, w, x=x, k=k, c=c: g + mu * (w - x) - c_k[k] + c)
            drift = (x - y[k]) / (run.steps(k) * run.lr)
            new[k] = run.gradient(k, x) if option == 1 else c_k[k] - c + drift
        m = beta * m + run.mean({k: y[k] - x for k in S})
        x = x + m
        c = c + sum(run.share[k] * (new[k] - c_k[k]) for k in S)
        c_k.update(new)
        yield x


def feddyn(run: Run, alpha: float) -> Iterator[Array]:
    """Acar et al. 2021, Algorithm 1, with gradient steps instead of the exact minimum.

    The paper's ``h`` is the plain mean of all ``g_k``; with other weights it is the weighted mean of the objective.
    """
    x, h, g_k = run.start, np.zeros_like(run.start), run.zeros()
    for S in run.cohorts:
        y = {k: run.local(k, x, lambda g, w, x=x, k=k: g - g_k[k] + alpha * (w - x)) for k in S}
        g_k.update({k: g_k[k] - alpha * (y[k] - x) for k in S})
        h = h - alpha * sum(run.share[k] * (y[k] - x) for k in S)
        x = run.mean(y) - h / alpha
        yield x


def mime(run: Run, beta: float = 0.0) -> Iterator[Array]:
    """Karimireddy et al. 2020 ("Mime"), Algorithm 1 for SGD with momentum: the cohort's gradient at ``x`` corrects steps."""
    x, m = run.start, np.zeros_like(run.start)
    for S in run.cohorts:
        y, at_x = {}, {k: run.gradient(k, x) for k in S}
        c = run.mean(at_x)
        for k in S:
            y[k] = run.local(k, x, lambda g, w, k=k, at_x=at_x, c=c, m=m: beta * m + (1 - beta) * (g - at_x[k] + c))
        x = run.mean(y)
        m = beta * m + (1 - beta) * c
        yield x


def fedcm(run: Run, alpha: float) -> Iterator[Array]:
    """Xu et al. 2021, Algorithm 2: local steps include the direction of the last global update."""
    x, m = run.start, np.zeros_like(run.start)
    for S in run.cohorts:
        new = run.mean({k: run.local(k, x, lambda g, w, m=m: alpha * g + (1 - alpha) * m) for k in S})
        tau = run.mean({k: np.array(float(run.steps(k))) for k in S})
        x, m = new, (x - new) / (run.lr * tau)
        yield x


def mimelite(run: Run, beta: float) -> Iterator[Array]:
    """Karimireddy et al. 2020 ("Mime"), Algorithm 1 for SGD with momentum, without the correction."""
    x, m = run.start, np.zeros_like(run.start)
    for S in run.cohorts:
        at_x = run.mean({k: run.gradient(k, x) for k in S})
        x = run.mean({k: run.local(k, x, lambda g, w, m=m: beta * m + (1 - beta) * g) for k in S})
        m = beta * m + (1 - beta) * at_x
        yield x


def fedsmoo(run: Run, rho: float, lam: float) -> Iterator[Array]:
    """Sun et al. 2023, Algorithm 1: regularized models and perturbations, each with a dual variable per client."""
    x, s = run.start, np.zeros_like(run.start)
    h_k, mu = run.zeros(), run.zeros()
    for S in run.cohorts:
        y = {}
        for k in S:

            def direction(g: Array, w: Array, x: Array = x, s: Array = s, k: int = k) -> Array:
                r = g - mu[k] - s
                e = rho * r / np.linalg.norm(r)
                mu[k] = mu[k] + e - s
                return run.gradient(k, w + e) + lam * (w - x + h_k[k])

            y[k] = run.local(k, x, direction)
        for k in S:
            h_k[k] = h_k[k] + y[k] - x
        x = run.mean(y) + sum(run.share[k] * h_k[k] for k in h_k)
        mean = run.mean({k: mu[k] for k in S})
        s = rho * mean / np.linalg.norm(mean)
        yield x


def qfedavg(run: Run, q: float) -> Iterator[Array]:
    """Li et al. 2020 ("Fair Resource Allocation"), Algorithm 2, with ``L = 1 / lr``; weights scale both sums.

    As in the authors' code, a loss has 1e-10 added to it.
    """
    x, L = run.start, 1 / run.lr
    for S in run.cohorts:
        total, scale = np.zeros_like(x), 0.0
        for k in S:
            loss, d = run.problem.loss(k, x) + 1e-10, L * (x - run.local(k, x))
            total = total + run.share[k] * loss**q * d
            scale += run.share[k] * (q * loss ** (q - 1) * np.sum(d**2) + L * loss**q)
        x = x - total / scale
        yield x


def pfedme(run: Run, lam: float, K: int, eta_p: float, beta: float, decay: float) -> Iterator[Array]:
    """Dinh et al. 2020, Algorithm 1; the personal model takes ``K`` gradient steps with the decay of the authors' code."""
    x = run.start
    for S in run.cohorts:
        y = {}
        for k in S:
            w = personal = x
            for _ in range(run.steps(k)):
                for _ in range(K):
                    g = run.gradient(k, personal) + lam * (personal - w) + decay * personal
                    personal = personal - eta_p * g
                w = w - run.lr * lam * (w - personal)
            y[k] = w
        x = (1 - beta) * x + beta * run.mean(y)
        yield x


def fednova(run: Run) -> Iterator[Array]:
    """Wang et al. 2020, Algorithm 1, for plain SGD, for which the length of an update is its number of steps."""
    x = run.start
    for S in run.cohorts:
        tau = run.mean({k: np.array(float(run.steps(k))) for k in S})
        x = x + tau * run.mean({k: (run.local(k, x) - x) / run.steps(k) for k in S})
        yield x


def fedavgm(run: Run, beta: float) -> Iterator[Array]:
    """Hsu et al. 2019: momentum at the server."""
    x, v = run.start, np.zeros_like(run.start)
    for S in run.cohorts:
        v = beta * v + (x - run.mean({k: run.local(k, x) for k in S}))
        x = x - v
        yield x


def _fedopt(run: Run, second: Callable[[Array, Array], Array], beta1: float, eta: float, tau: float) -> Iterator[Array]:
    """Reddi et al. 2020, Algorithm 2."""
    x, m, v = run.start, np.zeros_like(run.start), np.full_like(run.start, tau**2)
    for S in run.cohorts:
        delta = run.mean({k: run.local(k, x) - x for k in S})
        m = beta1 * m + (1 - beta1) * delta
        v = second(v, delta**2)
        x = x + eta * m / (np.sqrt(v) + tau)
        yield x


def fedadagrad(run: Run, eta: float, tau: float) -> Iterator[Array]:
    """Reddi et al. 2020, Algorithm 2; the paper's FedAdagrad has no momentum."""
    return _fedopt(run, lambda v, square: v + square, 0.0, eta, tau)


def fedyogi(run: Run, eta: float, tau: float, beta2: float) -> Iterator[Array]:
    """Reddi et al. 2020, Algorithm 2."""
    return _fedopt(run, lambda v, square: v - (1 - beta2) * square * np.sign(v - square), 0.9, eta, tau)


def fedadam(run: Run, eta: float, tau: float, beta2: float) -> Iterator[Array]:
    """Reddi et al. 2020, Algorithm 2, without bias correction."""
    return _fedopt(run, lambda v, square: beta2 * v + (1 - beta2) * square, 0.9, eta, tau)


def fedexp(run: Run, epsilon: float) -> Iterator[Array]:
    """Jhunjhunwala et al. 2023, Algorithm 1; the last iterate."""
    x = run.start
    for S in run.cohorts:
        deltas = {k: run.local(k, x) - x for k in S}
        mean = run.mean(deltas)
        squares = run.mean({k: np.sum(d**2) for k, d in deltas.items()})
        x = x + max(1.0, squares / (2 * (np.sum(mean**2) + epsilon))) * mean
        yield x


def fedsam(run: Run, rho: float) -> Iterator[Array]:
    """Qu et al. 2022, Algorithm 1: the gradient is computed after a step of length ``rho`` uphill."""
    x = run.start
    for S in run.cohorts:
        y = {}
        for k in S:
            y[k] = run.local(k, x, lambda g, w, k=k: run.gradient(k, w + rho * g / np.linalg.norm(g)))
        x = run.mean(y)
        yield x


def fedntd(run: Run, beta: float, temperature: float) -> Iterator[Array]:
    """Lee et al. 2021, Equation 5: the global model's predictions for classes other than the label are preserved."""
    x = run.start
    for S in run.cohorts:
        y = {}
        for k in S:
            inputs, labels = run.problem.x[k], run.problem.y[k]
            other = np.arange(x.shape[0]) != labels[:, None]

            def others(w: Array, inputs: Array = inputs, other: NDArray[np.bool_] = other) -> Array:
                return softmax(np.where(other, inputs @ w.T / temperature, -np.inf))

            others_mean = others(x)
            y[k] = run.local(
                k, x, lambda g, w, i=inputs, q=others_mean, f=others: g + beta * temperature * (f(w) - q).T @ i / len(i)
            )
        x = run.mean(y)
        yield x


def fedbuff(run: Run, size: int) -> Iterator[Array]:
    """Nguyen et al. 2021, Algorithm 1, without delays: updates that do not fill a buffer wait for the next round."""
    x, buffer = run.start, []
    for S in run.cohorts:
        for k, delta in [(k, run.local(k, x) - x) for k in S]:
            buffer.append((run.share[k], delta))
            if len(buffer) == size:
                x, buffer = x + sum(p * d for p, d in buffer) / sum(p for p, _ in buffer), []
        yield x


def ca2fl(run: Run, size: int) -> Iterator[Array]:
    """Wang et al. 2024, without delays: FedBuff, calibrated by the last update of each client."""
    x, buffer, h_k = run.start, [], run.zeros()
    h = np.zeros_like(x)
    for S in run.cohorts:
        for k, delta in [(k, run.local(k, x) - x) for k in S]:
            buffer.append((run.share[k], delta - h_k[k]))
            h_k[k] = delta
            if len(buffer) == size:
                x = x + h + sum(p * change for p, change in buffer) / sum(p for p, _ in buffer)
                buffer, h = [], sum(run.share[k] * h_k[k] for k in h_k)
        yield x


def fedasync(run: Run, alpha: float) -> Iterator[Array]:
    """Xie et al. 2019, Algorithm 1, with constant weights: the models of a round are mixed in one after another."""
    x = run.start
    for S in run.cohorts:
        for model in [run.local(k, x) for k in S]:
            x = (1 - alpha) * x + alpha * model
        yield x


PAPERS: dict[str, Callable[..., Iterator[Array]]] = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "scaffold": scaffold,
    "scaffold-1": partial(scaffold, option=1),
    "fedprox+scaffold": scaffold,
    "scaffold+fedavgm": scaffold,
    "feddyn": feddyn,
    "mime": mime,
    "mime-momentum": mime,
    "mimelite": mimelite,
    "fedcm": fedcm,
    "fedsmoo": fedsmoo,
    "qfedavg": qfedavg,
    "pfedme": pfedme,
    "fednova": fednova,
    "fedavgm": fedavgm,
    "fedadagrad": fedadagrad,
    "fedyogi": fedyogi,
    "fedadam": fedadam,
    "fedexp": fedexp,
    "fedsam": fedsam,
    "fedntd": fedntd,
    "fedbuff": fedbuff,
    "ca2fl": ca2fl,
    "fedasync": fedasync,
    "fedpvr": scaffold,  # the model is one linear layer, and all linear layers are corrected
    "ditto": fedavg,  # personal models are trained separately and do not affect the global one
    "apfl": fedavg,  # the same
    "fedbn": fedavg,  # the model has no BatchNorm
    "fedavg+ft": fedavg,  # clients are fine-tuned only after the last round
}


def paper(case: Case, cohorts: list[list[int]] | None = None) -> Trace:
    """Return the paper's result for ``case``, with these cohorts or its own."""
    chosen = case.cohorts if cohorts is None else cohorts
    return Trace(list(PAPERS[case.method](Run(case, chosen), **case.options)), chosen)
