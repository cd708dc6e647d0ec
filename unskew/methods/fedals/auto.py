"""``fedals:auto``: adapts each layer's averaging period to its measured client drift, within a traffic budget.

This rule is ours, not the paper's. Its idea is that of the paper's Figure 1: layers with a small consensus distance between
clients can be averaged less often. ``r_l`` is the growth of layer ``l``'s consensus distance per round and ``p_l`` the
layer's period. Then the distance is about ``r_l p_l / 2`` on average, and a round costs ``size_l / p_l`` parameters. The
minimum total distance for a given traffic,

    minimize sum_l r_l p_l   so that   sum_l size_l / p_l <= budget * d,

is at ``p_l = c sqrt(size_l / r_l)``: large layers that drift slowly have long periods. Periods are integers between 1 and
``longest``; ``best_periods`` finds the best ones, or improves this optimum if there are too many combinations.

An epoch consists of ``longest`` rounds. Whenever layer ``l`` is averaged, ``r_l`` is measured as its consensus distance
``sum_k p_k ||theta_k^l - mean^l||^2`` divided by the number of rounds since its previous average. At the end of an epoch all
layers are averaged and the periods are computed again. The first epoch uses the periods of plain FedALS. The server computes
the distances from sums, as ``sum_k p_k ||theta_k^l - theta^l||^2 - ||mean^l - theta^l||^2`` with the last averaged
``theta``. Each client uploads its term of the first sum, one number per layer; the server computes the second from the mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from unskew.models.layer_groups import layer_groups, parameter_slices
from unskew.models.spec import ModelSpec
from unskew.protocol.context import Context
from unskew.protocol.rules import ClientRule, MetricSpec, Slices, SyncRule, Tensors, Updates
from unskew.protocol.run_context import PreRunContext

PERIOD_METRICS = (
    MetricSpec("fedals_averaged", "layers averaged in the round, by depth"),
    MetricSpec("fedals_periods", "rounds between two averages of each layer"),
)


class HasPeriods(Protocol):
    """Interface of plain FedALS that this rule uses."""

    def periods_of(self, spec: ModelSpec) -> list[int]:
        """Return the number of rounds between two averages of each layer group."""


@dataclass(frozen=True)
class AutoPeriods(ClientRule, SyncRule):
    """FedALS with periods adapted to the measured drift.

    Attributes:
        needs: Requirements of the rule, see ``unskew.protocol.requirements``.
        first: Plain FedALS with the periods of the first epoch.
        budget: Average number of communicated parameters per round, as a share of all parameters.
        longest: Number of rounds of an epoch, and the longest period.
    """

    name: ClassVar[str] = "fedals"
    summary: ClassVar[str] = "averages each layer as often as its clients' drift asks for"
    paper: ClassVar[str] = "after Gholami and Seferoglu 2024, arXiv:2404.11754"
    uploads: ClassVar[bool] = True
    upload_ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"drift": (0.0, 1e38)}
    needs = ("optimizer", "mean_model", "model_changes")

    first: HasPeriods
    budget: float
    longest: int

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate that the run is long enough to adapt the periods at least once.

        Args:
            run: Run to check, with its configuration, federation and model.

        Raises:
            ConfigError: If the run ends before that and would equal plain FedALS.
        """
        self.first.periods_of(run.spec)
        run.need_rounds_after("fedals:auto", "longest", self.longest)
        return ()

    # ---- at a client ----------------------------------------------------------------------------------------------------

    def begin(self, ctx: Context) -> Tensors:
        """Store the last averaged values of each layer, the reference of the drift."""
        return {"start": ctx.last_received()}

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """Upload ``w_k ||theta_k^l - theta^l||^2`` of each layer, ``[G]``; 0 for layers not averaged in this round."""
        squares = ctx.sent_since(carry["start"], v).square()
        ctx.upload["drift"] = ctx.weight * group_by_layer(ctx.spec, squares)

    # ---- at the server --------------------------------------------------------------------------------------------------

    def exchanged_slices(
        self, state: Tensors, round: int, client: int, last: int | None, spec: ModelSpec
    ) -> tuple[Slices, Slices]:
        """Download layers averaged since the client last took part; upload layers averaged after this round."""
        state = state or self.beginning(spec)
        missed = [last is None or at >= last for at in state["synced"].tolist()]
        return parameter_slices(spec, tuple(missed)), parameter_slices(spec, tuple(self.due(state, round)))

    def server_update(self, state: Tensors, updates: Updates) -> Tensors:
        """Record the drift of averaged layers; at the end of an epoch, compute new periods."""
        spec = updates.spec
        round = updates.round
        mean = updates.aggregate
        state = dict(state or self.beginning(spec))
        due = torch.tensor(self.due(state, round))
        spread = mean.upload[self.name]["drift"] / mean.weight - group_by_layer(spec, mean.delta.square())
        elapsed = (round - state["synced"]).clamp_min(1)
        state["growth"] = state["growth"] + torch.where(due, spread.clamp_min(0).cpu().to(torch.float64) / elapsed, 0.0)
        state["count"] = state["count"] + due
        state["synced"] = torch.where(due, float(round), state["synced"])
        if round - int(state["begun"]) + 1 >= self.longest:
            rates = state["growth"] / state["count"].clamp_min(1)
            sizes = torch.tensor([group.size for group in layer_groups(spec)], dtype=torch.float64)
            state["periods"] = best_periods(sizes, rates, self.budget, self.longest)
            state["begun"] = torch.tensor(float(round + 1), dtype=torch.float64)
            state["growth"], state["count"] = torch.zeros_like(rates), torch.zeros_like(rates)
        return state

    def metrics(self, state: Tensors, round: int, spec: ModelSpec) -> dict[str, Any]:
        """Return the numbers of the layers averaged after the round, in order of depth, and all periods from then on."""
        state = state or self.beginning(spec)
        return average_layers((state["synced"] == round).tolist(), [int(p) for p in state["periods"].tolist()])

    def beginning(self, spec: ModelSpec) -> Tensors:
        """Return the initial state, in which no layer has been averaged."""
        groups = len(layer_groups(spec))
        return {
            "periods": torch.tensor([min(p, self.longest) for p in self.first.periods_of(spec)], dtype=torch.float64),
            "begun": torch.tensor(0.0, dtype=torch.float64),
            "synced": torch.full((groups,), -1.0, dtype=torch.float64),
            "growth": torch.zeros(groups, dtype=torch.float64),
            "count": torch.zeros(groups, dtype=torch.float64),
        }

    def due(self, state: Tensors, round: int) -> list[bool]:
        """Return for each layer whether it is averaged after ``round``.

        Args:
            state: State of the method.
            round: Round index, from 0.
        """
        age = round - int(state["begun"]) + 1
        # ``age`` exceeds ``longest`` if the epoch's last round had no update; the next round with updates ends the epoch.
        return [age % p == 0 or age >= self.longest for p in state["periods"].tolist()]


