"""Simulated network: which updates arrive, and when."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from unskew.protocol.messages import Update
from unskew.seeding import numpy_generator
from unskew.simulation.client_store import ClientStore
from unskew.simulation.clock import Clock
from unskew.simulation.delays import Delays


class Network:
    """Delivers updates, at once or after a delay; an update is lost with probability ``drop``.

    A client that drops out received the model (its bytes are counted) but sends nothing and keeps no new state.

    Args:
        drop: Probability that a client drops out in a round.
        seed: Seed of the run.
        delays: Delays of updates in rounds; None for none.
        store: Storage for the tensors of updates in flight.
        device: Device to which tensors are moved when they arrive.
        clock: Simulated time, whose deadline delays or loses updates; None for none.

    Attributes:
        pending: Updates in flight, without tensors; ``arrived`` is the round in which they will arrive, if that is known.
    """

    pending: list[Update]

    def __init__(
        self,
        drop: float,
        seed: int,
        delays: Delays | None = None,
        store: ClientStore | None = None,
        device: torch.device | None = None,
        clock: Clock | None = None,
    ):
        self.drop = drop
        self.seed = seed
        self.delays = delays or Delays("none", seed)
        self.store = ClientStore() if store is None else store  # an empty store is falsy
        self.device = device or torch.device("cpu")
        self.clock = clock
        self.pending = []
        self.ages: list[int] = []

    @property
    def in_flight(self) -> frozenset[int]:
        """Clients with an update in flight; they are not drawn until it has arrived."""
        return frozenset(update.client for update in self.pending)

    @property
    def awaited(self) -> frozenset[int]:
        """Clients whose update will arrive in a later round."""
        return self.in_flight

    def drops(self, round: int, client: int) -> bool:
        """Return whether a client drops out in a round; known before it trains, so that it need not be trained.

        Args:
            round: Number of the round, from 0.
            client: Client number.
        """
        return self.drop > 0 and numpy_generator(self.seed, "drop", round, client).random() < self.drop

    def deliver(self, round: int, results: Iterable[Update]) -> Iterator[Update]:
        """Return the updates that reach the server in ``round``, ordered by round of broadcast and by client.

        Args:
            round: Number of the round, from 0.
            results: Updates of the round's training.
        """
        if self.clock is not None:
            return self._deliver_in_time(self.clock, round, results)
        if self.delays.instant:
            return iter(results)
        arrivals = [update for update in self.pending if update.arrived == round]
        self.pending = [update for update in self.pending if update.arrived > round]
        for update in results:
            delay = self.delays(round, update.client)
            if delay:
                self._hold(update, round + delay)
            else:
                arrivals.append(update)
        self.ages = [round - update.origin_round for update in arrivals]
        arrivals.sort(key=lambda update: (update.origin_round, update.client))
        return (
            u if u.origin_round == round else Update.of(u.fields(), self.store.take(u.client), self.device)
            for u in arrivals
        )

    def _deliver_in_time(self, clock: Clock, round: int, results: Iterable[Update]) -> Iterator[Update]:
        """Yield the updates that arrive before the deadline of the round, and move the clock to the round's end."""
        due = [update for update in self.pending if clock.arrivals[update.client] <= clock.limit]
        self.pending = [update for update in self.pending if clock.arrivals[update.client] > clock.limit]
        self.ages = [round - update.origin_round for update in due]
        for update in sorted(due, key=lambda update: (update.origin_round, update.client)):
            clock.latest = max(clock.latest, clock.arrivals.pop(update.client))
            yield Update.of(update.fields(), self.store.take(update.client), self.device)
        for update in results:
            time = clock.arrival(update)
            if time <= clock.limit:
                self.ages.append(0)
                yield update
            elif clock.accepts_late:
                clock.arrivals[update.client] = time
                self._hold(update)
            else:
                clock.num_late += 1
                clock.server.clients.drop_sent(update.client)
        clock.end_round()

    def _hold(self, update: Update, arrival: int = -1) -> None:
        """Store an update in flight; ``arrival`` is the round in which it will arrive, -1 if that is not known."""
        self.store.put(update.client, update.tensors())
        self.pending.append(Update.of({**update.fields(), "arrived": arrival}, {}))

    def metrics(self) -> dict[str, Any]:
        """Return the round metrics on time and delays: updates in flight, and the ages in rounds of the arrivals."""
        metrics: dict[str, Any] = {}
        may_wait = not self.delays.instant
        if self.clock is not None:
            metrics["seconds_simulated"] = self.clock.now
            if self.clock.deadline < math.inf:
                may_wait = self.clock.accepts_late
                metrics |= {} if may_wait else {"late": self.clock.num_late}
        return {**metrics, **(age_metrics(self.ages, len(self.pending)) if may_wait else {})}


def age_metrics(ages: Sequence[int], in_flight: int) -> dict[str, Any]:
    """Return round metrics on the ages of updates and on updates in flight.

    Args:
        ages: Age of each update that arrived, in rounds.
        in_flight: Number of updates that have not arrived.
    """
    return {
        "arrivals": len(ages),
        "in_flight": in_flight,
        "staleness": sum(ages) / len(ages) if ages else None,
        "staleness_counts": {str(age): ages.count(age) for age in sorted(set(ages))},
    }
