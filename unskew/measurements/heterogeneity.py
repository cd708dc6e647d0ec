"""Heterogeneity of clients at one model, and the effect of shuffled synthetic data: section 4 of Fedssyn, measured.

Li et al. 2023, arXiv:2306.13263; the bounds are in ``unskew.measurements.fedssyn_bounds``. At a model ``x``, with
full gradients and ``N`` equally weighted clients::

    zeta^2    = mean_i || grad f(x, D_i) - grad f(x, D) ||^2,       grad f(x, D) = mean_i grad f(x, D_i)
    sigma_i^2 = mean_{xi in D_i} || grad F(x, xi) - grad f(x, D_i) ||^2
    delta^2   = || grad f(x, D) - grad f(x, D~) ||^2
    L_max, L_avg = largest absolute eigenvalue of a Hessian: over single f_i, and of their mean

If a share ``p`` of client ``i``'s data is its synthetic set ``D~_i``, its gradient is ``(1 - p) g_i + p g~_i`` and its noise
``(1 - p) sigma_i^2 + p sigma~_i^2 + p (1 - p) ||g_i - g~_i||^2``. So one pass over the data gives the left-hand sides of
Lemma 1 for every ``p``, except for ``L_p``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from unskew.data.federation import ClientData, Federation, take_rows
from unskew.errors import DataError
from unskew.measurements import fedssyn_bounds
from unskew.measurements.gradient_probe import GradientProbe, GroupMoments, Products, largest_eigenvalues
from unskew.seeding import derive, generator, normal, numpy_generator
from unskew.sums.base import SumRequest, Sums
from unskew.sums.statistics import Metrics, Statistic

Pair = tuple[Tensor, Tensor]
SyntheticOf = Callable[[int], Pair]
"""Returns the synthetic set ``x [n, ...], y`` of a client, as stored."""
METRICS = ("zeta2", "gradient2", "sigma2_mean", "sigma2_max", "sigma2_avg", "L_max", "L_avg")
"""Metrics of a measurement without synthetic data."""
Follow = Callable[[str, int, int], None]
"""Receives the name of the operation, the finished amount and the total."""


@dataclass(frozen=True)
class MeasurementScope:
    """Scope of a measurement and settings of its predictions.

    Attributes:
        clients: Maximum number of clients, drawn with the seed; None measures all.
        samples: Maximum number of samples per client, drawn with the seed; None uses all.
        shares: Shares ``p`` of synthetic data.
        curvature: Whether to measure ``L``, which takes most of the time.
        iterations, tolerance: Settings of the power iteration.
        tau: Local steps per round; ``batch``: samples per step.
        epsilon: Accuracy of Corollary I; None uses a tenth of ``||grad f(x, D)||^2``, with ``mu`` divided by ``2 mu``.
        mu: Strong convexity constant of the loss, or None.
        seed: Random seed.
    """

    clients: int | None = 100
    samples: int | None = 1000
    shares: tuple[float, ...] = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
    curvature: bool = True
    iterations: int = 30
    tolerance: float = 1e-6
    tau: float = 10.0
    batch: int = 64
    epsilon: float | None = None
    mu: float | None = None
    seed: int = 0


@dataclass
class HeterogeneityMeasurement:
    """Measurement at one model.

    Attributes:
        model_label: Name of the model, such as ``start``.
        metrics: ``zeta2``, ``gradient2``, ``sigma2_mean``, ``sigma2_max``, ``sigma2_avg`` (of the pool), ``L_max``,
            ``L_avg``; for synthetic data ``delta2``, ``sigma2_synthetic`` (of their pool) and ``L_synthetic``.
        shares: For each ``p``: measured ``zeta2``, ``sigma2`` and ``L``, their bounds by Lemma 1 with suffix ``_bound``, and
            Corollary I's rounds relative to ``p = 0``, from measured values (``rounds``) and bounds (``rounds_bound``).
    """

    model_label: str
    metrics: Metrics
    shares: list[Metrics] = field(default_factory=list)


@dataclass(frozen=True)
class GradientSkew(Statistic):
    """``zeta2``, ``gradient2``, ``sigma2_mean`` and ``sigma2_avg`` from sums over the clients, in float64.

    The other metrics of a measurement are not functions of sums, so they are None.

    Attributes:
        parameters: Number of parameters of the model.
    """

    parameters: int

    def first(self) -> list[SumRequest]:
        """Return the request for gradients at the initial model."""
        return [SumRequest("gradient", {"parameters": self.parameters})]

    def metrics(self, first: Sequence[Sums], second: Sequence[Sums]) -> Metrics:
        """Return the metrics."""
        K, norms, noise = first[0]["norms"].tolist()
        if not K:
            return dict.fromkeys(METRICS)
        mean = first[0]["gradient"] / K
        gradient2 = float(mean @ mean)
        zeta2 = max(0.0, norms / K - gradient2)
        return {
            **dict.fromkeys(METRICS),
            "zeta2": zeta2,
            "gradient2": gradient2,
            "sigma2_mean": noise / K,
            "sigma2_avg": noise / K + zeta2,
        }


def selected_clients(federation: Federation, scope: MeasurementScope) -> list[int]:
    """Return the clients to measure.

    Args:
        federation: Data of all clients.
        scope: Limits of the measurement.
    """
    total = len(federation.clients)
    if scope.clients is None or scope.clients >= total:
        return list(range(total))
    drawn = numpy_generator(scope.seed, "diagnosed clients").choice(total, scope.clients, replace=False)
    return sorted(map(int, drawn))


def selected_samples(client: ClientData, scope: MeasurementScope) -> Pair:
    """Return the samples of a client to measure.

    Args:
        client: Data of the client.
        scope: Limits of the measurement.
    """
    x, y = client.x, client.y
    if scope.samples is None or len(y) <= scope.samples:
        return x, y
    index = torch.randperm(len(y), generator=generator(scope.seed, "diagnosed samples", 0, client.id))[: scope.samples]
    index = index.sort().values.to(y.device)
    return take_rows(x, index), y[index]


def measure(
    probe: GradientProbe,
    federation: Federation,
    scope: MeasurementScope,
    synthetic: SyntheticOf | None = None,
    model_label: str = "model",
    follow: Follow | None = None,
) -> HeterogeneityMeasurement:
    """Measure heterogeneity at the probe's model.

    Args:
        probe: Computes gradients and Hessian products at the model.
        federation: Data of all clients.
        scope: Limits of the measurement.
        synthetic: Returns the synthetic set of a client; None skips the part on shares.
        model_label: Name of the model for messages.
        follow: Called with the progress.

    Raises:
        DataError: If the gradients are not finite.
    """
    ids = selected_clients(federation, scope)
    follow = follow or (lambda text, done, total: None)
    gradients, pool = GroupMoments(0, torch.zeros_like(probe.v)), GroupMoments(0, torch.zeros_like(probe.v))
    noise: list[tuple[float, float, float]] = []
    cross_scatter = 0.0  # joint scatter of real and synthetic gradients
    last: tuple[Pair, GroupMoments] | None = None
    for done, k in enumerate(ids):
        follow(f"gradients ({model_label})", done, len(ids))
        own_gradient = probe.moments(*selected_samples(federation.clients[k], scope))
        if synthetic is None:
            noise.append((own_gradient.variance, 0.0, 0.0))
        else:
            pair = synthetic(k)
            if last is None or last[0] is not pair:  # a set shared by all clients is measured once
                last = pair, probe.moments(*pair)
            other_gradient = last[1]
            noise.append(
                (
                    own_gradient.variance,
                    other_gradient.variance,
                    float((own_gradient.mean - other_gradient.mean).square().sum()),
                )
            )
            apart = own_gradient.mean - gradients.mean
            pool.add(1, other_gradient.mean)
            cross_scatter += float(apart @ (other_gradient.mean - pool.mean))
        gradients.add(1, own_gradient.mean)
    if not bool(torch.isfinite(gradients.mean).all()):
        raise DataError(
            f"The gradients ({model_label}) are not finite: the run diverged. Repeat the run with a smaller learning rate."
        )
    sigma2, sigma2_made, distance = (np.array(column) for column in zip(*noise, strict=True))
    zeta2 = gradients.variance
    metrics: Metrics = {
        "zeta2": zeta2,
        "gradient2": float(gradients.mean.square().sum()),
        "sigma2_mean": float(sigma2.mean()),
        "sigma2_max": float(sigma2.max()),
        "sigma2_avg": float(sigma2.mean()) + zeta2,
        "L_max": None,
        "L_avg": None,
    }
    result = HeterogeneityMeasurement(model_label, metrics)
    smooth: dict[str, float | list[float] | None] = {}
    if scope.curvature:
        smooth = curvature(probe, federation, scope, ids, synthetic, partial(follow, f"curvature ({model_label})"))
        metrics |= {name: smooth[name] for name in ("L_max", "L_avg")}  # type: ignore[misc]
    if synthetic is None:
        return result
    delta2 = float((gradients.mean - pool.mean).square().sum())
    metrics["delta2"] = delta2
    metrics["sigma2_synthetic"] = float(sigma2_made.mean()) + pool.variance
    metrics["L_synthetic"] = smooth.get("L_synthetic")  # type: ignore[assignment]
    measured_L = smooth.get("L_p")
    for number, p in enumerate(scope.shares):
        result.shares.append(
            {
                "p": p,
                "zeta2": (1 - p) ** 2 * zeta2 + p**2 * pool.variance + 2 * p * (1 - p) * cross_scatter / len(ids),
                "zeta2_bound": fedssyn_bounds.zeta2_bound(p, zeta2),
                "sigma2": float(((1 - p) * sigma2 + p * sigma2_made + p * (1 - p) * distance).mean()),
                "sigma2_bound": fedssyn_bounds.sigma2_bound(
                    p, float(sigma2.mean()), float(metrics["sigma2_synthetic"] or 0), zeta2, delta2
                ),
                "L": measured_L[number] if isinstance(measured_L, list) else None,
                "L_bound": None
                if metrics["L_max"] is None or metrics["L_synthetic"] is None
                else fedssyn_bounds.smoothness_bound(p, metrics["L_max"], metrics["L_synthetic"]),
            }
        )
    predict_rounds(result, scope, len(ids))
    return result


def curvature(
    probe: GradientProbe,
    federation: Federation,
    scope: MeasurementScope,
    ids: Sequence[int],
    synthetic: SyntheticOf | None,
    follow: Callable[[int, int], None],
) -> dict[str, float | list[float] | None]:
    """Measure ``L_max``, ``L_avg`` and, with synthetic data, ``L_synthetic`` and the largest ``L_p`` for each share.

    Args:
        probe: Computes gradients and Hessian products at the model.
        federation: Data of all clients.
        scope: Limits of the measurement.
        ids: Clients to measure.
        synthetic: Returns the synthetic set of a client, or None.
        follow: Called with the number of finished passes and of all passes.
    """
    shares = torch.tensor(scope.shares, dtype=probe.v.dtype, device=probe.v.device)[:, None]
    rows = 1 if synthetic is None else len(scope.shares) + 1
    key = torch.tensor(derive(scope.seed, "power iteration"), device=probe.v.device)
    start = normal(key, (1, probe.spec.size)).to(probe.v.dtype)

    def real_of(k: int) -> Products:
        return probe.products(*selected_samples(federation.clients[k], scope))

    def synthetic_of(k: int) -> Products:
        assert synthetic is not None
        return probe.products(*synthetic(k))

    def mixed(k: int) -> Products:
        """Return products whose first row is for the client's own data and further rows for the shares."""
        own, other = real_of(k), synthetic_of(k) if synthetic is not None else None

        def times(u: Tensor) -> Tensor:
            turned = own(u)
            if other is not None:
                turned[1:] = (1 - shares) * turned[1:] + shares * other(u[1:])
            return turned

        return times

    def mean(of: Callable[[int], Products], those: Sequence[int]) -> Products:
        def times(u: Tensor) -> Tensor:
            total = torch.zeros_like(u)
            for k in those:
                total.add_(of(k)(u), alpha=1 / len(those))
            return total

        return times

    passes = len(ids) + 1 + (synthetic is not None)
    done = iter(range(passes))

    def top(products: Products, count: int = 1) -> Tensor:
        follow(next(done), passes)
        return largest_eigenvalues(products, start.expand(count, -1).contiguous(), scope.iterations, scope.tolerance)

    each = torch.stack([top(mixed(k), rows) for k in ids]).max(0).values
    average = float(top(mean(real_of, ids))[0])
    smoothness: dict[str, float | list[float] | None] = {"L_max": float(each[0]), "L_avg": average}
    if synthetic is not None:
        shared = synthetic(ids[0]) is synthetic(ids[-1])
        smoothness["L_synthetic"] = float(top(mean(synthetic_of, ids[:1] if shared else ids))[0])
        smoothness["L_p"] = each[1:].tolist()
    return smoothness


