"""Public schedule of a run: number of rounds, size and sampling of cohorts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from unskew.errors import ConfigError, unknown_name
from unskew.protocol.training_config import Training

Sampling = Literal["fixed", "poisson", "power-of-choice"]
KINDS = get_args(Sampling)


def parse_sampling(text: str) -> tuple[Sampling, int | None]:
    """Parse ``fixed``, ``poisson`` or ``power-of-choice:D`` into the kind and the number of candidates ``D``.

    Args:
        text: Value of the option ``sampling``.

    Raises:
        ConfigError: If the value is not valid.

    >>> parse_sampling("power-of-choice:20")
    ('power-of-choice', 20)
    """
    kind, _, number = text.partition(":")
    if kind not in KINDS:
        raise ConfigError(unknown_name("sampling", kind, KINDS))
    if kind != "power-of-choice":
        if number:
            raise ConfigError(f"{kind} has no number; write sampling={kind}")
        return cast(Sampling, kind), None
    if not number.isdecimal() or not 0 < int(number) < 10**9:
        raise ConfigError("write power-of-choice:D with the number of candidates, such as power-of-choice:20")
    return "power-of-choice", int(number)


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
        sampling: ``fixed`` cohorts of ``m`` clients, ``poisson``: each client is drawn with probability ``q``, or
            ``power-of-choice``: the ``m`` candidates with the largest loss.
        candidates: Number of candidates ``D`` of power-of-choice; None for other kinds.
        scales: Factors that give the uploads of client rules the unit of an update, by ``RULE/NAME``; see
            ``ClientRule.private``.
        training: Budget of the clients.
        masked: Whether clients send masked updates (``secure_aggregation: required``).
    """

    rounds: int = 1
    clients: int = 1
    participation: float = 1.0
    cohort: int = 1
    sampling: Sampling = "fixed"
    candidates: int | None = None
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
