"""Round loop: all steps of a run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from unskew.attacks.attackers import Attackers
from unskew.engines.base import Engine
from unskew.engines.run_threads import wait_for_runs
from unskew.errors import EngineError
from unskew.protocol.messages import Broadcast, Update
from unskew.protocol.rules import survey_times
from unskew.seeding import derive, seeded_globals
from unskew.simulation.network import Network
from unskew.simulation.sampler import Sampler
from unskew.simulation.server import Server

SIGNALS = tuple(
    number for name in ("SIGINT", "SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None
)
"""Signals that end a run after its round; Windows has no SIGHUP."""
IN_LAST_ROUND: list[int] = []
"""Signals during the last round of the previous run, which has ended regularly; a command executes no further run."""
NOTICE = b"\nFinishing this round to save it; press Ctrl-C (or send the signal) again to stop at once.\n"


class RunInterrupted(KeyboardInterrupt):
    """Raised after Ctrl-C, SIGTERM or SIGHUP, once the round in progress was finished and saved in ``folder``.

    Args:
        number: Number of the signal; available as an attribute.

    Attributes:
        folder: Run folder, or None.
    """

    folder: Path | None = None

    def __init__(self, number: int = signal.SIGINT):
        super().__init__()
        self.number = number


def run_rounds(
    rounds: range,
    sampler: Sampler,
    server: Server,
    engine: Engine,
    network: Network,
    finished: Callable[[int, dict[str, Any]], bool],
    attackers: Attackers | None = None,
    sends_models: Callable[[int], bool] = lambda t: True,
) -> None:
    """Run the rounds.

    Args:
        rounds: Numbers of the rounds.
        sampler: Draws the cohorts.
        server: Server with the global model.
        engine: Trains the clients.
        network: Delivers the updates.
        finished: Called with the number and the metrics of a round, to evaluate, record and save it; returns whether
            the round was the last one.
        attackers: Replace the updates of attackers; None for an honest run.
        sends_models: Returns whether clients send their whole models in a round, if the evaluated model needs them.
    """
    setup, state = server.setup, server.state
    asks = any("asked" in survey_times(rule) for rule in setup.method.client)
    with interruptible() as stopped:
        for t in rounds:
            draws = derive(setup.seed, "server draws", t)
            with seeded_globals(setup.spec.draws_globally, draws, state.v.device):
                cohort = [] if setup.rule.steps_without == "clients" else sampler.draw(t, network.in_flight)
                if sampler.sampler.asks_loss and cohort:
                    with timed_exchange(network):
                        cohort = sampler.select(cohort, server.losses(t, cohort, engine))
                if asks and cohort:
                    with timed_exchange(network):
                        server.ask(t, cohort, engine)
                if network.clock is not None:
                    network.clock.start_round(cohort)
                broadcasts = server.broadcaster.broadcasts(t, cohort, sends_models(t))
                dropped = {k for k in cohort if network.drops(t, k)}
                for k in dropped:
                    server.clients.drop_sent(k)
                trained = [broadcast for broadcast in broadcasts if broadcast.client not in dropped]
                results: Iterable[Update] = train_clients(engine, trained)
                if attackers is not None:
                    results = attackers.replace_updates(t, state.v, trained, results)
                if sampler.sampler.reads_reports:
                    results = sampler.watch_sent(results, cohort, network.clock)
                arrivals = network.deliver(t, results)
                if sampler.sampler.reads_reports:
                    arrivals = sampler.watch_arrived(arrivals)
                metrics = server.aggregator.step(t, arrivals)
                if sampler.sampler.reads_reports:
                    sampler.record(t, network.awaited)
                if finished(t, {"cohort": len(cohort), **metrics, **network.metrics()}):
                    return
                stopped.extend(wait_for_runs(t))
                if stopped:
                    raise RunInterrupted(stopped[0])


@contextmanager
def timed_exchange(network: Network) -> Iterator[None]:
    """Context manager of an exchange without training, for which the virtual clock waits."""
    counted = {} if network.clock is None else network.clock.counted()
    yield
    if network.clock is not None:
        network.clock.add_exchange(counted)


def train_clients(engine: Engine, broadcasts: Sequence[Broadcast]) -> Iterator[Update]:
    """Train the clients of a round.

    Args:
        engine: Trains the clients.
        broadcasts: Messages from the server.

    Yields:
        Update of each broadcast, in order.

    Raises:
        EngineError: If the training of a client raised ``StopIteration``, which would silently end the round.
    """
    try:
        yield from engine.train(broadcasts)
    except (StopIteration, RuntimeError) as error:
        if not isinstance(error.__cause__ or error, StopIteration):
            raise
        raise EngineError(
            "The training of a client raised StopIteration: an iterator of a rule or a model is exhausted. Create a new "
            "iterator for each client, or call next(iterator, default)."
        ) from error


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Context manager that delays the first Ctrl-C, SIGTERM or SIGHUP to the end of the round; the next acts at once.

    Yields:
        List to which the number of the signal is appended.
    """
    stopped: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    # Ignored signals stay ignored: nohup ignores SIGHUP.
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: former for number, former in handlers.items() if former is not signal.SIG_IGN}

    def restore() -> None:
        for number, former in before.items():
            signal.signal(number, former)

    def handler(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        restore()
        # os.write is safe in signal handlers, unlike print.
        os.write(2, NOTICE)

    for number in before:
        signal.signal(number, handler)
    try:
        yield stopped
        IN_LAST_ROUND[:] = stopped
    finally:
        restore()
