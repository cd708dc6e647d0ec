"""Runs of the table, and the measurements of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from conformance.papers import Run, paper
from conformance.problem import Array, Case, Problem, Trace

Runner = Callable[[Case], Trace]

OPTIONS: dict[str, dict[str, float]] = {
    "fedprox": {"mu": 0.5},
    "fedprox+scaffold": {"mu": 0.5},
    "scaffold+fedavgm": {"beta": 0.3},
    "feddyn": {"alpha": 0.5},
    "fedcm": {"alpha": 0.3},
    "mimelite": {"beta": 0.7},
    "mime-momentum": {"beta": 0.7},
    "fedsmoo": {"rho": 0.2, "lam": 0.3},
    "qfedavg": {"q": 2.0},
    "pfedme": {"lam": 2.0, "K": 3, "eta_p": 0.2, "beta": 0.7, "decay": 0.001},
    "fedavgm": {"beta": 0.9},
    "fedadagrad": {"eta": 0.1, "tau": 0.01},
    "fedyogi": {"eta": 0.1, "tau": 0.01, "beta2": 0.99},
    "fedadam": {"eta": 0.1, "tau": 0.01, "beta2": 0.99},
    "fedexp": {"epsilon": 0.001},
    "fedsam": {"rho": 0.5},
    "fedntd": {"beta": 1.0, "temperature": 2.0},
    "fedbuff": {"size": 3},
    "ca2fl": {"size": 3},
    "fedasync": {"alpha": 0.4},
}
"""Options of methods where a paper leaves a choice."""


def case(method: str, **given: object) -> Case:
    """Create a case with the method's options."""
    return Case(method, OPTIONS.get(method, {}), **given)  # type: ignore[arg-type]


FULL, HALF, SHORT = {"rounds": 300}, {"rounds": 600, "participation": 0.5}, {"rounds": 20}
TABLE: dict[str, Case] = {
    "FedAvg": case("fedavg", **FULL),
    "FedProx 0.5": case("fedprox", **FULL),
    "SCAFFOLD": case("scaffold", **FULL),
    "SCAFFOLD, option I": case("scaffold-1", **FULL),
    "SCAFFOLD, 50%": case("scaffold", **HALF),
    "FedDyn 0.1": Case("feddyn", {"alpha": 0.1}, rounds=300),
    "FedDyn 0.5": case("feddyn", **FULL),
    "FedDyn 0.5, 50%": case("feddyn", **HALF),
    "Mime": case("mime", **FULL),
    "pFedMe": case("pfedme", **SHORT),
    "FedAvgM": case("fedavgm", **SHORT),
    "FedAdagrad": case("fedadagrad", **SHORT),
    "FedYogi": case("fedyogi", **SHORT),
    "FedAdam": case("fedadam", **SHORT),
}
FIRST = 20
"""Number of rounds over which trajectories are compared; afterwards only the limit matters."""


def deviation(run: Runner, asked: Case, rounds: int | None = None) -> float:
    """Return the largest difference of a model entry from the paper's, over the first ``rounds``."""
    return measured(run, asked, rounds)[0]


def measured(run: Runner, asked: Case, rounds: int | None = None) -> tuple[float, float]:
    """Return the deviation over the first ``rounds``, and the distance of the last model from the optimum."""
    trace = run(asked)
    if len(trace.models) != asked.rounds:
        raise ValueError(f"{len(trace.models)} models came of {asked.rounds} rounds.")
    expected = paper(asked, trace.cohorts).models[:rounds]
    apart = max(np.abs(a - b).max() for a, b in zip(trace.models, expected, strict=False))
    return float(apart), distance(trace.models[-1], asked.make(), asked.weights)


def reproduced(run: Runner, asked: Case, changed: Callable[..., Iterator[Array]], rounds: int = 8) -> float:
    """Return the largest difference from the paper's algorithm with a change, over a few rounds."""
    few = replace(asked, rounds=rounds)
    trace = run(few)
    pairs = zip(trace.models, changed(Run(few, trace.cohorts), **few.options), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def distance(model: Array, problem: Problem, weights: str = "uniform") -> float:
    """Return the distance from the optimum of the objective with the given client weights."""
    return float(np.linalg.norm(model - problem.optimum(weights)))


def descent(problem: Problem, rounds: int, lr: float, weights: str) -> list[Array]:
    """Run gradient descent on the whole objective."""
    w, path, shares = problem.start(), [], problem.shares(weights)
    for _ in range(rounds):
        w = w - lr * sum(share * problem.gradient(k, w) for k, share in enumerate(shares))
        path.append(w)
    return path