def average_layers(which: Sequence[bool], periods: Sequence[int]) -> dict[str, Any]:
    """Build the metrics of a round.

    Args:
        which: Whether each layer is averaged.
        periods: Period of each layer in rounds.

    >>> average_layers([False, True], [10, 1])
    {'fedals_averaged': [2], 'fedals_periods': [10, 1]}
    """
    layers, periods_now = (figure.name for figure in PERIOD_METRICS)
    return {layers: [number for number, was in enumerate(which, 1) if was], periods_now: list(periods)}


def group_by_layer(spec: ModelSpec, values: Tensor) -> Tensor:
    """Compute the sums ``[G]`` of ``values [d]`` over each layer group.

    Args:
        spec: Layout of the model.
        values: Value of each parameter, ``[d]``.
    """
    return torch.stack([torch.stack([values[s].sum() for s in group.slices]).sum() for group in layer_groups(spec)])


EXHAUSTIVE = 100_000
"""Maximum number of combinations of periods for which all are compared."""


def best_periods(sizes: Tensor, rates: Tensor, budget: float, longest: int) -> Tensor:
    """Return the integer periods ``[G]`` with minimum total distance whose traffic per epoch is within the budget.

    The result is exact if there are at most ``EXHAUSTIVE`` combinations. Otherwise the rounded continuous optimum is improved
    until no change of one or two periods reduces the distance.

    Args:
        sizes: Number of parameters of each layer group, ``[G]``.
        rates: Growth of the consensus distance of each group per round, ``[G]``.
        budget: Maximum traffic per round, as a share of all parameters.
        longest: Number of rounds of an epoch, and the longest period.

    >>> best_periods(torch.tensor([90.0, 10.0]), torch.tensor([1.0, 1.0]), 1.0, 50).tolist()
    [1.0, 1.0]
    >>> best_periods(torch.tensor([90.0, 10.0]), torch.tensor([1.0, 1.0]), 0.25, 50).tolist()
    [5.0, 2.0]
    """
    # The shortest period for each number of averages per epoch; longer ones do not save traffic.
    shortest = {math.ceil(longest / averages) for averages in range(1, longest + 1)}
    choices = torch.tensor(sorted(shortest), dtype=torch.float64)
    distance = rates.double().cpu()[:, None] * choices
    traffic = sizes.double().cpu()[:, None] * torch.ceil(longest / choices) / longest
    limit = budget * float(sizes.sum()) * (1 + 1e-12)
    if len(choices) ** len(sizes) <= EXHAUSTIVE:
        periods = _exhaustive(distance, traffic, limit)
    else:
        periods = _improved(_rounded(sizes.double().cpu(), choices, traffic, limit, rates), distance, traffic, limit)
    return choices[periods].to(sizes)


