"""Public schedule of a run: number of rounds, size and sampling of cohorts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unskew.protocol.training_config import Training


def cohort_size(clients: int, participation: float) -> int:
    """Return the number of clients of a fixed cohort, ``m``.

    Args:
        clients: Number of clients ``K``.
        participation: Share of clients per round, ``q``.
    """
    return max(1, round(participation * clients))


@dataclass(frozen=True)
class RoundPlan:
    """Schedule of a run, which server and clients know before the first round.

    Attributes:
        rounds: Number of rounds ``T``.
        clients: Number of clients ``K``.
        participation: Share of clients per round, ``q``.
        cohort: Number of clients per round, ``m``; with Poisson cohorts the expected number, rounded.
        sampling: Name of the sampler that draws the cohorts: ``fixed``, ``poisson``, ...
        asks_loss: Whether drawn clients report the loss of the model before the sampler chooses among them.
        reads_reports: Whether the sampler uses losses or times of single clients.
        scales: Factors that give the uploads of client rules the unit of an update, by ``RULE/NAME``; see
            ``ClientRule.private``.
        training: Budget of the clients.
        masked: Whether clients send masked updates (``secure_aggregation: required``).
    """

    rounds: int = 1
    clients: int = 1
    participation: float = 1.0
    cohort: int = 1
    sampling: str = "fixed"
    asks_loss: bool = False
    reads_reports: bool = False
    scales: Mapping[str, float] = field(default_factory=dict)
    training: Training = field(default_factory=Training)
    masked: bool = False

    @property
    def divisor(self) -> float:
        """Expected number of clients per round, ``m`` or ``q K``, which does not depend on who replied."""
        return self.participation * self.clients if self.sampling == "poisson" else float(self.cohort)

    @property
    def amplification(self) -> float:
        """Sampling rate that a privacy accountant may use: ``q`` with Poisson cohorts, 1 without amplification."""
        return self.participation if self.sampling == "poisson" else 1.0


DEFAULT_PLAN = RoundPlan()
"""Schedule of a run of one client and one round, for contexts that are created by hand."""
