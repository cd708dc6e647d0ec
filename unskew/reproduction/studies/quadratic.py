"""FedAvg on quadratics whose data are shuffled in part: Figure 2 of Fedssyn (Appendix A.3.2), as one tensor program.

Li et al. 2023, arXiv:2306.13263. Worker ``i = 1 ... n`` holds ``m`` pairs ``(A_ij, b_ij)`` with ``A_ij = i I`` and minimizes
``1/(2m) sum_j ||A_ij x - b_ij||^2`` over ``x`` of dimension ``d``::

    mu_i ~ N(0, zeta^2 / (i^2 d) I),    b_ij ~ N(mu_i, sigma^2 / (i^2 d) I),    so that E ||grad f_i(0)||^2 = zeta^2

(the paper prints the variance ``zeta^2 / (i d)^2``, for which this does not hold). Shuffling a share ``p``: each worker gives
``floor(p m)`` random pairs to a pool, which is permuted and dealt out again in equal parts. A round: every worker goes from
the server's point through its pairs in random order, ``x <- x - gamma A (A x - b)``; the server averages.

Because every ``A`` is a multiple of the identity, a pass is ``x <- (prod_j (1 - gamma a_j^2)) x + sum_j w_j b_j`` with
``w_j = gamma a_j prod_{l after j} (1 - gamma a_l^2)``. So all workers, shares and step sizes take a round in one product of
matrices, exactly as one by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unskew.seeding import generator


@dataclass(frozen=True)
class QuadraticProblem:
    """Data pairs ``(A_ij, b_ij)`` of all workers after shuffling, for each of ``P`` shares ``p``.

    Attributes:
        a: Curvatures, ``[P, n, m]``: ``A_ij = a_ij I``.
        b: Targets, ``[P, n, m, d]``.
        optimum: Minimum of the workers' mean loss, ``[d]``; it does not depend on the shuffling.
    """

    a: Tensor
    b: Tensor
    optimum: Tensor

    @property
    def smoothness(self) -> Tensor:
        """Largest smoothness constant of a worker's loss for each share, ``L_p = max_i mean_j a_ij^2``, ``[P]``."""
        return self.a.square().mean(2).amax(1)

    def dissimilarity(self, x: Tensor) -> Tensor:
        """Return the dissimilarity for each share, ``zeta_p^2 = mean_i ||grad f_i(x) - grad f(x)||^2``, ``[P]``."""
        gradients = (self.a.square().mean(2)[..., None] * x) - (self.a[..., None] * self.b).mean(2)
        return (gradients - gradients.mean(1, keepdim=True)).square().sum(2).mean(1)

    def rows(self, which: list[int]) -> QuadraticProblem:
        """Return the problem for the shares with these indices."""
        return QuadraticProblem(self.a[which], self.b[which], self.optimum)


def make_problem(
    shares: list[float], zeta2: float, sigma2: float, seed: int, workers: int = 10, d: int = 25, m: int = 100
) -> QuadraticProblem:
    """Draw the workers' pairs and shuffle them for each share; all shares shuffle the same pairs.

    Args:
        shares: Shares ``p`` of each worker's pairs that are shuffled among the workers.
        zeta2: Dissimilarity of the workers' gradients at 0, in expectation.
        sigma2: Noise of a worker's gradients at 0, in expectation.
        seed: Random seed of the pairs and of the shuffling.
        workers: Number of workers ``n``.
        d: Dimension.
        m: Number of pairs of each worker.
    """
    draws = generator(seed, "quadratic problem")
    scale = torch.arange(1, workers + 1, dtype=torch.float64)
    means = torch.randn(workers, 1, d, generator=draws, dtype=torch.float64) * math.sqrt(zeta2 / d)
    noise = torch.randn(workers, m, d, generator=draws, dtype=torch.float64) * math.sqrt(sigma2 / d)
    b = (means + noise) / scale[:, None, None]
    a = scale[:, None].expand(workers, m)
    optimum = (a[..., None] * b).mean((0, 1)) / a.square().mean()
    all_a, all_b = [], []
    for number, p in enumerate(shares):
        order = generator(seed, "quadratic shuffle", number)
        pooled = math.floor(p * m + 1e-9)
        assignment = torch.argsort(torch.rand(workers, m, generator=order), dim=1)
        mixed_a, mixed_b = a.gather(1, assignment), b.gather(1, assignment[..., None].expand_as(b))
        pool = torch.randperm(workers * pooled, generator=order)
        mixed_a[:, :pooled] = mixed_a[:, :pooled].reshape(-1)[pool].view(workers, pooled)
        mixed_b[:, :pooled] = mixed_b[:, :pooled].reshape(-1, d)[pool].view(workers, pooled, d)
        all_a.append(mixed_a)
        all_b.append(mixed_b)
    return QuadraticProblem(torch.stack(all_a), torch.stack(all_b), optimum)


