"""Convergence bounds of FedCOG (Ye et al. 2023, arXiv:2312.05966) and Feddle (Zhu et al. 2025, arXiv:2503.20138).

Both depend on constants that a run does not measure, so these are parameters of the functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from unskew.errors import ConfigError


def fedcog_bound(
    gap: float,
    weights: Sequence[float],
    smoothness: float,
    lr: float,
    local_steps: int,
    rounds: int,
    sigma2: float,
    beta2: float,
    kappa2: float,
) -> float:
    """Return the bound of FedCOG's Theorem 5.6 on the smallest squared gradient norm over the rounds.

    Args:
        gap: Objective value at the start of FedCOG, minus its infimum.
        weights: Weights ``p_k`` of the clients; they sum to 1.
        smoothness: Lipschitz constant ``L`` of the gradients.
        lr: Client learning rate ``η``.
        local_steps: Local steps ``τ`` per round.
        rounds: Number of rounds ``T``.
        sigma2: Variance ``σ²`` of the clients' stochastic gradients.
        beta2: Factor ``β²`` of the paper's bound on the dissimilarity of gradients.
        kappa2: Constant ``κ²`` of that bound.

    Raises:
        ConfigError: If the theorem does not apply: ``η L`` is above ``min(1/(2τ), 1/√(2τ(τ−1)(2β²+1)))``.
    """
    limit = 1 / (2 * local_steps)
    if local_steps > 1:
        limit = min(limit, 1 / math.sqrt(2 * local_steps * (local_steps - 1) * (2 * beta2 + 1)))
    if lr * smoothness > limit:
        raise ConfigError(
            f"Theorem 5.6 needs lr * smoothness of at most {limit:.4g}, not {lr * smoothness:.4g}; use a smaller lr."
        )
    drift = (local_steps - 1) * (lr * smoothness) ** 2
    start = 4 * gap / (local_steps * lr * rounds)
    noise = 4 * lr * smoothness * sigma2 * sum(p * p for p in weights) + 3 * drift * sigma2
    return start + noise + 6 * local_steps * drift * kappa2


def feddle_rate(local_steps: int, anchors: int, rounds: int, server_steps: int, gain: float) -> float:
    """Return Feddle's bound with in-domain data: its convergence rate relative to federated learning without a search.

    The factor is ``√(QMK) / (√(QMK) + C_T (K − √(M/Q)))`` with ``C_T = A_0 (1 − 4^−T)``. For out-of-domain data the paper
    adds a term ``O((1 − s) G K / L)`` with the cosine ``s`` of the two gradients, without its constant.

    Args:
        local_steps: Local steps ``Q``.
        anchors: Number of anchors ``M``.
        rounds: Number of rounds ``K``.
        server_steps: Search steps ``T`` per round.
        gain: Constant ``A_0`` of the paper.
    """
    root = math.sqrt(local_steps * anchors * rounds)
    searched = gain * (1 - 4.0**-server_steps)
    return root / (root + searched * (rounds - math.sqrt(anchors / local_steps)))
