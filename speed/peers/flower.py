"""Flower's simulation on Ray, a worker for each core with one thread."""

from __future__ import annotations

import os
import sys

import torch
from flwr.client import ClientApp, NumPyClient
from flwr.common import FitIns, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation

from speed.peers.work import Ended, Work

REQUIREMENTS = ("flwr[simulation]==1.41.0",)
SETTING = "Ray, one single-threaded worker per core"
DATA: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
"""Data of the clients that this worker has trained."""


class Client(NumPyClient):
    """Client app that trains the client that the server names."""

    def __init__(self, folder: str):
        self.work = Work(folder)

    def fit(self, parameters, config):
        """Run some steps of SGD."""
        torch.set_num_threads(1)
        work, k = self.work, int(config["client"])
        if k not in DATA:
            DATA[k] = tuple(map(torch.from_numpy, work.normalized(k)))
        x, y = DATA[k]
        model = work.model()
        with torch.no_grad():
            for parameter, start in zip(model.parameters(), parameters, strict=True):
                parameter.copy_(torch.from_numpy(start))
        optimizer, left = torch.optim.SGD(model.parameters(), work.lr), work.steps
        while left:
            for index in torch.randperm(len(y)).split(work.batch)[:left]:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x[index]), y[index]).backward()
                optimizer.step()
                left -= 1
        return [p.detach().numpy() for p in model.parameters()], len(y), {}


class Turns(FedAvg):
    """FedAvg with the cohorts of all libraries, as long as there are turns."""

    def __init__(self, work: Work):
        super().__init__(fraction_evaluate=0.0, initial_parameters=ndarrays_to_parameters(work.start()))
        self.work = work

    def configure_fit(self, server_round, parameters, client_manager):
        """Assign a client of the cohort to each node."""
        self.work.begin()
        cohort = self.work.cohorts[server_round - 1]
        nodes = client_manager.sample(len(cohort), len(cohort))
        return [(node, FitIns(parameters, {"client": k})) for node, k in zip(nodes, cohort, strict=True)]

    def aggregate_fit(self, server_round, results, failures):
        """Average as the library does."""
        if failures:
            raise RuntimeError(f"A client failed: {failures[0]}")
        mean, metrics = super().aggregate_fit(server_round, results, failures)
        self.model = parameters_to_ndarrays(mean)
        self.work.end()
        return mean, metrics


def main(folder: str) -> None:
    """Run the library's own simulation."""
    work = Work(folder)
    strategy = Turns(work)

    def server(context):
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=len(work.cohorts)))

    cores = os.cpu_count() or 1
    backend = {"init_args": {"num_cpus": cores}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    try:
        run_simulation(
            ServerApp(server_fn=server),
            ClientApp(client_fn=lambda context: Client(folder).to_client()),
            num_supernodes=len(work.cohorts[0]),
            backend_config=backend,
        )
    except (Ended, RuntimeError):
        if not hasattr(strategy, "model"):
            raise
    work.finish(strategy.model)


if __name__ == "__main__":
    main(sys.argv[1])