def fedavg(problem: QuadraticProblem, steps: Tensor, rounds: int, seed: int) -> Tensor:
    """Run FedAvg with every share and step size at the same time, and return the errors.

    Args:
        problem: The workers' pairs, for ``P`` shares.
        steps: Step sizes ``gamma``: ``[G]`` for all shares, or ``[P, G]`` for each share.
        rounds: Communication rounds; all workers take part in each.
        seed: Random seed of the order of the pairs, which is the same for all shares and step sizes.

    Returns:
        Errors ``||x - x*||^2`` after every round, ``[rounds, P, G]``; not finite where a step size diverges.
    """
    (shares, workers, m), d = problem.a.shape, problem.b.shape[-1]
    gamma = steps.to(torch.float64).expand(shares, -1)
    x = torch.ones(shares, gamma.shape[1], d, dtype=torch.float64)
    draws = generator(seed, "quadratic order")
    errors = torch.empty(rounds, shares, gamma.shape[1], dtype=torch.float64)
    for t in range(rounds):
        order = torch.argsort(torch.rand(workers, m, generator=draws), dim=1).expand(shares, -1, -1)
        # Pairs are indexed backwards in time, so that the factors of all later steps are a running product.
        a, b = problem.a.gather(2, order), problem.b.gather(2, order[..., None].expand_as(problem.b))
        factor = 1 - gamma[:, None, :, None] * a.square()[:, :, None]  # [P, n, G, m]
        product = torch.cumprod(factor, dim=3)
        later = torch.cat([torch.ones_like(product[..., :1]), product[..., :-1]], dim=3)
        moved = (later * (gamma[:, None, :, None] * a[:, :, None])) @ b  # [P, n, G, d]
        x = product[..., -1].mean(1)[..., None] * x + moved.mean(1)
        errors[t] = (x - problem.optimum).square().sum(2)
    return errors


def best_rounds(errors: Tensor, accuracies: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first round, from 1, in which the error is at most each accuracy, with the best step size.

    Args:
        errors: Result of ``fedavg``, ``[rounds, P, G]``.
        accuracies: Errors to reach, ``[E]``.

    Returns:
        Rounds ``[P, E]``, NaN where no step size reaches the accuracy, and indices of the best step sizes, ``[P, E]``.
    """
    best, which = [], []
    for accuracy in accuracies:
        reached = torch.nan_to_num(errors, nan=math.inf) <= accuracy
        first = torch.where(reached.any(0), reached.to(torch.int64).argmax(0) + 1.0, math.inf)
        value, index = first.min(1)
        best.append(torch.where(value.isinf(), math.nan, value))
        which.append(index)
    return torch.stack(best, 1), torch.stack(which, 1)


def fit_rounds(accuracies: np.ndarray, rounds: np.ndarray) -> tuple[float, float]:
    """Fit ``A`` and ``B`` of ``R = A / sqrt(eps) + B`` by least squares; NaN with fewer than two points.

    Args:
        accuracies: Accuracies ``eps``, ``[n]``.
        rounds: Rounds to reach each of them, ``[n]``.

    >>> fit_rounds(np.array([1e-4, 1e-6]), np.array([103.0, 1003.0]))
    (1.0, 3.0)
    """
    reached = np.isfinite(rounds)
    if reached.sum() < 2:
        return math.nan, math.nan
    slope, offset = np.polyfit(1 / np.sqrt(accuracies[reached]), rounds[reached], 1)
    return round(float(slope), 12), round(float(offset), 9)


def fit_rounds_chained(accuracies: np.ndarray, rounds: np.ndarray) -> list[float]:
    """Fit as the authors do: non-negative least squares, with ``A`` and ``B`` at most those of the previous share.

    Args:
        accuracies: Accuracies ``eps``, ``[E]``.
        rounds: Rounds to reach each accuracy, ``[P, E]``, in order of increasing shares.

    Returns:
        Coefficients ``A_p`` of each share, ``[P]``.
    """
    from scipy.optimize import lsq_linear

    slopes, upper = [], np.array([np.inf, np.inf])
    for row in rounds:
        reached = np.isfinite(row)
        if reached.sum() < 2:
            slopes.append(math.nan)
            continue
        basis = np.stack([1 / np.sqrt(accuracies[reached]), np.ones(reached.sum())], 1)
        solution = lsq_linear(basis, row[reached], bounds=(0, upper)).x
        slopes.append(float(solution[0]))
        upper = np.maximum(solution, 1e-12)
    return slopes


def predicted_ratio(p: np.ndarray, largest: float, average: float) -> np.ndarray:
    """Predict ``A_p / A_0`` without noise: ``(1 - p) sqrt(L_p / L_0)`` with ``L_p = (1 - p) L_max + p L_avg``.

    This follows from Corollary I of Fedssyn.

    Args:
        p: Shares of shuffled pairs, ``[n]``.
        largest: Smoothness constant ``L_max``.
        average: Smoothness constant ``L_avg``.
    """
    return np.asarray((1 - p) * np.sqrt(1 - p + p * average / largest))
