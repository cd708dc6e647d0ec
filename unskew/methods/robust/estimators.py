"""Robust estimators of the center of points: pure functions of ``points [n, d]`` and a number ``f`` of suspected points.

Papers: coordinate-wise median and trimmed mean, Yin et al. 2018, arXiv:1803.01498; Krum, Blanchard et al. 2017,
arXiv:1703.02757; Bulyan, El Mhamdi et al. 2018, arXiv:1802.07927; geometric median (RFA), Pillutla et al. 2019,
arXiv:1912.13445; centered clipping, Karimireddy et al. 2021, arXiv:2012.10333; bucketing, Karimireddy et al. 2020,
arXiv:2006.09365; nearest-neighbor mixing, Allouah et al. 2023, arXiv:2302.01772.

No result depends on the order of the points, up to rounding: ties between distances or scores go to the point that comes
first in lexicographic order, ties between values to the smaller one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TOLERANCE, MOST_STEPS = 1e-10, 1000
"""Length of the sum of unit vectors to all points at which the geometric median has converged; largest number of steps."""
CHUNK = 1 << 16
"""Number of coordinates that are converted to float64 at once."""


def bounded(points: Tensor) -> Tensor:
    """Limit entries to magnitudes for which no norm, distance or sum of all points overflows, ``[n, d]``.

    The limit is far above every honest value: 1.5e15 for ten points of a million float32 entries. NaN becomes the limit.

    Args:
        points: Points, ``[n, d]``.
    """
    limit = math.sqrt(torch.finfo(points.dtype).max / (16 * max(1, points.numel())))
    return points.nan_to_num(nan=limit, posinf=limit, neginf=-limit).clamp_(-limit, limit)


def lexicographic_order(points: Tensor) -> Tensor:
    """Return the indices of the points in lexicographic order of their entries, ``[n]``."""
    ranks: Tensor = torch.unique(points, dim=0, return_inverse=True)[1]
    return ranks.argsort(stable=True)


def coordinate_median(points: Tensor) -> Tensor:
    """Compute the median of each coordinate, ``[d]``; the mean of the two middle values if ``n`` is even.

    >>> coordinate_median(torch.tensor([[1.0], [9.0], [2.0], [4.0]]))
    tensor([3.])
    """
    n = len(points)
    middle = points.sort(dim=0).values[(n - 1) // 2 : n // 2 + 1]
    return middle.mean(dim=0)


def trimmed_mean(points: Tensor, f: int) -> Tensor:
    """Compute the mean of each coordinate without its ``f`` largest and ``f`` smallest values, ``[d]``.

    Args:
        points: Points, ``[n, d]`` with ``n > 2 f``.
        f: Number of suspected points.

    >>> trimmed_mean(torch.tensor([[-50.0], [1.0], [3.0], [90.0]]), 1)
    tensor([2.])
    """
    return points.sort(dim=0).values[f : len(points) - f].mean(dim=0)


def squared_distances(points: Tensor) -> Tensor:
    """Compute all pairs of squared Euclidean distances, ``[n, n]``, without a tensor of ``n^2 d`` values."""
    distances = torch.stack([(points - point).square().sum(dim=1) for point in points])
    return torch.minimum(distances, distances.T)  # the same for both directions, whatever the order of the summation


def krum_scores(distances: Tensor, neighbors: int) -> Tensor:
    """Compute the sum of squared distances of each point to its nearest other points, ``[n]``.

    Args:
        distances: Squared distances, ``[n, n]``.
        neighbors: Number of nearest points that count.
    """
    return distances.sort(dim=1).values[:, 1 : 1 + neighbors].sum(dim=1)


def krum_order(points: Tensor, f: int) -> Tensor:
    """Return the indices of the points by increasing Krum score, ``[n]``.

    Args:
        points: Points, ``[n, d]`` with ``n > f + 2``.
        f: Number of suspected points; the score counts the ``n - f - 2`` nearest neighbors.
    """
    order = lexicographic_order(points)
    neighbors = max(1, len(points) - f - 2)
    return order[krum_scores(squared_distances(points[order]), neighbors).argsort(stable=True)]


def bulyan(points: Tensor, f: int) -> Tensor:
    """Select ``n - 2 f`` points by repeated Krum, then average per coordinate the ``n - 4 f`` values nearest to the median.

    Args:
        points: Points, ``[n, d]`` with ``n >= 4 f + 3``.
        f: Number of suspected points.
    """
    n = len(points)
    points = points[lexicographic_order(points)]
    distances = squared_distances(points)
    remaining = list(range(n))
    selected: list[int] = []
    for _ in range(n - 2 * f):
        among = distances[remaining][:, remaining]
        neighbors = min(len(remaining) - 1, max(1, len(remaining) - f - 2))
        best = int(krum_scores(among, neighbors).argsort(stable=True)[0])
        selected.append(remaining.pop(best))
    chosen = points[selected].sort(dim=0).values
    order = (chosen - coordinate_median(chosen)).abs().argsort(dim=0, stable=True)
    return chosen.gather(0, order[: n - 4 * f]).mean(dim=0)


def geometric_median(points: Tensor) -> Tensor:
    """Compute the point with the smallest sum of distances, ``[d]``.

    Weiszfeld's steps start from the coordinate-wise median, so that no minority decides how long they take. A center that
    coincides with points moves as Vardi and Zhang 2000 (PNAS 97(4)) derive: only if the other points outweigh them. If the
    steps do not converge, and the other points do not outweigh the nearest one, that point is the median. The steps run in
    float64 in a rotated space of ``n`` dimensions that contains the points, and each column of the rotation has a small
    relative error, so points far away do not make the others less exact.

    Args:
        points: Points, ``[n, d]``.
    """
    if points.device.type == "mps":  # it has no float64
        return geometric_median(points.cpu()).to(points.device)
    start = coordinate_median(points)
    rotated = torch.zeros(0, len(points), dtype=torch.float64, device=points.device)
    for chunk, middle in zip(torch.split(points, CHUNK, dim=1), torch.split(start, CHUNK), strict=True):
        rotated = torch.linalg.qr(torch.cat([rotated, (chunk.double() - middle.double()).T]), mode="r").R
    offsets = rotated.T
    spread = offsets.norm(dim=1).median()
    shares = torch.zeros_like(offsets[:, 0])  # of the offsets in the center
    for _ in range(MOST_STEPS):
        center = shares @ offsets
        distances = (offsets - center).norm(dim=1)
        weights = torch.where(distances > TOLERANCE * spread, 1 / distances, 0)
        pull = (weights @ (offsets - center)).norm()
        stay = ((weights == 0).sum() / pull).clamp_max(1)
        if not pull * (1 - stay) > TOLERANCE:  # also if all points are equal, which gives NaN
            break
        shares = (1 - stay) * weights / weights.sum() + stay * shares
    else:  # steps towards a point in which the others just balance become ever shorter
        from_nearest = offsets - offsets[distances.argmin()]
        lengths = from_nearest.norm(dim=1)
        others = lengths > TOLERANCE * spread
        if (from_nearest[others] / lengths[others, None]).sum(0).norm() <= (~others).sum() * (1 + TOLERANCE):
            shares = (~others).to(shares) / (~others).sum()
    median = start.double()
    for share, point in zip(shares, points, strict=True):
        median = median + share * (point.double() - start.double())
    return median.to(points.dtype)


def weiszfeld_steps(points: Tensor, steps: int, smoothing: float) -> Tensor:
    """Approximate the geometric median by smoothed Weiszfeld steps from the mean, as the authors' code does, ``[d]``.

    Args:
        points: Points, ``[n, d]``.
        steps: Number of steps.
        smoothing: Smallest distance that is divided by.
    """
    center = points.mean(dim=0)
    for _ in range(steps):
        weights = 1 / (points - center).norm(dim=1).clamp_min(smoothing)
        center = (weights @ points) / weights.sum()
    return center


def centered_clipping(points: Tensor, center: Tensor, tau: float, steps: int) -> Tensor:
    """Move a center repeatedly by the mean of the differences to the points, each clipped to the norm ``tau``, ``[d]``.

    Args:
        points: Points, ``[n, d]``.
        center: Initial center, ``[d]``.
        tau: Largest norm of a difference.
        steps: Number of steps.
    """
    for _ in range(steps):
        differences = points - center
        norms = differences.norm(dim=1, keepdim=True)
        scale = (tau / norms.clamp_min(torch.finfo(points.dtype).tiny)).clamp_max(1.0)
        center = center + (differences * scale).mean(dim=0)
    return center


def bucket_means(points: Tensor, order: Tensor, size: int) -> Tensor:
    """Average groups of points, ``[ceil(n / size), d]``; the last group may be smaller.

    Args:
        points: Points, ``[n, d]``.
        order: Permutation of the points, ``[n]``.
        size: Number of points in a group.
    """
    return torch.stack([group.mean(dim=0) for group in torch.split(points[order], size)])


def nearest_neighbor_means(points: Tensor, f: int) -> Tensor:
    """Replace every point by the mean of its ``n - f`` nearest points, itself included, ``[n, d]``.

    Args:
        points: Points, ``[n, d]``.
        f: Number of suspected points.
    """
    order = lexicographic_order(points)
    nearest = squared_distances(points)[:, order].argsort(dim=1, stable=True)[:, : len(points) - f]
    return torch.stack([points[order[index]].mean(dim=0) for index in nearest])
