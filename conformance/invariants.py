"""Invariants of any library: each is a number that must be zero up to rounding, or a condition that must be true."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from conformance.cases import Runner, case, descent, deviation, distance
from conformance.problem import Problem, equal_clients, problem, repeated_points

ONE_STEP = ("fedavg", "fedprox", "scaffold", "scaffold-1", "fedprox+scaffold", "fednova", "fedpvr", "ditto", "fedbn")
"""Methods that equal gradient descent with one local step and all clients."""
EQUAL = ("fedavg", "scaffold", "scaffold-1", "fednova", "fedexp", "fedpvr", "ditto", "fedbn")
"""Methods that equal FedAvg if all clients are equal."""
VARIATES = ("scaffold", "scaffold-1", "feddyn", "fedpvr")
"""Methods whose variates lead to the optimum of the objective with the given client weights."""
BY_SAMPLES = ("fedavg", "fedprox", "fednova", "fedavgm", "fedexp", "fedsam", "fedbuff", "ca2fl", *VARIATES)
"""Methods that may weight clients by their samples."""
UNEQUAL = (10, 90, 20, 80, 30, 70, 40, 60)


def unequal_sizes() -> Problem:
    """Return a problem whose clients differ in size."""
    return problem(UNEQUAL)


def follows_the_paper(run: Runner, method: str, participation: float) -> float:
    """Compare the trajectory with the paper's, at the given participation."""
    return deviation(run, case(method, rounds=3, steps=2, participation=participation))


def one_step_is_gradient_descent(run: Runner, method: str) -> float:
    """Compare a round of one local step with a step of gradient descent on the mean objective."""
    test_case = case(method, rounds=3, steps=1)
    path = descent(test_case.make(), 3, test_case.lr, "uniform")
    return max(float(np.abs(a - b).max()) for a, b in zip(run(test_case).models, path, strict=True))


def equal_clients_are_one(run: Runner, method: str) -> float:
    """If all clients have the same data, compare a round with the same number of steps of gradient descent."""
    test_case = replace(case(method, rounds=3, steps=2), make=equal_clients)
    path = descent(test_case.make(), 6, test_case.lr, "uniform")[1::2]
    return max(float(np.abs(a - b).max()) for a, b in zip(run(test_case).models, path, strict=True))


def no_proximal_term_is_fedavg(run: Runner) -> float:
    """Compare FedProx with ``mu = 0`` with FedAvg."""
    without, prox = case("fedavg", rounds=3, steps=2), replace(case("fedprox", rounds=3, steps=2), options={"mu": 0.0})
    pairs = zip(run(without).models, run(prox).models, strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def fedprox_by_mu(run: Runner, rounds: int = 20) -> list[float]:
    """Return distances from the optimum for increasing ``mu``; they must decrease, as the term limits client drift."""
    test_case = case("fedprox", rounds=rounds)
    mus = [0.0, 0.5, 1.0]
    return [distance(run(replace(test_case, options={"mu": mu})).models[-1], test_case.make()) for mu in mus]


def weights_name_the_objective(run: Runner, method: str, weights: str, participation: float = 1.0) -> float:
    """With clients of unequal sizes, compare the trajectory with the paper's for these weights."""
    test_case = case(method, rounds=3, steps=2, weights=weights, participation=participation)
    return deviation(run, replace(test_case, make=unequal_sizes))


def one_step_descends_the_objective(run: Runner, weights: str) -> float:
    """With clients of unequal sizes, compare one local step of FedAvg with gradient descent for these weights."""
    test_case = case("fedavg", rounds=3, steps=1, weights=weights)
    path = descent(unequal_sizes(), 3, test_case.lr, weights)
    models = run(replace(test_case, make=unequal_sizes)).models
    return max(float(np.abs(a - b).max()) for a, b in zip(models, path, strict=True))


def unequal_steps(run: Runner, method: str) -> float:
    """Compare the trajectory with the paper's if clients take unequal numbers of local steps."""
    return deviation(run, replace(case(method, rounds=3, steps=None), make=repeated_points))


def fixed_point(run: Runner, method: str, weights: str, participation: float, rounds: int) -> dict[str, float]:
    """Return the distance of the final model from each of the two optima, with clients of unequal sizes."""
    test_case = case(method, rounds=rounds, weights=weights, participation=participation)
    last = run(replace(test_case, make=unequal_sizes)).models[-1]
    return {name: distance(last, unequal_sizes(), name) for name in ("uniform", "samples")}
