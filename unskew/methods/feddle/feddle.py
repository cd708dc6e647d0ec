"""Feddle: the server uses its own data to search for the coefficients of the latest updates.

Zhu et al., "Unlocking the Value of Decentralized Data: A Federated Dual Learning Approach for Model Aggregation", 2025,
arXiv:2503.20138. The server has some data, of the clients' task (in domain) or of another task (out of domain), and an atlas
of the latest updates ("anchors" ``a_m``) as directions. After new updates have arrived, it computes::

    r = median_m ||a_m||,   a_bar_m = r a_m / ||a_m||
    c' = the coefficients with which FedBuff would step; c = c'
    c_hat = argmin_c  loss of the server's data at  omega + sum_m c_m a_bar_m,   plus lam / 2 ||c - c'||^2
    omega <- omega + sum_m c_hat_m a_bar_m

Coefficients may be negative. The atlas stores ``atlas`` anchors. A new anchor replaces the one with the smallest ``|c_hat|``
(ties: the oldest). Anchors that no search has used yet are never replaced, so the atlas may grow until after the search. The
search itself is in ``unskew.methods.feddle.search``.

``c'_m = eta w_m / sum_j w_j (1 + age_m)^-a ||a_m|| / r`` for the updates since the last search and 0 for older ones. So a
search with zero steps is exactly a step of FedBuff (with ``client_weighting: samples``, of FedAvg) for any norms.
``lam=inf`` is also FedBuff.

Choices that the paper leaves open: Adam's state and the new head are initialized in each search (``warm_start`` keeps the
head). A search takes place in each round in which an update arrives, or whenever ``buffer_size`` updates have arrived.
BatchNorm buffers change by the mean of the clients' changes, and the search uses them in eval mode. The paper states grids,
but not the chosen learning rates and epochs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.errors import ConfigError
from unskew.methods.feddle.search import (
    Directions,
    cosine,
    minimize,
    new_head,
    norms,
    scales,
    surrogate,
    train_head,
)
from unskew.models.spec import ModelSpec
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.rules import MetricSpec, ServerRule, Tensors, Updates, Weights
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, one_of
from unskew.seeding import fold

Whole = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]


@plain_dataclass
class Anchor:
    """Update in the atlas.

    Attributes:
        a: The update, ``[d]``.
        weight: Weight of the client.
        share: Factor by which the fallback reduces the weight with the age.
        client: Client that sent the update.
        origin_round: Round in which the client received the model.
        c: Coefficient ``c_hat``; None until a search has used the anchor.
    """

    a: Tensor
    weight: float
    share: float
    client: int
    origin_round: int
    c: float | None


@dataclass(frozen=True)
class Feddle(ServerRule):
    """Aggregation by a search along the latest updates with the server's data.

    Attributes:
        needs: Requirements of the rule, see ``unskew.protocol.requirements``.
        weights: Client weighting with ``client_weighting=auto``; None if the method does not choose one.
        steps_without: ``updates``, because the server also steps in rounds without updates.
        summary_metrics: Metrics of the method that the run summary repeats.
        atlas: Number of directions; by default twice the clients drawn per round.
        trigger: Search in every ``round`` with an arrival, or whenever ``buffer_size`` updates are in (``buffer``).
        buffer_size: Updates per search with ``trigger=buffer``.
        eta: Server learning rate of the fallback, which is a step of FedBuff.
        a: The fallback's weights decrease with the age in rounds as ``(1 + age)^-a``.
        lr: Adam's learning rate on the coefficients. A step changes a coefficient by about ``lr``, so with few steps
            per search the paper's 0.001 changes little.
        epochs: Passes over the server's data per search; by default 20 in domain, 1 out of domain. 0 is FedBuff.
        batch: Samples per step; by default 64 in domain, 256 out of domain.
        max_steps: Maximum number of steps per search; by default unlimited.
        lam: Strength of the pull towards the fallback's coefficients; by default 0 in domain, 0.01 out of domain.
            ``inf`` is FedBuff.
        head_lr: Adam's learning rate on the new head, out of domain.
        warm_start: Continue with the head of the last search.
        eviction: Which direction a full atlas drops: the one with the smallest coefficient, or the oldest (``fifo``, an
            ablation of the paper).
        normalize: Scale directions to the median length. ``false`` is an ablation of the paper.
        start: Where the search starts, and what ``lam`` pulls towards. ``zero`` is an ablation of the paper.
        half: Store directions in bfloat16, which halves their memory.
    """

    name: ClassVar[str] = "feddle"
    summary: ClassVar[str] = "searches with data at the server how far to go along each update"
    paper: ClassVar[str] = "Zhu et al. 2025, arXiv:2503.20138"
    # The paper's grids.
    spaces: ClassVar[Mapping[str, Space]] = {"lr": one_of(1e-5, 1e-4, 1e-3), "epochs": one_of(1, 10, 20)}
    needs = ("individual", "sent_statistics", "whole_updates")
    weights: ClassVar[Weights | None] = "uniform"
    steps_without = "updates"
    summary_metrics = (
        MetricSpec("coefficients/positive", "positive coefficients"),
        MetricSpec("coefficients/negative", "negative coefficients"),
        MetricSpec("coefficients/moved", "distance of a coefficient from the fallback's"),
        MetricSpec("surrogate/cosine", "cosine of the surrogate's gradient and the true one", diagnosis="surrogate"),
    )

    atlas: Whole | None = None
    trigger: Literal["round", "buffer"] = "round"
    buffer_size: Whole = 10
    eta: Positive = 1.0
    a: NonNegative = 0.0
    lr: Positive = 1e-3
    epochs: Annotated[int, Field(ge=0)] | None = None
    batch: Whole | None = None
    max_steps: Whole | None = None
    lam: Annotated[float, Field(ge=0, allow_inf_nan=True)] | None = None
    head_lr: Positive = 1e-3
    warm_start: bool = False
    eviction: Literal["score", "fifo"] = "score"
    normalize: bool = True
    start: Literal["fallback", "zero"] = "fallback"
    half: bool = False

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate the server data, the size of the atlas, and the model (raises ``ConfigError``)."""
        data, spec = run.need_server_data(self.name), run.spec
        if "surrogate" in run.diagnose and data.in_domain:
            raise ConfigError(
                "diagnose=surrogate compares gradients on another data set at the server with those on the test set. "
                "Set --server-data NAME to the name of a data set."
            )
        if self.trigger == "buffer" and self.atlas is not None and self.atlas < self.buffer_size:
            raise ConfigError(f"feddle:atlas={self.atlas} must be at least buffer_size={self.buffer_size}.")
        if not data.in_domain and not spec.parts["body"]:
            raise ConfigError(
                "feddle replaces the model's head to learn from another data set, but this model consists only of its "
                "head. Use a model with hidden layers, or --server-data 1000."
            )
        if not data.in_domain and len(spec.feature_shape) != 1:
            raise ConfigError(
                f"feddle trains a linear head on the features, but the head {spec.head_name!r} takes inputs of shape "
                f"{spec.feature_shape}. Choose another head, or use server data of the clients' task."
            )
        return ()

    @property
    def updates_per_step(self) -> int | None:  # type: ignore[override]
        """Number of updates to collect before a step with ``trigger=buffer``, otherwise None."""
        return self.buffer_size if self.trigger == "buffer" else None

    def init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Initialize an empty atlas."""
        nothing = v.new_zeros(0)
        return {
            "v": v,
            "anchors": v.new_zeros(0, len(v)).to(torch.bfloat16 if self.half else v.dtype),
            "numbers": torch.zeros(0, 6, dtype=torch.float64),
            "head": nothing,
            "round": torch.tensor(-1),
            "found": torch.zeros(0, 2, dtype=torch.float64),
            "cosine": nothing,
        }

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """Add the updates to the atlas, and search; the metrics of a round contain all of its searches."""
        if int(state["round"]) != updates.round:
            state = {**state, "found": state["found"][:0], "cosine": state["cosine"][:0]}
            state["round"] = torch.tensor(updates.round)
        if not len(updates):
            return state
        most = self.atlas or max(2 * updates.at_server.cohort, self.updates_per_step or 1)
        atlas = unpack_anchors(state)
        now = {**state, "b": updates.b_global}
        for update in updates:
            share = (1 + update.arrived - update.origin_round) ** -self.a
            a = update.delta.to(state["anchors"].dtype)
            atlas.append(Anchor(a, update.weight, share, update.client, update.origin_round, None))
            self.evict(atlas, most)
        now = self.search(now, atlas, updates)
        self.evict(atlas, most)
        anchors = torch.stack([anchor.a for anchor in atlas])
        rows = [[r.weight, r.share, r.client, r.origin_round, r.c or 0.0, float(r.c is None)] for r in atlas]
        now |= {"anchors": anchors, "numbers": torch.tensor(rows, dtype=torch.float64)}
        if updates.aggregate.buffer_change is None:
            del now["b"]  # buffers that are not sent, or are reset in each round, have no changes to add up
        return now

    def evict(self, atlas: list[Anchor], most: int) -> None:
        """Remove anchors until ``most`` are left; anchors that no search has used are not removed.

        Args:
            atlas: Anchors in order of arrival, changed in place.
            most: Number of anchors to keep.
        """
        while len(atlas) > most:
            seen = [anchor for anchor in atlas if anchor.c is not None]
            if not seen:
                return
            goes = seen[0] if self.eviction == "fifo" else min(seen, key=lambda anchor: abs(anchor.c or 0.0))
            del atlas[next(i for i, anchor in enumerate(atlas) if anchor is goes)]

    def search(self, state: Tensors, atlas: list[Anchor], updates: Updates) -> Tensors:
        """Search for the coefficients, store them in the atlas, and update the model.

        Args:
            state: State of the server.
            atlas: Anchors in order of arrival.
            updates: Updates of this step.
        """
        at, v = updates.at_server, state["v"]
        assert at.data is not None
        moved = updates.aggregate.buffer_change
        b = updates.aggregate.buffers if moved is None else state["b"] + moved
        A = torch.stack([anchor.a for anchor in atlas])
        lengths = norms(A, v.dtype)
        scale, r = scales(lengths) if self.normalize else (torch.ones_like(lengths), None)
        directions = Directions(A, scale)
        c0 = self.fallback(atlas, lengths, r)
        key = fold(updates.key, updates.arrivals - 1)  # another key for each search of a round
        own = at.data.in_domain
        epochs = (20 if own else 1) if self.epochs is None else self.epochs
        lam = (0.0 if own else 0.01) if self.lam is None else self.lam
        size = self.batch or (64 if own else 256)
        head = state["head"]
        seen = state["cosine"]
        c = c0
        if epochs and not math.isinf(lam):
            plans = [
                at.plan(fold(key, i), len(at.data.y), local_epochs=epochs, batch_size=size, drop_last=False)
                for i in range(2)
            ]
            searched, first = (plan[: self.max_steps] for plan in plans)
            loss_fn = None
            if not own:
                width, classes = at.spec.feature_shape[0], at.data.classes
                theta = head.view(classes, width + 1) if len(head) else new_head(fold(key, 2), classes, width, v)
                theta = train_head(at, theta, first, directions.at(v, c0), b, self.head_lr)
                head, loss_fn = theta.flatten() if self.warm_start else head, surrogate(at, theta)
                coefficients = cosine(at, theta, v, b, directions, c0, fold(key, 3))
                seen = seen if coefficients is None else v.new_tensor([coefficients])
            batches = (at.batch(index, i) for i, index in enumerate(searched))
            c = minimize(at.gradient(loss_fn, b, train=False), batches, v, directions, c0, self.lr, lam)
        for anchor, value in zip(atlas, c.tolist(), strict=True):
            anchor.c = value
        return {
            **state,
            "v": directions.at(v, c),
            "b": b,
            "head": head,
            "cosine": seen,
            "found": torch.cat([state["found"], torch.stack([c0, c], dim=1).to(state["found"])]),
        }

    def fallback(self, atlas: list[Anchor], lengths: Tensor, r: Tensor | None) -> Tensor:
        """Compute ``c' [n]``, the coefficients for which the step equals FedBuff's.

        Args:
            atlas: Anchors in order of arrival.
            lengths: Norms of the anchors, ``[n]``.
            r: Common norm of the directions; None if they are not scaled.
        """
        total = sum(anchor.weight for anchor in atlas if anchor.c is None)
        weights = [self.eta * anchor.weight * anchor.share / total if anchor.c is None else 0.0 for anchor in atlas]
        c = torch.tensor(weights, dtype=lengths.dtype, device=lengths.device)
        if self.start == "zero":
            return torch.zeros_like(c)
        return c if r is None or not float(r) else c * lengths / r

    def metrics(self, state: Tensors, round: int, spec: ModelSpec) -> dict[str, Any]:
        """Return the coefficients of the round's searches in order of arrival, those of the fallback, and their signs."""
        metrics: dict[str, Any] = {"anchors": len(state["anchors"])}
        if len(state["found"]):
            c0, c = state["found"].T
            metrics |= {
                "coefficients/positive": int((c > 0).sum()),
                "coefficients/negative": int((c < 0).sum()),
                "coefficients/moved": float((c - c0).abs().mean()),
                "coefficients": c.tolist(),
                "fallback_coefficients": c0.tolist(),
            }
        if len(state["cosine"]):
            metrics["surrogate/cosine"] = float(state["cosine"][0])
        return metrics


def unpack_anchors(state: Tensors) -> list[Anchor]:
    """Return the atlas stored in a state, in order of arrival."""
    anchors = []
    rows = zip(state["anchors"], state["numbers"].tolist(), strict=True)
    for a, (weight, share, client, origin_round, c, fresh) in rows:
        anchors.append(Anchor(a, weight, share, int(client), int(origin_round), None if fresh else c))
    return anchors
