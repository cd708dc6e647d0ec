"""Client sampling of a run. Cohorts depend only on seed and round, unless the sampler reads losses or reports of clients."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from unskew.errors import ConfigError, short_repr
from unskew.protocol.client_sampler import ClientReport, ClientSampler, CohortDraws, FixedSampler
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.messages import Tensors, Update
from unskew.protocol.round_plan import RoundPlan, cohort_size
from unskew.secret_draws import SecretKey
from unskew.seeding import numpy_generator
from unskew.simulation.clock import Clock


class Sampler:
    """Draws the cohort of each round.

    Args:
        clients: Number of registered clients ``K``.
        participation: Share of clients per round, ``q``; a fixed cohort has at least one client.
        seed: Seed of the run.
        sampler: Draws the cohorts; None for cohorts of a fixed size.
        info: Information about the federation for the state of the sampler; None for samplers without one.
        secret: Secret key from which Poisson cohorts are drawn, because amplification by sampling requires that nobody
            can compute the cohort.

    Attributes:
        size: Number of clients of a fixed cohort, ``m``.
        state: State of the sampler; checkpoints contain it.

    >>> Sampler(clients=10, participation=0.3, seed=0).draw(0) == Sampler(10, 0.3, 0).draw(0)
    True
    """

    def __init__(
        self,
        clients: int,
        participation: float,
        seed: int,
        sampler: ClientSampler | None = None,
        info: FederationInfo | None = None,
        secret: SecretKey | None = None,
    ):
        self.sampler = FixedSampler() if sampler is None else sampler
        self.size = cohort_size(clients, participation)
        self.plan = RoundPlan(clients=clients, participation=participation, cohort=self.size)
        if info is not None:
            self.plan = info.plan
        self.seed, self.secret = seed, secret
        self.state: Tensors = {} if info is None else self._checked_state(self.sampler.init(info), "init")
        self.reports: dict[int, ClientReport] = {}

    @property
    def _state(self) -> Tensors:
        return {name: t.cpu() for name, t in self.state.items()}  # a checkpoint is restored on the device of the model

    def draw(self, round: int, in_flight: Collection[int] = ()) -> list[int]:
        """Draw the client ids of a round, in ascending order: fewer than usual if too few clients are idle.

        If the sampler asks for losses, these are the candidates.

        Args:
            round: Number of the round, from 0.
            in_flight: Clients that are still training.
        """
        generator = numpy_generator(self.seed, "cohort", round)
        uniform = generator.random if self.secret is None else self.secret.stream("cohort", round)
        idle = np.arange(self.plan.clients)
        if in_flight:
            idle = np.setdiff1d(idle, np.fromiter(in_flight, int))
        drawn = self.sampler.draw(self._state, round, idle, self.plan, CohortDraws(generator, uniform))
        return self._checked(drawn, idle, "draw")

    def select(self, candidates: Sequence[int], losses: Sequence[float]) -> list[int]:
        """Return the candidates that train, in ascending order.

        Args:
            candidates: Client ids.
            losses: Loss of each candidate.
        """
        selected = self.sampler.select(self._state, candidates, losses, self.plan)
        return self._checked(selected, np.asarray(candidates), "select")

    def _checked(self, chosen: Sequence[int] | np.ndarray, allowed: np.ndarray, hook: str) -> list[int]:
        """Return the clients that a sampler has chosen, in ascending order."""
        numbers = client_numbers(chosen)
        if numbers is None:
            raise ConfigError(
                f"The sampling {self.sampler.name} returned {short_repr(chosen)} in {hook}. Return a list or an array of "
                "client numbers, such as [0, 2]."
            )
        clients = np.sort(numbers)
        if not (np.isin(clients, allowed).all() and np.diff(clients).all()):
            raise ConfigError(
                f"The sampling {self.sampler.name} returned clients in {hook} that are still training, do not exist or "
                f"occur twice: {clients.tolist()[:20]}. Return each of the given clients at most once."
            )
        return [int(k) for k in clients]

    def _checked_state(self, state: Tensors, hook: str) -> Tensors:
        """Return the state that a hook has returned."""
        valid = isinstance(state, Mapping) and all(isinstance(name, str) for name in state)
        if not valid or not all(isinstance(t, torch.Tensor) for t in state.values()):
            raise ConfigError(
                f"The sampling {self.sampler.name} returned {short_repr(state)} in {hook}. Return a dictionary of tensors by "
                "name."
            )
        return dict(state)

    # ---- reports ----------------------------------------------------------------------------------------------------

    def watch_sent(self, results: Iterable[Update], cohort: Sequence[int], clock: Clock | None) -> Iterator[Update]:
        """Begin the reports of a round, and return the updates that its clients send; their times are noted.

        Args:
            results: Updates of the clients that did not drop out.
            cohort: Clients of the round.
            clock: Virtual clock; None without simulated time.
        """
        self.reports = {client: ClientReport(client) for client in cohort}  # before late updates of other rounds arrive
        return self._with_times(results, clock)

    def _with_times(self, results: Iterable[Update], clock: Clock | None) -> Iterator[Update]:
        for update in results:
            if clock is not None:
                seconds = clock.arrival(update) - clock.now
                self.reports[update.client] = ClientReport(update.client, seconds=seconds)
            yield update

    def watch_arrived(self, arrivals: Iterable[Update]) -> Iterator[Update]:
        """Yield the updates that arrive in a round, and note their losses."""
        for update in arrivals:
            sent = self.reports.get(update.client)
            self.reports[update.client] = ClientReport(
                update.client,
                update.num_samples,
                update.metrics["loss"],
                int(update.metrics["steps"]),
                None if sent is None else sent.seconds,
                True,
            )
            yield update

    def record(self, round: int, awaited: Collection[int] = ()) -> None:
        """Update the state of the sampler with the reports of a round.

        Args:
            round: Number of the round, from 0.
            awaited: Clients whose updates will arrive in a later round; others that have not arrived are lost.
        """
        reports = []
        for client in sorted(self.reports):
            report = self.reports[client]
            reports.append(replace(report, lost=not report.arrived and client not in awaited))
        state = self._checked_state(self.sampler.record(self._state, round, reports), "record")
        self.state.clear()
        self.state.update(state)


def client_numbers(chosen: Any) -> np.ndarray | None:
    """Return the output of a hook as client numbers, int64 ``[n]``; None if it is not a list or array of integers.

    Args:
        chosen: Output of a hook.

    >>> client_numbers((2, 0)).tolist(), client_numbers([0.5, 1.5]), client_numbers({0, 2})
    ([2, 0], None, None)
    """
    if isinstance(chosen, torch.Tensor):
        chosen = chosen.detach().cpu().numpy()
    if isinstance(chosen, Sequence):
        if any(isinstance(number, bool | np.bool_) for number in chosen):
            return None
    elif not isinstance(chosen, np.ndarray):
        return None
    try:
        numbers = np.asarray(chosen)
    except ValueError:  # lists of different lengths
        return None
    if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in "iu"):
        return None
    return numbers.astype(np.int64)
