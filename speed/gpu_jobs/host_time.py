"""Host time of a round of ``vectorized`` without its kernels: ``python -m speed.gpu_jobs.host_time`` on any CPU.

Recorded work is replaced by nothing, so what remains is the time that Python needs per round: broadcasts, batch plans,
tables, launches, and the server. A GPU that trains a round faster than this waits for the host.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch

from speed.baselines import SETTINGS
from unskew import Federation, ModelSpec, Normalization, method
from unskew.data.federation import ArrayClients
from unskew.engines.base import EngineConfig
from unskew.engines.vectorized import VectorizedEngine
from unskew.methods.fedavg import server_rule
from unskew.models.registry import build_model
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.training_config import Training
from unskew.simulation.server import Server
from unskew.simulation.server_state import ServerSetup
from unskew.tasks.registry import TASKS

COHORTS = {"A": 10, "B": 50}
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
    setting, cohort, what = SETTINGS[name], COHORTS[name], method(spelling)
    clients, per_client, draws = 2 * cohort, setting["per_client"], np.random.default_rng(0)
    images = torch.from_numpy(draws.integers(0, 256, (clients * per_client, 8, 8, 1), dtype=np.uint8)).permute(
        0, 3, 1, 2
    )
    labels = torch.from_numpy(draws.integers(0, 10, len(images)))
    offsets = np.arange(clients + 1) * per_client
    data = ArrayClients(images, labels, offsets, offsets[1:])
    federation = Federation(data, (images[:100], labels[:100]), normalization=Normalization((0.5,), (0.2,), 1 / 255))
    spec = ModelSpec(build_model("logistic", federation.shape, 10), federation.shape, 10)
    training = Training(local_steps=setting["steps"], local_epochs=None, batch_size=setting["batch"], lr=0.05)
    task = TASKS["classification"]
    setup = EngineConfig(spec, federation, what.client, task, training, 0, torch.device("cpu"))
    engine = VectorizedEngine(setup, record=NoWork)  # type: ignore[arg-type]
    server = Server(ServerSetup(what, server_rule(what), spec, FederationInfo.of(federation)))
    engine.sums = server.setup.sums_suffice
    parts = []
    for t in range(ROUNDS):
        chosen = sorted(draws.choice(clients, cohort, replace=False).tolist())
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
    for name in COHORTS:
        for spelling in ("fedavg", "scaffold"):
            times = host_times(name, spelling)
            print(f"| {name}, {spelling} | {' | '.join(f'{ms:.2f}' for ms in times)} | {sum(times):.2f} |", flush=True)


if __name__ == "__main__":
    main()
