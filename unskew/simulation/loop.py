"""The round. Everything that happens in a run is these lines."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from unskew.engines.base import Engine
from unskew.simulation.network import Network
from unskew.simulation.sampler import Sampler
from unskew.simulation.server import Server


class Interrupted(KeyboardInterrupt):
    """Ctrl-C was pressed; the round in progress was finished and saved in ``folder``."""

    folder: Path | None = None


def train(
    rounds: range,
    sampler: Sampler,
    server: Server,
    engine: Engine,
    network: Network,
    finished: Callable[[int, dict[str, Any]], None],
) -> None:
    """Run the rounds; ``finished(t, figures)`` evaluates, records and saves after each."""
    with _interruptible() as stopped:
        for t in rounds:
            cohort = [] if server.rule.steps_without == "clients" else sampler.draw(t, network.in_flight)
            casts = [server.broadcast(t, k) for k in cohort]
            gone = {k for k in cohort if network.drops(t, k)}
            for k in gone:
                server.lost(k)
            results = engine.train([cast for cast in casts if cast.client not in gone])
            arrivals = network.deliver(t, results)
            figures = server.step(t, arrivals)
            finished(t, {"cohort": len(cohort), **figures, **network.figures()})
            if stopped() and t + 1 < rounds.stop:
                raise Interrupted


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Within, the first Ctrl-C waits for the end of the round; the second one interrupts at once."""
    pressed: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.getsignal(signal.SIGINT)

    def handler(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        signal.signal(signal.SIGINT, before)
        # Not print: this may interrupt one.
        os.write(2, b"\nFinishing this round to save it; press Ctrl-C again to stop at once.\n")

    signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
