"""Explanations of deviations from the papers: a paper's algorithm with the change that gives a library's models.

An explanation is valid only if it reproduces the library's trajectory, which the worker measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from conformance.papers import Run
from conformance.problem import Array


def feddyn_without_client_terms(run: Run, alpha: float) -> Iterator[Array]:
    """FedDyn whose clients train as in FedAvg, and whose ``h`` subtracts the sum of models minus one model."""
    x, h = run.start, np.zeros_like(run.start)
    for S in run.cohorts:
        y = {k: run.local(k, x) for k in S}
        h = h - alpha / run.K * (sum(y.values()) - x)
        x = run.mean(y) - h / alpha
        yield x


def feddyn_by_terms(run: Run, alpha: float, pull: Callable[[Array, Array], Array]) -> Iterator[Array]:
    """FedDyn with another gradient of the quadratic term."""
    x, h, g_k = run.start, np.zeros_like(run.start), run.zeros()
    for S in run.cohorts:
        y = {k: run.local(k, x, lambda g, w, x=x, k=k: g - g_k[k] + alpha * pull(w, x)) for k in S}
        g_k.update({k: g_k[k] - alpha * (y[k] - x) for k in S})
        h = h - alpha / run.K * sum(y[k] - x for k in S)
        x = run.mean(y) - h / alpha
        yield x


def _unit(w: Array, x: Array) -> Array:
    """Return half the gradient of ``||w - x||``, which is zero at ``x``."""
    length = np.linalg.norm(w - x)
    return np.zeros_like(w) if length == 0 else (w - x) / (2 * length)


def fedprox_by_norm(run: Run, mu: float) -> Iterator[Array]:
    """FedProx with ``mu/2 ||w - x||`` instead of its square."""
    x = run.start
    for S in run.cohorts:
        x = run.mean({k: run.local(k, x, lambda g, w, x=x: g + mu * _unit(w, x)) for k in S})
        yield x


def scaffold_with(
    run: Run, sign: float = 1.0, option: int = 2, shared: bool = False, kept: bool = True
) -> Iterator[Array]:
    """SCAFFOLD whose new variates have another sign, or are not stored."""
    x, c, c_k = run.start, np.zeros_like(run.start), run.zeros()
    for S in run.cohorts:
        y, change = {}, {}
        for k in S:
            y[k] = run.local(k, x, lambda g, w, k=k, c=c: g - c_k[k] + c)
            drift = sign * (x - y[k]) / (run.steps(k) * run.lr)
            new = c_k[k] - c + drift
            change[k] = new - c_k[k]
            if kept:
                c_k[k] = new
        x = run.mean(y)
        c = c + sum(change.values()) / run.K
        yield x


def scaffold_in_one_buffer(run: Run, option: int = 1) -> Iterator[Array]:
    """SCAFFOLD, option I, with variates of the other sign that all share one buffer.

    The gradient of a client that took part before is written over its old variate before it trains. So it trains with
    the new variate, and the change of its variate is zero.
    """
    x, c, known = run.start, np.zeros_like(run.start), set()
    for S in run.cohorts:
        y, change = {}, []
        for k in S:
            new = -run.gradient(k, x)
            old = new if k in known else np.zeros_like(x)
            y[k] = run.local(k, x, lambda g, w, old=old, c=c: g - old + c)
            change.append(new - old)
            known.add(k)
        x = run.mean(y)
        c = c + sum(change) / run.K
        yield x


def fedopt_from_zero(
    run: Run,
    eta: float,
    tau: float,
    beta1: float,
    second: Callable[[Array, Array], Array],
    corrected: float | None = None,
) -> Iterator[Array]:
    """FedOpt whose second moment starts at zero, optionally with Adam's bias correction with exponent ``t + 1``."""
    x, m, v = run.start, np.zeros_like(run.start), np.zeros_like(run.start)
    for t, S in enumerate(run.cohorts, 1):
        delta = run.mean({k: run.local(k, x) - x for k in S})
        m = beta1 * m + (1 - beta1) * delta
        v = second(v, delta**2)
        step = eta if corrected is None else eta * np.sqrt(1 - corrected ** (t + 1)) / (1 - beta1 ** (t + 1))
        x = x + step * m / (np.sqrt(v) + tau)
        yield x


def _adagrad(run: Run, eta: float, tau: float) -> Iterator[Array]:
    return fedopt_from_zero(run, eta, tau, 0.0, lambda v, square: v + square)


def _yogi(run: Run, eta: float, tau: float, beta2: float) -> Iterator[Array]:
    return fedopt_from_zero(run, eta, tau, 0.9, lambda v, square: v - (1 - beta2) * square * np.sign(v - square))


def _adam(run: Run, eta: float, tau: float, beta2: float) -> Iterator[Array]:
    return fedopt_from_zero(run, eta, tau, 0.9, lambda v, square: beta2 * v + (1 - beta2) * square, beta2)


Cause = tuple[str, Callable[..., Iterator[Array]]]
CAUSES: dict[str, dict[str, Cause]] = {
    "fedlab": {
        "feddyn": ("clients' terms carry no gradient, and h takes sum(theta_k) - theta", feddyn_without_client_terms)
    },
    "pfl_research": {
        "scaffold": ("the drift enters c_k with the other sign", partial(scaffold_with, sign=-1.0)),
        "scaffold-1": ("the gradients enter c_k with the other sign, and all c_k are one buffer", scaffold_in_one_buffer),
    },
    "flower": {
        "fedprox": ("the norm stands where its square is meant", fedprox_by_norm),
        "fedadagrad": ("v starts at 0, not at tau^2", _adagrad),
        "fedyogi": ("v starts at 0, not at tau^2", _yogi),
        "fedadam": ("v starts at 0, and bias is corrected with exponent t + 1", _adam),
    },
    "pfllib": {"feddyn": ("the norm stands where its square is meant", partial(feddyn_by_terms, pull=_unit))},
    "fl_bench": {
        "scaffold": ("c_k is not stored at the server", partial(scaffold_with, kept=False)),
        "feddyn": ("the squared norm of theta is not in the clients' loss", partial(feddyn_by_terms, pull=lambda w, x: -x)),
    },
}  # fmt: skip
"""Change in words, and the changed algorithm, by library and method."""
