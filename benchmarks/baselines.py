"""Two yardsticks for the speed of a federated-learning simulator, free of any framework.

``ResearcherLoop`` is FedAvg the way it is usually written for a paper. ``TunedLoop`` is the same algorithm
tuned by hand for one machine with two cores. Both run complete FedAvg rounds of a small CNN on CIFAR-10-shaped
images and share one interface: ``Loop(x, y, clients, per_client, cohort, steps, batch, lr, seed)``,
``round(t)`` and ``close()``. Client ``c`` owns the samples ``c * per_client`` to ``(c + 1) * per_client - 1``.

Run ``python benchmarks/baselines.py [--data train.parquet]`` to measure them.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import multiprocessing as mp
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)

SETTINGS = {
    "A": {"clients": 100, "per_client": 500, "cohort": 10, "steps": 8, "batch": 64, "lr": 0.05, "seed": 1},
    "B": {"clients": 1000, "per_client": 50, "cohort": 50, "steps": 5, "batch": 10, "lr": 0.05, "seed": 1},
}


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
    """The clients of round ``t``, drawn without replacement."""
    return np.random.default_rng([seed, t]).choice(clients, cohort, replace=False).tolist()


class ResearcherLoop:
    """FedAvg as it is usually written: DataLoader, deepcopy, torch.optim.SGD, state_dict averaging."""

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


# What pays in TunedLoop, as the share of CPU time per round that it saves when everything else stays (AMD EPYC with
# AVX-512, two cores, torch 2.13, real CIFAR-10, one thread, medians of interleaved repetitions):
#
#                                                                              A        B
#   input channels-last (both input and weights NCHW otherwise)              15 %     13 %
#   malloc that keeps freed memory                                         3-12 %    0-1 %   depends on the heap
#   autograd.grad + _foreach_add_ instead of torch.optim.SGD                2-3 %   5-10 %   fused=True, foreach=True
#                                                                                            and the default are equal
#   mean and std repeated to the length of an image                           5 %      3 %   a broadcast over the last
#                                                                                            3 channels is 4x slower
#   ReLU after the pooling instead of a relu() before it                      2 %      3 %   1 % if that is in place
#   together=5 (2: 14 % and 23 %, 10: 14 % and 39 %)                         19 %     37 %   fewer, larger kernels, and
#                                                                                            enough channels for a
#                                                                                            vectorised pooling
#
# Two processes of one thread against one process of two threads: main() shows it; more the smaller the batches.
#
# What was tried and does not pay (within 1 to 2 % unless a number is given):
#
#   - weights channels-last: little once the input is; kept, since the vector is then in the kernels' order
#   - fc1 with its inputs channels-last, so that flattening is a view: kept for simplicity
#   - normalised float32 images in memory instead of uint8 normalised per batch: same time, four times the memory
#   - gathering, or normalising, a whole epoch at once instead of batch by batch
#   - torch._fused_sgd_ called directly instead of torch._foreach_add_
#   - gradients as views of one flat buffer and one v.add_(g, alpha=-lr): same time, as the buffer has to be zeroed
#     and accumulated into; concatenating the gradients first: 1 to 4 % slower
#   - torch.set_flush_denormal(True); switching the garbage collector off
#   - fixed halves of the cohort instead of a shared counter: same time on an idle machine; the counter stays for
#     busy ones. Clients are of equal size, so there is no "largest first"
#   - two Python threads with a model each instead of two processes: 7 % slower in B (interpreter lock)
#   - torch.compile: 2 % faster in A, 3 % slower in B, 10 to 30 s to compile
#   - torch.func.vmap over five clients: 1.45 (A) and 1.15 (B) times the time of one client after the other
#   - switching oneDNN off: twice the time
#
# Left out because it rewrites the arithmetic for these very shapes: conv1 computing two neighbouring pixels as 12
# channels with stride 2 (6 channels fill 6 of 16 lanes), and a first pooling made of torch.maximum over strided
# views with a backward pass of its own. Together (with together=1) they save 19 % in A and nothing in B.


def keep_freed_memory() -> None:
    """Tell glibc to keep freed blocks: otherwise every step faults its activations in anew. Process-wide."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, at its upper limit
            mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def to_vector(model: CnnA) -> torch.Tensor:
    """The parameters as one vector, in the memory order that the kernels like best (see ``Stack``)."""
    pieces = []
    for name, p in model.named_parameters():
        p = p.detach()
        if p.dim() == 4:
            p = p.permute(0, 2, 3, 1)  # channels last
        elif name == "fc1.weight":
            p = p.view(120, 16, 25).transpose(1, 2)  # takes its input channels last too: flattening is a view
        pieces.append(p.reshape(-1))
    return torch.cat(pieces)


