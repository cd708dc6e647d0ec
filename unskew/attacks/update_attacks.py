"""Attacks on updates: functions of the round's honest updates ``[n, d]``, or of the attacker's own update ``[d]``."""

from __future__ import annotations

from statistics import NormalDist

import torch
from torch import Tensor

from unskew.seeding import generator


def gaussian(like: Tensor, sigma: float, seed: int, round: int, client: int) -> Tensor:
    """Return noise ``N(0, sigma^2)``, ``[d]``; the same on every device.

    Args:
        like: Update with the shape, the dtype and the device of the result, ``[d]``.
        sigma: Standard deviation of each entry.
        seed: Seed of the run.
        round: Number of the round, from 0.
        client: Number of the attacker.
    """
    noise = torch.randn(like.shape, generator=generator(seed, "attack noise", round, client), dtype=torch.float64)
    return (sigma * noise).to(like)


def ipm(honest: Tensor, epsilon: float) -> Tensor:
    """Inner-product manipulation (Xie et al. 2019, arXiv:1903.03936): ``-epsilon`` times the mean, ``[d]``.

    Args:
        honest: Honest updates of the round, ``[n, d]``.
        epsilon: Factor of the mean.
    """
    return -epsilon * honest.mean(0)


def alie(honest: Tensor, z: float) -> Tensor:
    """A little is enough (Baruch et al. 2019, arXiv:1902.06156): the mean minus ``z`` standard deviations, ``[d]``.

    The standard deviation of each coordinate divides by ``n - 1``; it is 0 for a single honest update.

    Args:
        honest: Honest updates of the round, ``[n, d]``.
        z: Number of standard deviations.
    """
    mean = honest.mean(0)
    return mean if len(honest) < 2 else mean - z * honest.std(0, correction=1)


def alie_z(clients: int, attackers: int) -> float:
    """Return the largest number of standard deviations at which a majority supports the attackers.

    With ``s = floor(n/2 + 1) - a`` this is the quantile ``Phi^-1((n - a - s) / (n - a))``. If the attackers are a
    majority themselves, ``s`` is 1. The result is at least 0.

    Args:
        clients: Number of clients of the round ``n``, attackers included.
        attackers: Number of attackers ``a``, below ``n``.

    >>> [round(alie_z(n, a), 5) for n, a in ((25, 5), (50, 12), (20, 4), (10, 2))]
    [0.25335, 0.33604, 0.15731, 0.0]
    """
    honest = clients - attackers
    supporters = max(1, clients // 2 + 1 - attackers)
    share = (honest - supporters) / honest
    return NormalDist().inv_cdf(share) if share > 0.5 else 0.0


def principal_direction(honest: Tensor, before: Tensor | None = None) -> Tensor:
    """Return the direction of largest variance of the honest updates, ``[d]``.

    Its length is the square root of the sum of squares along it, so that several rounds can be combined: the direction
    of earlier rounds counts as one more centered update. With its sign, the farthest update has a positive projection.

    Args:
        honest: Honest updates of the round, ``[n, d]``.
        before: Direction of earlier rounds, ``[d]``, or None.
    """
    centered = honest - honest.mean(0)
    rows = centered if before is None else torch.cat([before[None], centered])
    # The eigenvectors of the small matrix [n, n] give those of the covariance [d, d].
    products = (rows @ rows.T).to(device="cpu", dtype=torch.float64)
    largest = torch.linalg.eigh(products).eigenvectors[:, -1]
    direction: Tensor = largest.to(rows) @ rows
    along = centered @ direction
    return direction if along[along.abs().argmax()] >= 0 else -direction


def mimic(honest: Tensor, direction: Tensor) -> Tensor:
    """Return the honest update that is farthest along a direction, ``[d]`` (Karimireddy et al. 2020, arXiv:2006.09365).

    Args:
        honest: Honest updates of the round, ``[n, d]``.
        direction: Direction of largest variance, ``[d]``.
    """
    return honest[((honest - honest.mean(0)) @ direction).argmax()]
