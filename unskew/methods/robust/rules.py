"""Robust aggregation rules: the combined update stays close to the honest ones if few clients send wrong updates.

See ``unskew.methods.robust.estimators`` for the papers and formulas. All rules weight clients uniformly, because a client can
misreport its number of samples. ``share`` is an assumption about attackers, so it is not tuned. New normalization buffers
are the coordinate-wise median of the clients' buffers. On skewed data these rules lose accuracy even without attackers,
unless ``bucket`` or ``mix`` makes the points more alike (arXiv:2006.09365, arXiv:2302.01772).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.errors import ConfigError
from unskew.methods.robust import estimators
from unskew.models.spec import ModelSpec
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.requirements import single_reads
from unskew.protocol.rules import AggregateRule, Combined, Method, Tensors, Updates, Weights
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, log_range
from unskew.seeding import fold, uniform

SHUFFLE = 1
"""Number that is folded into the round's key for the order of the buckets."""
SMOOTHING = 1e-5
"""Smallest distance that the authors' steps of the geometric median divide by, ``nu``."""
WEAKENED = "weakened"
"""Entry of the state with the number of rounds in which too few updates arrived for the rule."""
Share = Annotated[float, Field(ge=0, lt=0.5)]


@dataclass(frozen=True)
class RobustRule(AggregateRule):
    """Base class of robust rules.

    Attributes:
        bucket: Number of updates that are averaged, in random order, before the rule is applied (arXiv:2006.09365). 2
            helps on skewed data; ``n`` then is the number of buckets.
        mix: ``nnm`` replaces every update by the mean of its ``n − f`` nearest ones, itself included
            (arXiv:2302.01772). It needs a number of suspected clients, so only ``trimmed``, ``krum``, ``multikrum`` and
            ``bulyan`` with a ``share`` above 0 support it.
    """

    weights: ClassVar[Weights | None] = "uniform"
    distances: ClassVar[bool] = False

    bucket: Annotated[int, Field(ge=1)] = 1
    mix: Literal["none", "nnm"] = "none"

    @property
    def needs(self) -> Collection[str]:  # type: ignore[override]
        """``individual``: the rule compares updates of single clients."""
        return ("individual",)

    def server_init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Return the number of rounds with too few updates, 0."""
        return {WEAKENED: torch.zeros((), dtype=torch.int64, device=v.device)}

    def suspected(self, clients: int) -> int:
        """Return the number ``f`` of suspected clients in a cohort of ``clients``."""
        # Rounded first, because 0.2 * 25 is larger than 5 in floating point.
        return math.ceil(round(getattr(self, "share", 0.0) * clients, 9))

    def largest_f(self, points: int) -> int:
        """Return the largest number of suspected points for which the rule is defined."""
        return (points - 1) // 2

    def center(self, points: Tensor, f: int, state: Tensors, updates: Updates) -> Tensor:
        """Return the estimated center of the points, ``[d]``.

        Args:
            points: Updates after bucketing and mixing, ``[n, d]``.
            f: Number of suspected points.
            state: State of the rule.
            updates: The updates.
        """
        raise NotImplementedError

    def conflict_with(self, method: Method) -> str | None:
        """Name rules that robust aggregation cannot protect."""
        for rule in method.client:
            if rule.uploads:
                return (
                    f"{self.name} does not protect what {rule.name} uploads besides the model. Combine {self.name} with "
                    "methods that send only the model, such as fedprox or feddyn."
                )
            if not rule.sends_model:
                return f"{self.name} combines updates of the model, and clients of {rule.name} send none."
        server = method.server
        if server is not None and (reads := single_reads(server)):
            return f"{server.name} {reads}, so {self.name} cannot combine updates first."
        if self.distances and method.sync is not None:
            return (
                f"{self.name} compares whole updates, and with {method.sync.name} clients send parts of the model. Use "
                "median or trimmed."
            )
        return None

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate that a cohort is large enough for the number of suspected clients.

        Args:
            run: Configuration, federation and model of the run.

        Returns:
            Warnings for the user.

        Raises:
            ConfigError: If the rule is not defined for so few clients, or ``mix`` would average all updates.
        """
        points = math.ceil(run.plan.cohort / self.bucket)
        f = self.suspected(run.plan.cohort)
        if self.largest_f(points) < f or points < 1:
            raise ConfigError(
                f"{self.name} is not defined for {points} points (cohort {run.plan.cohort}, bucket {self.bucket}) with {f} "
                "suspected. Use a larger participation, a smaller share, or a smaller bucket."
            )
        if run.client_weighting == "samples":
            raise ConfigError(
                f"{self.name} weights clients uniformly, because they can misreport their numbers of samples. Remove "
                "client_weighting=samples."
            )
        if self.mix == "nnm" and not f:
            raise ConfigError(
                f"{self.name}:mix=nnm with no suspected clients replaces every update by the mean of all, so nothing is "
                "robust. Use it with trimmed, krum, multikrum or bulyan and a share above 0."
            )
        reason = self._unprotected(points)
        return () if reason is None else (f"{self.name} does not withstand any attacker, because {reason}.",)

    def _unprotected(self, points: int) -> str | None:
        """Return why a single attacker would decide the result, or None.

        Args:
            points: Number of points that are combined in a round.
        """
        return "share=0 suspects no client; use a larger share" if getattr(self, "share", None) == 0 else None

    def combine(self, state: Tensors, updates: Updates) -> tuple[Tensors, Combined]:
        """Apply bucketing or mixing, then the rule; buffers are the median.

        ``f`` does not decrease if clients of the cohort drop out, because attackers need not be among them. If the rule is
        not defined for the remaining updates, their coordinate-wise median is used, and without an honest majority the round
        changes nothing.

        Args:
            state: State of the rule.
            updates: Updates of the round, at least one.

        Returns:
            The new state, and the combined update ``[d]`` with the median of the buffers ``[m]``.

        Raises:
            ConfigError: If a client rule sends uploads without declaring them.
        """
        if updates.aggregate.upload:
            rule = next(iter(updates.aggregate.upload))
            raise ConfigError(
                f"{self.name} does not protect what {rule} uploads besides the model. Remove one of them."
            )
        clients = list(updates)
        points = estimators.bounded(torch.stack([update.delta for update in clients]))
        buffers = estimators.coordinate_median(estimators.bounded(torch.stack([update.buffers for update in clients])))
        f = self.suspected(max(len(points), updates.plan.cohort))
        if 2 * f >= len(points):
            weakened = {**state, WEAKENED: state[WEAKENED] + 1}
            return weakened, Combined(torch.zeros_like(points[0]), updates.b_global, step=False)
        buckets = points
        if self.bucket > 1:
            order = uniform(fold(updates.key, SHUFFLE), (len(points),)).argsort(stable=True)
            buckets = estimators.bucket_means(points, order.to(points.device), self.bucket)
        if max(0, self.largest_f(len(buckets))) < f:
            delta = estimators.coordinate_median(points)
            return {**self.next_state(state, delta), WEAKENED: state[WEAKENED] + 1}, Combined(delta, buffers)
        if self.mix == "nnm":
            buckets = estimators.nearest_neighbor_means(buckets, f)
        delta = self.center(buckets, f, state, updates)
        return self.next_state(state, delta), Combined(delta, buffers)

    def next_state(self, state: Tensors, delta: Tensor) -> Tensors:
        """Return the state for the next round.

        Args:
            state: State before the round.
            delta: Combined update, ``[d]``.
        """
        return state

    def metrics(self, state: Tensors, round: int, spec: ModelSpec) -> dict[str, int]:
        """Return the number of rounds so far with too few updates for the rule, if there are any."""
        weakened = int(state[WEAKENED])
        return {f"{self.name}_too_few_updates": weakened} if weakened else {}