def predict_rounds(result: HeterogeneityMeasurement, scope: MeasurementScope, clients: int) -> None:
    """Add Corollary I's rounds for every share, relative to no synthetic data.

    Args:
        result: Measurement, which is extended in place.
        scope: Limits of the measurement.
        clients: Number of clients.
    """
    metrics = result.metrics
    # If the loss is strongly convex, it exceeds its minimum by at most ||grad f||^2 / (2 mu); use a tenth of that.
    unit = 1.0 if scope.mu is None else 2 * scope.mu
    epsilon = scope.epsilon if scope.epsilon is not None else 0.1 * float(metrics["gradient2"] or 0) / unit
    metrics["epsilon"] = epsilon

    def steps(zeta2: float | None, sigma2: float | None, L: float | None) -> float:
        # Without a measured curvature, L cancels in the ratio for non-convex losses.
        noise, smooth = max(0.0, sigma2 or 0) / scope.batch, 1.0 if L is None else L
        return fedssyn_bounds.iterations(epsilon, clients, scope.tau, smooth, max(0.0, zeta2 or 0), noise, scope.mu)

    bounded = epsilon > 0 and (scope.mu is None or metrics["L_max"] is not None)
    base = steps(metrics["zeta2"], metrics["sigma2_mean"], metrics["L_max"]) if bounded else 0.0
    for row in result.shares:
        for name, end in (("rounds", ""), ("rounds_bound", "_bound")):
            value = steps(row[f"zeta2{end}"], row[f"sigma2{end}"], row[f"L{end}"]) / base if base > 0 else math.nan
            row[name] = value if math.isfinite(value) else None
