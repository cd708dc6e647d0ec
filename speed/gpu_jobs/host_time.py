"""Host time of a round of ``vectorized`` without its kernels: ``python -m speed.gpu_jobs.host_time`` on any CPU.

Recorded work is replaced by nothing, so what remains is the time that Python needs per round: broadcasts, batch plans,
tables, launches, and the server. A GPU that trains a round faster than this waits for the host.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from speed.gpu import Rounds
from speed.settings import SETTINGS

ROUNDS = 60


class NoWork:
    """Recorded work that is not executed."""

    def __init__(self, work: object, restore: object):
        pass

    def replay(self) -> None:
        """Do nothing."""


def host_times(name: str, spelling: str) -> list[float]:
    """Return the median milliseconds of broadcasts, engine and server in a round.

    Args:
        name: Setting ``A`` or ``B``.
        spelling: Expression of the method.
    """
    cohort, draws = SETTINGS[name]["cohort"], np.random.default_rng(0)
    options: dict[str, Any] = {"model": "logistic", "shape": (8, 8, 1), "spelling": spelling, "record": NoWork}
    rounds = Rounds({**SETTINGS[name], "clients": 2 * cohort}, cohort, torch.device("cpu"), **options)
    engine, server = rounds.engine, rounds.server
    parts = []
    for t in range(ROUNDS):
        chosen = sorted(draws.choice(2 * cohort, cohort, replace=False).tolist())
        times = [time.process_time()]
        broadcasts = server.broadcaster.broadcasts(t, chosen)
        times.append(time.process_time())
        updates = list(engine.train(broadcasts))
        times.append(time.process_time())
        server.aggregator.step(t, updates)
        times.append(time.process_time())
        parts.append(np.diff(times) * 1e3)
    return [statistics.median(column) for column in zip(*parts[ROUNDS // 2 :], strict=True)]


def main() -> None:
    """Print the host time of the settings A and B."""
    torch.set_num_threads(1)
    print("| setting | broadcasts | engine | server | ms per round |\n|---|---|---|---|---|")
    for name in SETTINGS:
        for spelling in ("fedavg", "scaffold"):
            times = host_times(name, spelling)
            print(f"| {name}, {spelling} | {' | '.join(f'{ms:.2f}' for ms in times)} | {sum(times):.2f} |", flush=True)


if __name__ == "__main__":
    main()