@dataclass(frozen=True)
class Median(RobustRule):
    """Coordinate-wise median."""

    name: ClassVar[str] = "median"
    summary: ClassVar[str] = "median of the clients' updates in each coordinate"
    paper: ClassVar[str] = "Yin et al. 2018, arXiv:1803.01498"

    def center(self, points: Tensor, f: int, state: Tensors, updates: Updates) -> Tensor:
        """Compute the median."""
        return estimators.coordinate_median(points)

    def _unprotected(self, points: int) -> str | None:
        return few_points(points)


@dataclass(frozen=True)
class Trimmed(RobustRule):
    """Coordinate-wise trimmed mean.

    Attributes:
        share: Share of suspected clients; ``f`` is this share of the cohort, rounded up.
    """

    name: ClassVar[str] = "trimmed"
    summary: ClassVar[str] = "mean in each coordinate without the largest and smallest values"
    paper: ClassVar[str] = "Yin et al. 2018, arXiv:1803.01498"

    share: Share = 0.2

    def center(self, points: Tensor, f: int, state: Tensors, updates: Updates) -> Tensor:
        """Compute the trimmed mean."""
        return estimators.trimmed_mean(points, f)


@dataclass(frozen=True)
class Krum(RobustRule):
    """Update with the smallest sum of squared distances to its nearest ``n - f - 2`` neighbors.

    Attributes:
        share: Share of suspected clients; ``f`` is this share of the cohort, rounded up.
    """

    name: ClassVar[str] = "krum"
    summary: ClassVar[str] = "the update that is closest to its nearest neighbors"
    paper: ClassVar[str] = "Blanchard et al. 2017, arXiv:1703.02757"
    distances: ClassVar[bool] = True

    share: Share = 0.2

    def largest_f(self, points: int) -> int:
        """Krum needs ``n > 2 f + 2``."""
        return (points - 3) // 2

    def center(self, points: Tensor, f: int, state: Tensors, updates: Updates) -> Tensor:
        """Select the best update."""
        return points[estimators.krum_order(points, f)[0]]


