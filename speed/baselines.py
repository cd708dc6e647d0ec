"""Two framework-free baselines for the speed of a federated-learning simulator.

``ResearcherLoop`` is FedAvg the way it is usually written for a paper. ``TunedLoop`` is the same algorithm
tuned by hand for one machine with two cores. Both run complete FedAvg rounds of a small CNN on CIFAR-10-shaped
images and share one interface: ``Loop(x, y, clients, per_client, cohort, steps, batch, lr, seed)``,
``round(t)`` and ``close()``. Client ``c`` owns the samples ``c * per_client`` to ``(c + 1) * per_client - 1``.

Run ``python -m speed.baselines [--data train.parquet]`` to measure them.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing as mp
import statistics
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from speed.settings import MEAN, SETTINGS, STD
from speed.timing import load_images, measure


class CnnA(nn.Module):
    """Two 5x5 convolutions with pooling, three fully connected layers: 62,006 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


def draw_cohort(clients: int, cohort: int, seed: int, t: int) -> list[int]:
    """Return the clients of round ``t``, drawn without replacement."""
    return np.random.default_rng([seed, t]).choice(clients, cohort, replace=False).tolist()


class ResearcherLoop:
    """FedAvg as usually written for a paper: DataLoader, deepcopy, torch.optim.SGD, state_dict averaging."""

    def __init__(
        self,
        x: np.ndarray,
        y: np.ndarray,
        clients: int,
        per_client: int,
        cohort: int,
        steps: int,
        batch: int,
        lr: float,
        seed: int,
    ) -> None:
        self.clients, self.cohort, self.steps, self.lr, self.seed = clients, cohort, steps, lr, seed
        torch.manual_seed(seed)
        self.model = CnnA()
        images = torch.from_numpy(x[: clients * per_client]).permute(0, 3, 1, 2).float() / 255
        images = (images - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
        images = images.contiguous()
        labels = torch.from_numpy(y[: clients * per_client])
        self.loaders = [
            DataLoader(TensorDataset(client_x, client_y), batch_size=batch, shuffle=True)
            for client_x, client_y in zip(images.split(per_client), labels.split(per_client), strict=True)
        ]

    def train_client(self, client: int) -> tuple[dict[str, torch.Tensor], int]:
        """Train a copy of the global model; return its state and the client's number of samples."""
        loader = self.loaders[client]
        model = copy.deepcopy(self.model)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr)
        batches = iter(loader)
        for _ in range(self.steps):
            try:
                images, labels = next(batches)
            except StopIteration:
                batches = iter(loader)
                images, labels = next(batches)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        return model.state_dict(), len(loader.dataset)  # type: ignore[arg-type]

    def round(self, t: int) -> None:
        results = [self.train_client(c) for c in draw_cohort(self.clients, self.cohort, self.seed, t)]
        total = sum(size for _, size in results)
        average = {key: sum(state[key] * (size / total) for state, size in results) for key in results[0][0]}
        self.model.load_state_dict(average)

    def close(self) -> None:
        pass


class Trainer:
    """One reused model, channels-last batches from uint8 images in memory, fused SGD."""

    clients_per_group = 1

    def __init__(self, x: np.ndarray, y: np.ndarray, per_client: int, steps: int, batch: int, lr: float, seed: int):
        self.x, self.y = torch.from_numpy(x), torch.from_numpy(y)
        self.per_client, self.steps, self.batch, self.seed = per_client, steps, batch, seed
        self.scale, self.shift = 1 / (255 * torch.tensor(STD)), -torch.tensor(MEAN) / torch.tensor(STD)
        self.model = CnnA().to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, fused=True)

    @staticmethod
    def start_vector() -> torch.Tensor:
        return nn.utils.parameters_to_vector(CnnA().parameters()).detach()

    def train(self, clients: list[int], t: int, start: torch.Tensor, total: torch.Tensor, weight: float) -> None:
        """Train one client from ``start`` and add ``weight`` times the resulting vector to ``total``."""
        (client,) = clients
        draws = torch.Generator().manual_seed(hash((self.seed, t, client)) & 0x7FFFFFFF)
        with torch.no_grad():
            nn.utils.vector_to_parameters(start, self.model.parameters())
        done = 0
        while done < self.steps:
            order = torch.randperm(self.per_client, generator=draws) + client * self.per_client
            for index in order.split(self.batch)[: self.steps - done]:
                x = torch.addcmul(self.shift, self.x[index].float(), self.scale).permute(0, 3, 1, 2)
                self.optimizer.zero_grad()
                F.cross_entropy(self.model(x), self.y[index]).backward()
                self.optimizer.step()
                done += 1
        total.add_(nn.utils.parameters_to_vector(self.model.parameters()).detach(), alpha=weight)


