"""Floco: a simplex of heads, in which similar clients use neighboring points.

Grinwald, Wiesner, Nakajima, "Federated Learning over Connected Modes", NeurIPS 2024. The head is a mixture of ``M`` heads
with a common bias, and every batch draws its point ``alpha`` of the simplex::

    W(alpha) = sum_j alpha_j W_j
    alpha    uniform on the simplex before round tau, then beta_k + r u;   |u|_1 = 1,   r ~ U(0, rho)
    beta_k   in round tau: the M principal components of the clients' updates of all W_j, projected onto the simplex

The global model uses ``alpha = 1/M``, a personal model ``alpha = beta_k``; ``beta_k + r u`` may leave the simplex. The
projection scales the simplex by 1000 values ``z``, projects the components onto it, divides each point by its sum, and takes
the ``z`` whose points have the smallest Riesz energy, the mean of their inverse squared distances.

The authors train all clients once for the projection; here the server stores each client's last update, and clients without
one get ``1/M``. The signs of principal components, which decide the result, are not in the paper: here an update is the local
minus the received head, and the largest entry of each component is positive. ``rho`` is the authors' value for Dirichlet
partitions (Flower's baseline ``floco``), in which ``tau`` is half of the rounds.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from unskew.errors import ConfigError
from unskew.methods.head_replacement import HeadReplacement
from unskew.methods.partial_sharing import LocalHeadParameters, head_parameters
from unskew.models.execution import Batch, LossFn
from unskew.models.spec import ModelSpec, slices_mask
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.rules import START, Context, Shape, Tensors, Updates
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, log_range
from unskew.seeding import fold, uniform

PURPOSE = 11
"""Separates the draw of points from other draws with a batch's key."""
LEVELS = 1000
NEAREST = 1e-4
"""Number of sizes of the simplex, and the smallest distance in the energy, as in the authors' code."""
MOST_BYTES = 4e9


class SimplexHead(nn.Module):
    """Linear head whose weights are a mixture; the first of them are those of the model, the others are drawn."""

    def __init__(self, linear: nn.Linear, endpoints: int):
        super().__init__()
        others = [copy.deepcopy(linear) for _ in range(endpoints - 1)]
        for other in others:
            other.reset_parameters()
        self.endpoints = nn.Parameter(torch.stack([each.weight.detach() for each in (linear, *others)]))
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach())
        self.alpha = nn.Parameter(linear.weight.new_full((endpoints,), 1 / endpoints))

    def forward(self, x: Tensor) -> Tensor:
        """Map features ``[B, f]`` to logits ``[B, C]``."""
        return F.linear(x, torch.einsum("m,mcf->cf", self.alpha, self.endpoints), self.bias)