def _exhaustive(distance: Tensor, traffic: Tensor, limit: float) -> Tensor:
    """Return the best choice of each group, ``[G]``, by comparing all; equal distances are ordered by traffic."""
    groups = range(len(distance))
    every = torch.cartesian_prod(*(torch.arange(distance.shape[1]) for _ in groups)).reshape(-1, len(distance))
    far, sent = (torch.stack([table[g, every[:, g]] for g in groups]).sum(0) for table in (distance, traffic))
    far = torch.where(sent <= limit, far, torch.inf)
    least = far <= far.min() * (1 + 1e-12)
    return every[torch.where(least, sent, torch.inf).argmin()]


def _rounded(sizes: Tensor, choices: Tensor, traffic: Tensor, limit: float, rates: Tensor) -> Tensor:
    """Return the continuous optimum ``c sqrt(size / rate)``, rounded up, for the smallest ``c`` within the limit."""
    shape = (sizes / rates.double().cpu().clamp_min(1e-300)).sqrt()
    shape = shape / shape.min()

    def chosen(c: float) -> Tensor:
        return torch.searchsorted(choices, c * shape - 1e-9).clamp_max(len(choices) - 1)

    low, high = 0.0, 2.0 * float(choices[-1])
    for _ in range(60):
        middle = (low + high) / 2
        fits = float(traffic.gather(1, chosen(middle)[:, None]).sum()) <= limit
        low, high = (low, middle) if fits else (middle, high)
    return chosen(high)


def _improved(choice: Tensor, distance: Tensor, traffic: Tensor, limit: float) -> Tensor:
    """Change one or two choices at a time while this reduces the distance within the limit."""
    groups, options = distance.shape
    group = torch.arange(groups).repeat_interleave(options)
    same = group[:, None] == group
    while True:
        now = choice[:, None]
        nearer = (distance - distance.gather(1, now)).flatten()
        more = (traffic - traffic.gather(1, now)).flatten()
        slack = limit - float(traffic.gather(1, now).sum())
        change = torch.where(same | (more[:, None] + more > slack), torch.inf, nearer[:, None] + nearer)
        best = int(change.argmin())
        if not float(change.flatten()[best]) < -1e-12 * float(distance.gather(1, now).sum()):
            return choice
        choice = choice.clone()
        for move in divmod(best, groups * options):
            choice[move // options] = move % options