class Stack:
    """``k`` copies of CNN-A as one network, side by side; for ``k = 1`` plain CNN-A.

    All parameters are views of one buffer: tensor after tensor, each holding the ``k`` copies one after the other.
    """

    SHAPES = ((6, 3, 5, 5), (6,), (16, 6, 5, 5), (16,), (120, 400), (120,), (84, 120), (84,), (10, 84), (10,))

    def __init__(self, k: int) -> None:
        self.k = k
        self.sizes = [int(np.prod(shape)) for shape in self.SHAPES]
        self.blocks = [b.view(k, -1) for b in torch.zeros(k * sum(self.sizes)).split([k * s for s in self.sizes])]
        self.views = [self._view(b, shape) for b, shape in zip(self.blocks, self.SHAPES, strict=True)]
        self.parameters = [v.detach().requires_grad_() for v in self.views]

    def _view(self, block: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 4:  # convolution: copies are groups
            out, channels, height, width = shape
            return block.view(self.k * out, height, width, channels).permute(0, 3, 1, 2)
        if len(shape) == 1 and shape[0] in (6, 16):
            return block.view(-1)
        if self.k == 1:
            return block.view(shape)
        if len(shape) == 2:
            return block.view(self.k, *shape)
        return block.view(self.k, 1, *shape)

    def load(self, vector: torch.Tensor) -> None:
        for block, piece in zip(self.blocks, vector.split(self.sizes), strict=True):
            block.copy_(piece)

    def add_to(self, vector: torch.Tensor, weight: float) -> None:
        """Add ``weight`` times each of the copies to ``vector``."""
        for block, piece in zip(self.blocks, vector.split(self.sizes), strict=True):
            piece.add_(block[0] if self.k == 1 else block.sum(0), alpha=weight)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """From images [batch, 3k, 32, 32], channels last, to logits [k * batch, 10]."""
        w1, b1, w2, b2, w3, b3, w4, b4, w5, b5 = self.parameters
        k, batch = self.k, len(x)
        x = F.max_pool2d(F.conv2d(x, w1, b1, groups=k), 2).relu_()
        x = F.max_pool2d(F.conv2d(x, w2, b2, groups=k), 2).relu_()
        x = x.permute(0, 2, 3, 1)
        if k == 1:
            x = x.reshape(batch, 400)
            x = F.linear(x, w3, b3).relu_()
            x = F.linear(x, w4, b4).relu_()
            return F.linear(x, w5, b5)
        x = x.reshape(batch, 25, k, 16).permute(2, 0, 1, 3).reshape(k, batch, 400)
        x = torch.baddbmm(b3, x, w3.transpose(1, 2)).relu_()
        x = torch.baddbmm(b4, x, w4.transpose(1, 2)).relu_()
        return torch.baddbmm(b5, x, w5.transpose(1, 2)).view(k * batch, 10)

    def step(self, x: torch.Tensor, y: torch.Tensor, lr: float) -> None:
        """One step of SGD on the mean loss of each copy's own batch."""
        loss = F.cross_entropy(self.logits(x), y, reduction="sum")
        gradients = torch.autograd.grad(loss, self.parameters)
        torch._foreach_add_(self.views, gradients, alpha=-lr / len(x))


class Trainer:
    """Local training of ``k`` clients at a time, from images kept as uint8."""

    def __init__(self, x: np.ndarray, y: np.ndarray, per_client: int, steps: int, batch: int, lr: float, seed: int):
        keep_freed_memory()
        self.x = torch.from_numpy(x).view(len(x), -1)
        self.y = torch.from_numpy(y)
        self.per_client, self.steps, self.batch, self.lr, self.seed = per_client, steps, batch, lr, seed
        mean, std = torch.tensor(MEAN), torch.tensor(STD)
        self.scale = (1 / (255 * std)).repeat(32 * 32)
        self.shift = (-mean / std).repeat(32 * 32)
        self.stacks: dict[int, Stack] = {}

    def batches(self, clients: list[int], t: int) -> Iterator[torch.Tensor]:
        """Indices [k, batch] of each step: shuffled epochs, the last batch of an epoch may be smaller."""
        generators = [torch.Generator().manual_seed(hash((self.seed, t, c)) & 0x7FFFFFFF) for c in clients]
        done = 0
        while True:
            epoch = torch.stack(
                [
                    torch.randperm(self.per_client, generator=g).add_(c * self.per_client)
                    for c, g in zip(clients, generators, strict=True)
                ]
            )
            for index in epoch.split(self.batch, dim=1):
                if done == self.steps:
                    return
                yield index
                done += 1

    def images(self, index: torch.Tensor) -> torch.Tensor:
        """Normalised images [batch, 3k, 32, 32], channels last, of indices [k, batch]."""
        k, batch = index.shape
        x = self.x.index_select(0, index.reshape(-1))
        x = torch.addcmul(self.shift, x.float(), self.scale)
        if k > 1:
            x = x.view(k, batch, 32 * 32, 3).permute(1, 2, 0, 3)
        return x.reshape(batch, 32, 32, 3 * k).permute(0, 3, 1, 2)

    def train(self, clients: list[int], t: int, start: torch.Tensor, total: torch.Tensor, weight: float) -> None:
        """Train ``clients`` from ``start`` and add ``weight`` times each resulting vector to ``total``."""
        k = len(clients)
        if k not in self.stacks:
            self.stacks[k] = Stack(k)
        stack = self.stacks[k]
        stack.load(start)
        for index in self.batches(clients, t):
            stack.step(self.images(index), self.y.index_select(0, index.reshape(-1)), self.lr)
        stack.add_to(total, weight)


class TunedLoop:
    """FedAvg tuned by hand: images as uint8, one reused model over one flat buffer, no optimiser object.

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
        together: How many clients at most are trained as one network of grouped convolutions and batched matrix
            products. 1 is one model, one client after the other. 5 is faster, the same algorithm, and possible
            because all clients have equally many samples.

    It changes settings of its process (threads in mode "threads", malloc): measure each loop in its own process.
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
        together: int = 1,
    ) -> None:
        if mode not in ("threads", "processes"):
            raise ValueError(f"mode must be 'threads' or 'processes', not {mode!r}")
        self.clients, self.cohort, self.seed, self.mode, self.together = clients, cohort, seed, mode, together
        self.make_trainer = partial(Trainer, x, y, per_client, steps, batch, lr, seed)
        torch.manual_seed(seed)
        self.vector = to_vector(CnnA())
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
            there.close()  # so that a worker's death is an EOFError here
            self.pipes.append(here)
            self.processes.append(process)

    def _groups(self, t: int) -> list[list[int]]:
        chosen = draw_cohort(self.clients, self.cohort, self.seed, t)
        if self.together == 1:
            return [[c] for c in chosen]
        workers = self.WORKERS if self.mode == "processes" else 1
        each = -(-self.cohort // (self.together * workers))  # groups for each worker
        return [g for i in range(each * workers) if (g := chosen[i :: each * workers])]

    def _work(self, pipe: Connection, total: torch.Tensor) -> None:
        """A worker: for each round number received, train groups until none is left, then answer."""
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


def _serve(make_loop: Callable[[], Any], pipe: Connection) -> None:
    """Hold one loop; run as many rounds as asked for and answer the seconds per round."""
    loop = make_loop()
    t = 0
    while (rounds := pipe.recv()) is not None:
        start = time.perf_counter()
        for _ in range(rounds):
            loop.round(t)
            t += 1
        pipe.send((time.perf_counter() - start) / rounds)
    loop.close()


def measure(
    loops: dict[str, Callable[[], Any]], repetitions: int, rounds: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Seconds per round of each loop, measured in turn; each loop lives in a process of its own.

    Args:
        loops: By name, what makes the loop (inside its process).
        repetitions: How many times the turn goes round.
        rounds: FedAvg rounds of each loop per turn.
        warm_up: Unmeasured rounds before.

    Returns:
        By name, one number for each repetition.
    """
    fork = mp.get_context("fork")
    handles = []
    for make_loop in loops.values():
        here, there = fork.Pipe()
        process = fork.Process(target=_serve, args=(make_loop, there))
        process.start()
        there.close()
        handles.append((here, process))
        here.send(warm_up)
        here.recv()
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(repetitions):
        for name, (pipe, _process) in zip(loops, handles, strict=True):
            pipe.send(rounds)
            seconds[name].append(pipe.recv())
    for pipe, process in handles:
        pipe.send(None)
        process.join()
    return seconds


def load_images(path: str | None) -> tuple[np.ndarray, np.ndarray]:
    """CIFAR-10 from a parquet file with JPEG bytes, or noise of the same shape."""
    if path is None:
        rng = np.random.default_rng(0)
        return rng.integers(0, 256, (50_000, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, 50_000)
    import pyarrow.parquet
    import simplejpeg

    table = pyarrow.parquet.read_table(path)
    images = [simplejpeg.decode_jpeg(row["bytes"], colorspace="RGB") for row in table["img"].to_pylist()]
    return np.stack(images), table["label"].to_numpy().astype(np.int64)


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
            "tuned, threads, 5 together": partial(TunedLoop, mode="threads", together=5),
            "tuned, processes, 5 together": partial(TunedLoop, mode="processes", together=5),
        }
        loops = {name: partial(kind, x, y, **SETTINGS[setting]) for name, kind in kinds.items()}
        for name, seconds in measure(loops, args.repetitions, args.rounds).items():
            median, best = 1 / statistics.median(seconds), 1 / min(seconds)
            print(f"{setting}  {name:<30} {median:6.2f} rounds/s (median), {best:6.2f} (best)", flush=True)


if __name__ == "__main__":
    main()