@dataclass(frozen=True)
class MultiKrum(Krum):
    """Mean of the ``n - f`` updates with the smallest Krum scores."""

    name: ClassVar[str] = "multikrum"
    summary: ClassVar[str] = "mean of the updates that are closest to their nearest neighbors"

    def center(self, points: Tensor, f: int, state: Tensors, updates: Updates) -> Tensor:
        """Average the best updates."""
        return points[estimators.krum_order(points, f)[: len(points) - f].sort().values].mean(dim=0)


@dataclass(frozen=True)
class Bulyan(RobustRule):
    """Repeated Krum, then a trimmed mean around the median.

    Attributes:
        share: Share of suspected clients; ``f`` is this share of the cohort, rounded up.
    """

    name: ClassVar[str] = "bulyan"
    summary: ClassVar[str] = "repeated Krum, then a trimmed mean around the median"
    paper: ClassVar[str] = "El Mhamdi et al. 2018, arXiv:1802.07927"
    distances: ClassVar[bool] = True

    share: Annotated[float, Field(ge=0, lt=0.25)] = 0.1

    def largest_f(self, points: int) -> int:
        """Bulyan needs ``n >= 4 f + 3``."""
        return (points - 3) // 4

    def center(self, points: Tensor, f: int, state: Tensors, updates: Updates) -> Tensor:
        """Apply Bulyan."""
        return estimators.bulyan(points, f)


