"""``fedals:auto``: each layer's period follows from how fast clients drift apart in it, within a budget of traffic.

This rule is ours, not the paper's; its idea is that of the paper's Figure 1: layers whose clients stay close (a small
consensus distance) may be averaged seldom. With ``r_l`` the growth of layer ``l``'s consensus distance per round and ``p_l``
its period, the distance is about ``r_l p_l / 2`` on the average, and a round costs ``size_l / p_l`` parameters. The least
total distance at a given traffic,

    minimise sum_l r_l p_l   so that   sum_l size_l / p_l <= budget * d,

is at ``p_l = c sqrt(size_l / r_l)``: seldom for large layers that drift slowly. ``c`` is the smallest that keeps the budget,
with periods rounded up to whole numbers between 1 and ``longest``.

Rounds come in epochs of ``longest``. In an epoch ``r_l`` is measured whenever layer ``l`` is averaged, as its consensus
distance ``sum_k p_k ||theta_k^l - mean^l||^2`` divided by the rounds since it was averaged before; at its end all layers are
averaged and the periods are set anew. The first epoch has the periods of plain FedALS. A server gets the distances from sums,
as ``sum_k p_k ||theta_k^l - theta^l||^2 - ||mean^l - theta^l||^2`` with the last averaged ``theta``: one number per layer and
client, which is counted as traffic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from unskew.models.groups import layer_groups, slices_of
from unskew.models.vector import ModelSpec
from unskew.protocol.rules import Slices, Sync, Tensors

if TYPE_CHECKING:
    from unskew.methods.fedals.fedals import FedALS


@dataclass(frozen=True)
class AutoPeriods(Sync):
    """Periods that follow the measured drift.

    Attributes:
        first: Plain FedALS, whose periods the first epoch has.
        budget: Share of the parameters that travel per round on the average, relative to all of them.
        longest: Rounds of an epoch, and the longest period.
        periods, begun, synced: Of the epoch at hand; filled by ``now``.
    """

    name: ClassVar[str] = "fedals"
    summary: ClassVar[str] = "averages each layer as often as its clients' drift asks for"
    paper: ClassVar[str] = "after Gholami and Seferoglu 2024, arXiv:2404.11754"
    keeps_optimizer: ClassVar[bool] = True
    evaluates_mean: ClassVar[bool] = True
    observes: ClassVar[bool] = True

    first: FedALS
    budget: float
    longest: int
    periods: tuple[int, ...] = ()
    begun: int = 0
    synced: tuple[int, ...] = ()

    def init(self, spec: ModelSpec) -> Tensors:
        """No layer has been averaged, nothing is measured."""
        groups = len(layer_groups(spec))
        first = [min(p, self.longest) for p in self.first.periods_of(spec)]
        return {
            "periods": torch.tensor(first, dtype=torch.float64),
            "begun": torch.tensor(0.0, dtype=torch.float64),
            "synced": torch.full((groups,), -1.0, dtype=torch.float64),
            "growth": torch.zeros(groups, dtype=torch.float64),
            "count": torch.zeros(groups, dtype=torch.float64),
        }

    def now(self, state: Tensors) -> Sync:
        """The rule with the periods of the epoch at hand."""
        periods, synced = (tuple(int(n) for n in state[name]) for name in ("periods", "synced"))
        return replace(self, periods=periods, begun=int(state["begun"]), synced=synced)

    def due(self, round: int) -> list[bool]:
        """Which layers are averaged after ``round``."""
        age = round - self.begun + 1
        # Beyond the end: the epoch's last round had no update, so the next one with any is its last.
        return [age % p == 0 or age >= self.longest for p in self.periods]

    def travels(self, round: int, client: int, last: int | None, spec: ModelSpec) -> tuple[Slices, Slices]:
        """Down: what was averaged since the client last took part. Up: what is averaged after this round."""
        if not self.periods:
            return self.now(self.init(spec)).travels(round, client, last, spec)
        missed = [last is None or at >= last for at in self.synced]
        return slices_of(spec, tuple(missed)), slices_of(spec, tuple(self.due(round)))

    def too_short(self, rounds: int, spec: ModelSpec) -> str | None:
        """Whether the periods are never set anew."""
        if rounds > self.longest:
            return None
        return (
            f"fedals:auto measures for longest={self.longest} rounds before it first sets periods, and the run has {rounds}: "
            "it keeps those of plain fedals. Take more rounds or a smaller longest."
        )

    def numbers(self, spec: ModelSpec) -> int:
        """One per layer."""
        return len(layer_groups(spec))

    def observe(self, state: Tensors, round: int, distances: Tensor, spec: ModelSpec) -> Tensors:
        """Note the drift of what was averaged; at the end of an epoch, set the periods anew."""
        rule = self.now(state)
        assert isinstance(rule, AutoPeriods)
        due = torch.tensor(rule.due(round))
        elapsed = (round - state["synced"]).clamp_min(1)
        state = dict(state)
        state["growth"] = state["growth"] + torch.where(due, distances.cpu().to(torch.float64) / elapsed, 0.0)
        state["count"] = state["count"] + due
        state["synced"] = torch.where(due, float(round), state["synced"])
        if round - rule.begun + 1 >= self.longest:
            rates = state["growth"] / state["count"].clamp_min(1)
            sizes = torch.tensor([group.size for group in layer_groups(spec)], dtype=torch.float64)
            state["periods"] = best_periods(sizes, rates, self.budget, self.longest)
            state["begun"] = torch.tensor(float(round + 1), dtype=torch.float64)
            state["growth"], state["count"] = torch.zeros_like(rates), torch.zeros_like(rates)
        return state


def best_periods(sizes: Tensor, rates: Tensor, budget: float, longest: int) -> Tensor:
    """Whole periods ``[G]`` of least total distance whose traffic per epoch is within the budget.

    >>> best_periods(torch.tensor([90.0, 10.0]), torch.tensor([1.0, 1.0]), 1.0, 50).tolist()
    [1.0, 1.0]
    >>> best_periods(torch.tensor([90.0, 10.0]), torch.tensor([1.0, 1.0]), 0.25, 50).tolist()
    [5.0, 2.0]
    """
    shape = (sizes / rates.clamp_min(1e-300)).sqrt()
    shape = shape / shape.min()

    def periods(c: float) -> Tensor:
        return torch.ceil(c * shape - 1e-9).clamp(1, longest)

    def fits(c: float) -> bool:
        averages = torch.ceil(longest / periods(c)) / longest
        return float((sizes * averages).sum()) <= budget * float(sizes.sum()) * (1 + 1e-12)

    low, high = 0.0, 1.0
    while not fits(high) and high < 2 * longest:
        high *= 2
    if fits(low):
        return periods(low)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return periods(high)
