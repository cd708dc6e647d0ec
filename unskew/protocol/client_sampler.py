"""Interface of samplers, which draw the clients of each round, and the default one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

if TYPE_CHECKING:  # the configuration is validated without PyTorch
    from unskew.protocol.federation_info import FederationInfo
    from unskew.protocol.messages import Tensors
    from unskew.protocol.round_plan import RoundPlan


@dataclass(frozen=True)
class CohortDraws:
    """Random numbers of one round.

    Attributes:
        generator: Generator whose numbers depend on seed and round alone.
        uniform: Returns the given number of uniform numbers in [0, 1), from the secret key of the run if it has one.
    """

    generator: np.random.Generator
    uniform: Callable[[int], np.ndarray]


@dataclass(frozen=True)
class ClientReport:
    """Client of a round as the server sees it after the round.

    With delays, an update that arrives in a later round is reported again in that round, with its loss. An update that is
    neither ``arrived`` nor ``lost`` is in flight.

    Attributes:
        client: Client number.
        num_samples: Number of training samples; 0 if the update has not arrived.
        loss: Mean training loss of the local steps; None if the update has not arrived.
        steps: Number of local steps; 0 if the update has not arrived.
        seconds: Simulated time from the start of the round to the arrival of the update, or to the time at which a lost
            update would have arrived; None without simulated time, for clients that dropped out, and for updates of earlier
            rounds.
        arrived: Whether the update arrived in this round.
        lost: Whether the update will never arrive, because the client dropped out or missed the deadline.
    """

    client: int
    num_samples: int = 0
    loss: float | None = None
    steps: int = 0
    seconds: float | None = None
    arrived: bool = False
    lost: bool = False


class ClientSampler:
    """Sampler, which draws the clients of each round.

    Subclasses are dataclasses whose fields are the options in ``sampling: NAME:option=value``. Hooks are pure functions:
    what changes from round to round is in the state, which checkpoints contain.
    """

    name: ClassVar[str]
    """Name of the sampler, as in the configuration."""
    asks_loss: ClassVar[bool] = False
    """True if drawn clients report the loss of the model before ``select`` chooses among them."""
    reads_reports: ClassVar[bool] = False
    """True if ``record`` uses losses or times of single clients."""
    timed_options: ClassVar[tuple[str, ...]] = ()
    """Options that have no effect without simulated time. A run without it then raises an error if they differ from their
    defaults."""

    def check(self, plan: RoundPlan) -> None:
        """Validate the options against the schedule of a run (raises ``ConfigError``).

        Args:
            plan: Schedule of the run.
        """

    def init(self, info: FederationInfo) -> Tensors:
        """Return the state before the first round.

        Args:
            info: Information about the federation, such as the numbers of samples.
        """
        return {}

    def draw(
        self, state: Tensors, round: int, idle: np.ndarray, plan: RoundPlan, draws: CohortDraws
    ) -> Sequence[int] | np.ndarray:
        """Draw the clients of a round, in any order, each at most once.

        Args:
            state: State of the sampler, on the CPU.
            round: Number of the round, from 0.
            idle: Clients that can be drawn, ascending; others are still training.
            plan: Schedule of the run; ``plan.cohort`` is the usual number of clients.
            draws: Random numbers of the round.
        """
        raise NotImplementedError

    def select(
        self, state: Tensors, candidates: Sequence[int], losses: Sequence[float], plan: RoundPlan
    ) -> Sequence[int] | np.ndarray:
        """Choose the clients that train, if ``asks_loss``.

        Args:
            state: State of the sampler, on the CPU.
            candidates: Drawn clients, ascending.
            losses: Mean loss of the model on the training samples of each candidate.
            plan: Schedule of the run.
        """
        return candidates

    def record(self, state: Tensors, round: int, reports: Sequence[ClientReport]) -> Tensors:
        """Return the state after a round, if ``reads_reports``.

        Args:
            state: State of the sampler, on the CPU.
            round: Number of the round, from 0.
            reports: Clients of the round, and updates that arrived late.
        """
        return state


@dataclass(frozen=True)
class FixedSampler(ClientSampler):
    """Draws a fixed number of clients uniformly without replacement."""

    name: ClassVar[str] = "fixed"

    def draw(
        self, state: Tensors, round: int, idle: np.ndarray, plan: RoundPlan, draws: CohortDraws
    ) -> Sequence[int] | np.ndarray:
        """Draw ``m`` clients, or all that are idle if these are fewer."""
        if len(idle) < plan.clients:
            return draws.generator.choice(idle, size=min(plan.cohort, len(idle)), replace=False)
        if plan.cohort == plan.clients:
            return idle
        return draws.generator.choice(plan.clients, size=plan.cohort, replace=False, shuffle=False)
