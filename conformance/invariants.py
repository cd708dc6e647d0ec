"""What holds whatever the library: each is a number that must be zero to rounding, or raises nothing and is true."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from conformance.cases import Runner, case, descent, deviation, distance
from conformance.problem import Problem, equal_clients, problem, repeated_points

ONE_STEP = ("fedavg", "fedprox", "scaffold", "scaffold-1", "fedprox+scaffold", "fednova", "fedpvr", "ditto", "fedbn")
"""Methods that with one local step and all clients are gradient descent."""
EQUAL = ("fedavg", "scaffold", "scaffold-1", "fednova", "fedexp", "fedpvr", "ditto", "fedbn")
"""Methods that do nothing of their own where all clients are the same."""
VARIATES = ("scaffold", "scaffold-1", "feddyn", "fedpvr")
"""Methods whose variates lead to the optimum of the objective that the weights name."""
BY_SAMPLES = ("fedavg", "fedprox", "fednova", "fedavgm", "fedexp", "fedsam", "fedbuff", "ca2fl", *VARIATES)
"""Methods whose average may weigh clients by their samples."""
UNEQUAL = (10, 90, 20, 80, 30, 70, 40, 60)


def unequal_sizes() -> Problem:
    """Clients of other sizes."""
    return problem(UNEQUAL)


def follows_the_paper(run: Runner, method: str, participation: float) -> float:
    """The trajectory is the paper's, at full and at partial participation."""
    return deviation(run, case(method, rounds=3, steps=2, participation=participation))


def one_step_is_gradient_descent(run: Runner, method: str) -> float:
    """A round of one local step is a step of gradient descent on the mean objective."""
    asked = case(method, rounds=3, steps=1)
    path = descent(asked.make(), 3, asked.lr, "uniform")
    return max(float(np.abs(a - b).max()) for a, b in zip(run(asked).models, path, strict=True))


def equal_clients_are_one(run: Runner, method: str) -> float:
    """Where all clients hold the same, a round is as many steps of gradient descent."""
    asked = replace(case(method, rounds=3, steps=2), make=equal_clients)
    path = descent(asked.make(), 6, asked.lr, "uniform")[1::2]
    return max(float(np.abs(a - b).max()) for a, b in zip(run(asked).models, path, strict=True))


def no_proximal_term_is_fedavg(run: Runner) -> float:
    """FedProx with ``mu = 0`` is FedAvg."""
    without, prox = case("fedavg", rounds=3, steps=2), replace(case("fedprox", rounds=3, steps=2), options={"mu": 0.0})
    pairs = zip(run(without).models, run(prox).models, strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def fedprox_by_mu(run: Runner, rounds: int = 20) -> list[float]:
    """Distances from the optimum for rising ``mu``, which must fall: the term holds back the drift."""
    asked = case("fedprox", rounds=rounds)
    mus = [0.0, 0.5, 1.0]
    return [distance(run(replace(asked, options={"mu": mu})).models[-1], asked.make()) for mu in mus]


def weights_name_the_objective(run: Runner, method: str, weights: str, participation: float = 1.0) -> float:
    """Clients of unequal sizes: the trajectory is the paper's with these weights."""
    asked = case(method, rounds=3, steps=2, weights=weights, participation=participation)
    return deviation(run, replace(asked, make=unequal_sizes))


def one_step_descends_the_objective(run: Runner, weights: str) -> float:
    """Clients of unequal sizes: one local step of FedAvg descends the objective that the weights name."""
    asked = case("fedavg", rounds=3, steps=1, weights=weights)
    path = descent(unequal_sizes(), 3, asked.lr, weights)
    models = run(replace(asked, make=unequal_sizes)).models
    return max(float(np.abs(a - b).max()) for a, b in zip(models, path, strict=True))


def unequal_steps(run: Runner, method: str) -> float:
    """Clients that take unequal numbers of local steps."""
    return deviation(run, replace(case(method, rounds=3, steps=None), make=repeated_points))


def fixed_point(run: Runner, method: str, weights: str, participation: float, rounds: int) -> dict[str, float]:
    """Where a method ends up with unequal sizes: how far from each of the two optima."""
    asked = case(method, rounds=rounds, weights=weights, participation=participation)
    last = run(replace(asked, make=unequal_sizes)).models[-1]
    return {name: distance(last, unequal_sizes(), name) for name in ("uniform", "samples")}