@dataclass(frozen=True)
class GeoMedian(RobustRule):
    """Geometric median (RFA).

    Attributes:
        steps: Number of smoothed steps from the mean. ``steps=4`` is the authors' code, and a single attacker can move
            its result arbitrarily far, so unskew warns. Use it only to compare with published results.
    """

    name: ClassVar[str] = "geomedian"
    summary: ClassVar[str] = "point with the smallest sum of distances to the updates"
    paper: ClassVar[str] = "Pillutla et al. 2019, arXiv:1912.13445"
    distances: ClassVar[bool] = True

    steps: Annotated[int, Field(ge=1)] | None = None

    def center(self, points: Tensor, f: int, state: Tensors, updates: Updates) -> Tensor:
        """Compute the geometric median, or approximate it as the authors' code does."""
        if self.steps is None:
            return estimators.geometric_median(points)
        return estimators.weiszfeld_steps(points, self.steps, SMOOTHING)

    def _unprotected(self, points: int) -> str | None:
        return few_points(points) if self.steps is None else "its steps start from the mean; remove steps"


@dataclass(frozen=True)
class CenteredClipping(RobustRule):
    """Centered clipping around the combined update of the round before.

    Attributes:
        tau: Largest distance to the center that is not clipped. It should be somewhat larger than the norm of an honest
            update.
        steps: Number of steps per round; the paper uses 1, the authors' runs 3.
    """

    name: ClassVar[str] = "cclip"
    summary: ClassVar[str] = "clips updates around the combined update of the round before"
    paper: ClassVar[str] = "Karimireddy et al. 2021, arXiv:2012.10333"
    spaces: ClassVar[Mapping[str, Space]] = {"tau": log_range(0.1, 100.0)}
    distances: ClassVar[bool] = True

    tau: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 10.0
    steps: Annotated[int, Field(ge=1)] = 3

    def server_init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Initialize the center to zero."""
        return {**super().server_init(v, federation_info), "center": torch.zeros_like(v)}

    def center(self, points: Tensor, f: int, state: Tensors, updates: Updates) -> Tensor:
        """Clip around the stored center."""
        return estimators.centered_clipping(points, state["center"], self.tau, self.steps)

    def _unprotected(self, points: int) -> str | None:
        return "tau=inf clips nothing; use a finite tau" if math.isinf(self.tau) else None

    def next_state(self, state: Tensors, delta: Tensor) -> Tensors:
        """Store the new center."""
        return {**state, "center": delta}


@dataclass(frozen=True)
class FLTrust(RobustRule):
    """Updates weighted by their cosine to an update that the server trains on its own data, and scaled to its norm.

    Attributes:
        epochs: Passes over the server data per round; none for the clients' budget.
    """

    name: ClassVar[str] = "fltrust"
    summary: ClassVar[str] = "weights updates by their similarity to the server's own update"
    paper: ClassVar[str] = "Cao et al. 2021, arXiv:2012.13995"
    distances: ClassVar[bool] = True

    epochs: Annotated[int, Field(ge=1)] | None = None

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate the cohort, and that the server has data of the clients' classes."""
        run.need_own_task(self.name)
        return super().check(run)

    def center(self, points: Tensor, f: int, state: Tensors, updates: Updates) -> Tensor:
        """``sum t_i u_i |g| / |u_i| / sum t_i`` with ``t_i = max(0, cos(u_i, g))``; zero if no update is trusted."""
        changes: dict[str, Any] = {} if self.epochs is None else {"local_epochs": self.epochs, "local_steps": None}
        trained = updates.at_server.train(updates.v_global, updates.b_global, updates.key, **changes)
        own = trained.v - updates.v_global
        norms = points.norm(dim=1).clamp_min(torch.finfo(points.dtype).tiny)
        trust = (points @ own / (norms * own.norm().clamp_min(torch.finfo(points.dtype).tiny))).clamp_min(0.0)
        if not trust.sum() > 0:
            return torch.zeros_like(own)
        combined: Tensor = (trust * own.norm() / norms) @ points / trust.sum()
        return combined


def few_points(points: int) -> str | None:
    """Return why a median of few points does not outvote an attacker, or None if there are enough.

    Args:
        points: Number of points.
    """
    if points > 2:
        return None
    return f"it combines only {points} points per round; use a larger participation or a smaller bucket"