class TunedLoop:
    """FedAvg tuned by hand with PyTorch's own means, for one machine with two cores.

    Args:
        x: Images, uint8 [N, 32, 32, 3].
        y: Labels, int64 [N].
        clients: Number of clients.
        per_client: Samples of each client.
        cohort: Clients per round.
        steps: Mini-batch steps per client and round.
        batch: Batch size.
        lr: Learning rate.
        seed: Seed of the initial model, the cohorts and the shuffling.
        mode: "threads" (one process, two threads) or "processes" (two forked processes of one thread each).
        clients_per_group: Maximum number of clients that are trained as one network of grouped convolutions and batched
            matrix products. 1 trains one client after the other. 5 is the same algorithm but faster; it is possible
            because all clients have the same number of samples.

    The loop changes settings of its process (malloc, and threads in mode "threads"): measure each in its own process.
    """

    WORKERS = 2

    def __init__(
        self,
        x: np.ndarray,
        y: np.ndarray,
        clients: int,
        per_client: int,
        cohort: int,
        steps: int,
        batch: int,
        lr: float,
        seed: int,
        mode: str = "processes",
        trainer: Callable[..., Any] = Trainer,
    ) -> None:
        if mode not in ("threads", "processes"):
            raise ValueError(f"mode must be 'threads' or 'processes', not {mode!r}")
        self.clients, self.cohort, self.seed, self.mode = clients, cohort, seed, mode
        self.make_trainer = partial(trainer, x, y, per_client, steps, batch, lr, seed)
        torch.manual_seed(seed)
        self.clients_per_group, self.vector = trainer.clients_per_group, trainer.start_vector()
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        if mode == "threads":
            torch.set_num_threads(self.WORKERS)
            self.trainer = self.make_trainer()
            return
        fork = mp.get_context("fork")
        self.vector.share_memory_()
        self.sums = torch.zeros(self.WORKERS, len(self.vector)).share_memory_()
        self.next_group = fork.Value("l", 0)
        for k in range(self.WORKERS):
            here, there = fork.Pipe()
            process = fork.Process(target=self._work, args=(there, self.sums[k]), daemon=True)
            process.start()
            there.close()  # so that the death of a worker raises EOFError here
            self.pipes.append(here)
            self.processes.append(process)

    def _groups(self, t: int) -> list[list[int]]:
        cohort = draw_cohort(self.clients, self.cohort, self.seed, t)
        if self.clients_per_group == 1:
            return [[c] for c in cohort]
        workers = self.WORKERS if self.mode == "processes" else 1
        each = -(-self.cohort // (self.clients_per_group * workers))  # groups per worker
        return [g for i in range(each * workers) if (g := cohort[i :: each * workers])]

    def _work(self, pipe: Connection, total: torch.Tensor) -> None:
        """Run a worker: for each received round number, train groups until none is left, then reply."""
        torch.set_num_threads(1)
        trainer = self.make_trainer()
        while True:
            try:
                t = pipe.recv()
            except EOFError:
                return
            if t is None:
                return
            groups = self._groups(t)
            total.zero_()
            while True:
                with self.next_group.get_lock():
                    i = self.next_group.value
                    self.next_group.value += 1
                if i >= len(groups):
                    break
                trainer.train(groups[i], t, self.vector, total, 1 / self.cohort)
            pipe.send(t)

    def round(self, t: int) -> None:
        if self.mode == "threads":
            total = torch.zeros_like(self.vector)
            for group in self._groups(t):
                self.trainer.train(group, t, self.vector, total, 1 / self.cohort)
            self.vector = total
            return
        self.next_group.value = 0
        for pipe in self.pipes:
            pipe.send(t)
        for pipe in self.pipes:
            pipe.recv()
        torch.sum(self.sums, 0, out=self.vector)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join()
        self.pipes, self.processes = [], []


def main() -> None:
    parser = argparse.ArgumentParser(description="Rounds per second of the framework-free FedAvg loops.")
    parser.add_argument("--data", help="CIFAR-10 parquet file (columns img, label); random images without it")
    parser.add_argument("--settings", default="AB", help="which of the settings A and B to run")
    parser.add_argument("--repetitions", type=int, default=11, help="measurements of each loop")
    parser.add_argument("--rounds", type=int, default=3, help="rounds in each measurement")
    args = parser.parse_args()

    x, y = load_images(args.data)
    for setting in args.settings:
        kinds: dict[str, Callable[..., Any]] = {
            "researcher": ResearcherLoop,
            "tuned, threads": partial(TunedLoop, mode="threads"),
            "tuned, processes": partial(TunedLoop, mode="processes"),
        }
        loops = {name: partial(kind, x, y, **SETTINGS[setting]) for name, kind in kinds.items()}
        for name, seconds in measure(loops, args.repetitions, args.rounds).items():
            median, best = 1 / statistics.median(seconds), 1 / min(seconds)
            print(f"{setting}  {name:<30} {median:6.2f} rounds/s (median), {best:6.2f} (best)", flush=True)


if __name__ == "__main__":
    main()