@dataclass(frozen=True)
class Floco(HeadReplacement, LocalHeadParameters):
    """A simplex of heads.

    Attributes:
        endpoints: Number of heads ``M``; 1 is FedAvg.
        tau: Number of rounds before the clients get their points; none for half of the rounds.
        rho: Largest distance of a drawn point from the client's point, as the sum of absolute differences.
    """

    name: ClassVar[str] = "floco"
    summary: ClassVar[str] = "a simplex of heads, in which similar clients use neighboring points"
    paper: ClassVar[str] = "Grinwald et al. 2024, NeurIPS"
    changes_start: ClassVar[bool] = True
    needs = ("vector", "individual")
    acts_last: ClassVar[bool] = True
    local_parameters: ClassVar[tuple[str, ...]] = ("alpha",)
    # Around the authors' 0.1 and 0.3.
    spaces: ClassVar[Mapping[str, Space]] = {"rho": log_range(0.05, 0.5)}
    idle_options = (({"endpoints": 1}, ("tau", "rho")),)

    endpoints: Annotated[int, Field(ge=1, le=10_000)] = 10
    tau: Annotated[int, Field(ge=1)] | None = None
    rho: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.3

    # ---- before the run -------------------------------------------------------------------------------------------------

    def new_head(self, linear: nn.Linear) -> SimplexHead:
        """Return a mixture of heads."""
        return SimplexHead(linear, self.endpoints)

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate that there are enough clients, and that the server can store updates."""
        size = sum(part.stop - part.start for part in head_parameters(run.spec, ("endpoints",), True))
        clients = len(run.federation.clients)
        if clients < self.endpoints:
            raise ConfigError(
                f"floco:endpoints={self.endpoints} needs at least as many clients, and there are {clients}. Use "
                f"floco:endpoints={clients} or fewer."
            )
        needed = run.spec.dtype.itemsize * size * clients
        if needed > MOST_BYTES:
            raise ConfigError(
                f"floco stores the update of {self.endpoints} heads for each client at the server, which needs "
                f"{needed / 1e9:.0f} GB here. Use fewer clients or endpoints, or a smaller head."
            )
        notes = list(super().check(run))
        if self.tau is not None and self.tau >= run.rounds and not run.base_run:
            notes.append(
                f"With floco:tau={self.tau} clients get their points after {self.tau} rounds, and the run has {run.rounds}: "
                "all clients use the center of the simplex. Use a smaller tau."
            )
        return notes

    # ---- at the clients -------------------------------------------------------------------------------------------------

    def begin(self, ctx: Context) -> Tensors:
        """Start with the client's point, which is not trained."""
        (own,) = self.local_slices(ctx.spec)
        carry = {"trained": ~slices_mask((own,), ctx.spec.size).to(ctx.v_global.device)}
        if "point" in ctx.download:
            carry[START] = with_point(ctx.v_global, own, ctx.download["point"])
        return carry

    def loss(self, loss_fn: LossFn, ctx: Context, carry: Tensors) -> LossFn:
        """Evaluate the loss at a drawn point of the simplex."""
        if self.endpoints == 1:
            return loss_fn
        (own,) = self.local_slices(ctx.spec)

        def sampled(v: Tensor, batch: Batch) -> Tensor:
            return loss_fn(with_point(v, own, self.draw(batch.key, ctx.download.get("point"), v)), batch)

        return sampled

    def draw(self, key: Tensor, point: Tensor | None, like: Tensor) -> Tensor:
        """Draw the point of a batch, ``[M]``.

        Args:
            key: Random key of the batch.
            point: Point of the client, ``[M]``; None for the whole simplex.
            like: Tensor with the dtype of the result.
        """
        key = fold(key, PURPOSE)
        drawn = uniform(fold(key, 0), (self.endpoints,)).to(like.dtype)
        if point is None:
            drawn = -torch.log1p(-drawn) + torch.finfo(torch.float32).tiny  # exponential numbers, not all of them 0
            return drawn / drawn.sum()
        signed = 2 * drawn - 1
        radius = self.rho * uniform(fold(key, 1), ()).to(like.dtype)
        return point + radius * signed / signed.abs().sum().clamp_min(torch.finfo(torch.float32).tiny)

    def trainable_mask(self, ctx: Context, carry: Tensors, batch: Batch) -> Tensor:
        """Freeze the point."""
        return carry["trained"]

    # ---- at the server --------------------------------------------------------------------------------------------------

    def server_init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Store the number of clients."""
        return {"clients": torch.tensor(federation_info.clients)}

    def download_shapes(self, spec: ModelSpec, plan: RoundPlan) -> Mapping[str, Shape]:
        """Return the shape of the point."""
        return {"point": (self.endpoints,)}

    def download(self, state: Tensors, client: int) -> Tensors:
        """Send the client's point, once there are points."""
        if "points" not in state:
            return {}
        # The last row is the center, for clients that are not in the federation.
        return {"point": state["points"][min(client, len(state["points"]) - 1)]}

    def server_update(self, state: Tensors, updates: Updates) -> Tensors:
        """Store the updates of the heads before round ``tau``, then compute the points from them."""
        if "points" in state or self.endpoints == 1:
            return state
        clients = int(state["clients"])
        (heads,) = head_parameters(updates.spec, ("endpoints",), True)
        size = heads.stop - heads.start
        stored = state["updates"].clone() if "updates" in state else updates.v_global.new_zeros(clients, size)
        seen = state["seen"].clone() if "seen" in state else updates.v_global.new_zeros(clients)
        for update in updates:
            stored[update.client], seen[update.client] = update.delta[heads], 1
        tau = max(1, updates.plan.rounds // 2) if self.tau is None else self.tau
        if updates.round + 1 < tau:
            return {"clients": state["clients"], "updates": stored, "seen": seen}
        points = stored.new_full((clients + 1, self.endpoints), 1 / self.endpoints)
        known = seen.nonzero()[:, 0]
        points[known] = simplex_points(stored[known].double().cpu(), self.endpoints).to(points)
        return {"clients": state["clients"], "points": points}


def with_point(v: Tensor, own: slice, point: Tensor) -> Tensor:
    """Return parameters with another point of the simplex, ``[d]``.

    Args:
        v: Parameters, ``[d]``.
        own: Slice of the point.
        point: The point, ``[M]``.
    """
    return torch.cat([v[: own.start], point.to(v.dtype), v[own.stop :]])


def principal_components(updates: Tensor, count: int) -> Tensor:
    """Return the scores of the first principal components, ``[n, count]``; 0 where there are fewer.

    Args:
        updates: Row per client, ``[n, D]``.
        count: Number of components ``M``.
    """
    left, scale, axes = torch.linalg.svd(updates - updates.mean(0), full_matrices=False)
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))[:, 0]
    scores = (left * scale * largest.sign())[:, :count]
    return F.pad(scores, (0, count - scores.shape[1]))


def project_to_simplex(points: Tensor, z: float) -> Tensor:
    """Return the nearest points with nonnegative entries of sum ``z``, ``[n, M]``.

    Args:
        points: Points, ``[n, M]``.
        z: Sum of the entries.
    """
    ordered = points.sort(1, descending=True).values
    excess = ordered.cumsum(1) - z
    number = torch.arange(1, points.shape[1] + 1, dtype=points.dtype)
    support = (ordered - excess / number > 0).sum(1, keepdim=True)
    return (points - excess.gather(1, support - 1) / support).clamp_min(0)


def simplex_points(updates: Tensor, count: int) -> Tensor:
    """Return a point of the simplex for each client, ``[n, M]``; the center if there are fewer than two clients.

    Args:
        updates: Updates of the heads, float64 ``[n, D]``.
        count: Number of endpoints ``M``.
    """
    best, lowest = updates.new_full((len(updates), count), 1 / count), math.inf
    if len(updates) < 2:
        return best
    scores = principal_components(updates, count)
    for z in torch.linspace(NEAREST, 1, LEVELS, dtype=torch.float64).tolist():
        points = project_to_simplex(scores, z)
        points = points / points.sum(1, keepdim=True)
        energy = float(torch.pdist(points).clamp_min(NEAREST).pow(-2).mean())
        if energy < lowest:
            best, lowest = points, energy
    return best
