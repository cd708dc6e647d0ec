"""Theory of training on real and shuffled synthetic data: Fedssyn's Lemma 1 and Corollary I.

Li, Esfandiari, Schmidt, Alstrøm, Stich, "Synthetic data shuffling accelerates the convergence of federated learning under
data heterogeneity", 2023, arXiv:2306.13263. A client's data consist of a share ``1 - p`` of its own samples and a share ``p``
of synthetic samples that were shuffled over the clients. ``zeta^2`` is the dissimilarity of the clients' gradients,
``sigma^2`` a client's gradient noise, ``delta^2`` the squared distance of the mean gradients on real and synthetic data, and
``L`` the smoothness. In expectation over the shuffling::

    sigma_p^2 <= (1 - p) sigma^2 + p sigma~_avg^2 + p (1 - p) zeta^2 + p (1 - p) delta^2
    zeta_p^2  <= (1 - p)^2 zeta^2                       with equality if all clients have the same synthetic set
    L_p       <= (1 - p) L_max + p L~_avg

and FedAvg reaches accuracy ``epsilon`` after ``T = R tau`` local steps, up to constants::

    strongly convex   sigma^2 / (mu N eps) + sqrt(L) (tau zeta + sqrt(tau) sigma) / (mu sqrt(eps)) + (L tau / mu) log(1/eps)
    not convex        L sigma^2 / (N eps^2) + L (tau zeta + sqrt(tau) sigma) / eps^(3/2) + L tau / eps
"""

from __future__ import annotations

import math


def sigma2_bound(p: float, sigma2: float, synthetic: float, zeta2: float, delta2: float) -> float:
    """Return Lemma 1's bound on the noise ``sigma_p^2``.

    Args:
        p: Share of synthetic data.
        sigma2: Gradient noise of the clients.
        synthetic: Gradient noise ``sigma~_avg^2`` of the pool of synthetic data.
        zeta2: Gradient dissimilarity of the clients.
        delta2: Squared distance between the gradients of real and synthetic data.
    """
    return (1 - p) * sigma2 + p * synthetic + p * (1 - p) * (zeta2 + delta2)


def zeta2_bound(p: float, zeta2: float) -> float:
    """Return Lemma 1's bound on the dissimilarity ``zeta_p^2``.

    Args:
        p: Share of synthetic data.
        zeta2: Gradient dissimilarity of the clients.
    """
    return (1 - p) * (1 - p) * zeta2


def smoothness_bound(p: float, largest: float, synthetic: float) -> float:
    """Return Lemma 1's bound on the smoothness ``L_p``.

    Args:
        p: Share of synthetic data.
        largest: Largest smoothness constant of a client.
        synthetic: Smoothness constant ``L~_avg`` of the pool of synthetic data.
    """
    return (1 - p) * largest + p * synthetic


def iterations(
    epsilon: float, clients: int, tau: float, L: float, zeta2: float, sigma2: float, mu: float | None = None
) -> float:
    """Return Corollary I's local steps ``T`` to accuracy ``epsilon``, with all hidden constants set to 1.

    Args:
        epsilon: Accuracy: squared gradient norm, or with ``mu`` distance of the objective from its optimum.
        clients: Number of clients ``N``.
        tau: Local steps per round.
        L: Smoothness constant.
        zeta2: Gradient dissimilarity.
        sigma2: Gradient noise of a local step, which is that of single samples divided by the batch size.
        mu: Strong convexity constant; None for non-convex losses.

    >>> iterations(0.01, 10, 5, 1, 0, 0)  # L tau / epsilon
    500.0
    """
    drift, root = tau * math.sqrt(zeta2) + math.sqrt(tau * sigma2), math.sqrt(epsilon)
    if mu is None:
        return L * (sigma2 / clients / epsilon / epsilon + drift / epsilon / root + tau / epsilon)
    return (
        sigma2 / (mu * clients * epsilon)
        + math.sqrt(L) * drift / (mu * root)
        + L * tau / mu * max(0.0, math.log(1 / epsilon))
    )
