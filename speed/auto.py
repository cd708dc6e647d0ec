"""Regret of ``engine: auto``: how much longer a run takes than with the engine that would have been best.

``python -m speed.auto [--only CASE] [--trials N] [--json FILE]``

For every workload, the start and the rounds of each candidate engine are timed in turn. Then ``auto`` decides several times,
each time in a new process: with an empty calibration file (cold) and with the file of an earlier run (warm), on an idle
machine and next to a process that keeps one core busy.

A run of ``R`` rounds with an engine takes

    T(engine) = seconds of its start and first round + (R - 1) * median seconds of its later rounds

and the regret is ``(seconds of the decision + T(chosen)) / min T``, for runs that take about 2, 6 and 60 s with the best
engine. What the decision loads and the start would load again counts once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from speed.speed import CIFAR, federation_of, machine
from speed.timing import load_images, measure
from unskew import Federation, ModelSpec, load_federation, method
from unskew.engines.auto_select import EngineChoice, EngineRequest, choose_engine
from unskew.engines.base import EngineConfig
from unskew.engines.cpu import keep_freed_memory, num_cores
from unskew.engines.registry import make_engine
from unskew.methods.fedavg import server_rule
from unskew.models.registry import build_model
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.training_config import Training
from unskew.simulation.network import Network
from unskew.simulation.round_loop import run_rounds
from unskew.simulation.sampler import Sampler
from unskew.simulation.server import Server
from unskew.simulation.server_state import ServerSetup
from unskew.tasks.registry import TASKS

LENGTHS = {"2 s": 2.0, "6 s": 6.0, "60 s": 60.0}
"""Seconds of the runs with the best engine."""


class TinyTransformer(nn.Module):
    """Two transformer encoder layers of width 64 over 32 tokens, and a linear classifier of their mean."""

    def __init__(self, vocabulary: int = 256, classes: int = 10):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(dim=1))


class Workload:
    """A federation, a model and a budget.

    Args:
        federation: Data of the clients.
        model: Name of a registered model, or a module.
        cohort: Clients per round.
        steps: Local steps.
        batch: Samples per step.
    """

    def __init__(self, federation: Federation, model: str | nn.Module, cohort: int, steps: int, batch: int):
        self.federation, self.model, self.cohort = federation, model, cohort
        self.training = Training(local_steps=steps, local_epochs=None, batch_size=batch, lr=0.01)

    def config(self) -> EngineConfig:
        """Return what an engine needs for FedAvg."""
        torch.manual_seed(0)
        fed = self.federation
        model = build_model(self.model, fed.shape, fed.classes) if isinstance(self.model, str) else self.model
        tokens = torch.int64 if fed.clients[0].x.dtype == torch.int64 else None
        spec = ModelSpec(model, fed.shape, fed.classes, input_dtype=tokens)
        rules = method("fedavg").client
        return EngineConfig(spec, fed, rules, TASKS["classification"], self.training, 0, torch.device("cpu"))


class Loop:
    """Rounds of FedAvg on one engine.

    Args:
        workload: What is trained.
        choice: Engine, number of workers and clients per group.
    """

    def __init__(self, workload: Workload, choice: EngineChoice):
        keep_freed_memory()  # as the command line does
        torch.set_num_threads(num_cores())
        config = workload.config()
        fedavg = method("fedavg")
        clients = len(workload.federation.clients)
        size = choice.clients_per_group
        self.engine = make_engine(choice.engine, config, choice.workers, size, threads=choice.threads)
        info = replace(FederationInfo.of(workload.federation), weights="samples")
        self.server = Server(ServerSetup(fedavg, server_rule(fedavg), config.spec, info))
        self.sampler = Sampler(clients, workload.cohort / clients, 0)
        self.network = Network(0.0, 0)

    def round(self, t: int) -> None:
        """Run round ``t``."""
        run_rounds(range(t, t + 1), self.sampler, self.server, self.engine, self.network, lambda t, figures: None)

    def close(self) -> None:
        """End the workers."""
        self.engine.close()


def vectors(clients: int, per_client: int, features: int, classes: int = 10) -> Federation:
    """Return a federation of normally distributed vectors."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(clients * per_client + 100, features)).astype(np.float32)
    y = rng.integers(0, classes, len(x))
    parts = [slice(k * per_client, (k + 1) * per_client) for k in range(clients)]
    test = (x[-100:], y[-100:])
    return Federation.from_arrays([(x[part], y[part]) for part in parts], test=test, classes=classes, holdout=0.0)


def texts(clients: int, per_client: int) -> Federation:
    """Return a federation of random token sequences of length 32."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, 256, (clients * per_client + 100, 32)))
    y = torch.from_numpy(rng.integers(0, 10, len(x)))
    from unskew.data.federation import ArrayClients

    offsets = np.arange(clients + 1) * per_client
    return Federation(ArrayClients(x[:-100], y[:-100], offsets, offsets[1:]), test=(x[-100:], y[-100:]), classes=10)


def workloads(x: np.ndarray, y: np.ndarray) -> dict[str, Callable[[], Workload]]:
    """Return the workloads by name; each function loads its data.

    Args:
        x: CIFAR-10 images, ``[50000, 32, 32, 3]``, or random ones.
        y: Their classes.
    """
    digits = partial(load_federation, "digits", partition="iid", clients=20, holdout=0.0)
    return {
        "CNN-A, 8 steps of 64, cohort 10 (A)": lambda: Workload(federation_of(x, y, 100, 500), "cnn", 10, 8, 64),
        "CNN-A, 5 steps of 10, cohort 50 (B)": lambda: Workload(federation_of(x, y, 1000, 50), "cnn", 50, 5, 10),
        "MLP on digits, 10 steps of 16, cohort 10": lambda: Workload(digits(), "mlp", 10, 10, 16),
        "ResNet-20, 5 steps of 10, cohort 10": lambda: Workload(federation_of(x, y, 100, 500), "resnet20", 10, 5, 10),
        "transformer, 5 steps of 16, cohort 10": lambda: Workload(texts(100, 80), TinyTransformer(), 10, 5, 16),
        "table MLP, 10 steps of 32, cohort 20": lambda: Workload(vectors(1000, 64, 30), "table-mlp", 20, 10, 32),
        "CNN-A, 1 step of 10, cohort 50": lambda: Workload(federation_of(x, y, 1000, 50), "cnn", 50, 1, 10),
        "VGG-11, 2 steps of 32, cohort 3": lambda: Workload(federation_of(x, y, 3, 500), "vgg11", 3, 2, 32),
        "logistic, 2 steps of 16, cohort 200": lambda: Workload(vectors(1000, 32, 60), "logistic", 200, 2, 16),
    }


def candidates(cohort: int) -> dict[str, EngineChoice]:
    """Return the engines that are compared, by label."""
    cores = min(num_cores(), cohort)
    choices = {"inline": EngineChoice("inline", 1), "processes": EngineChoice("processes", cores)}
    for wanted in (8, 25):
        turns = max(1, round(cohort / (wanted * cores)))
        group = -(-cohort // (cores * turns))
        if group > 1:
            choices[f"processes, {group} together"] = EngineChoice("processes", cores, group)
    return choices


def label(choice: EngineChoice) -> str:
    """Return the label of a choice as in ``candidates``."""
    together = f", {choice.clients_per_group} together" if choice.clients_per_group > 1 else ""
    return choice.engine + together


def busy(seconds: float) -> None:
    """Keep one core busy."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def start_seconds(workload: Workload, choice: EngineChoice | None, rounds: int, cache: str, pipe: Any) -> None:
    """Start an engine and run one round in this process; send the choice and the seconds that it all took.

    Args:
        workload: What is trained.
        choice: Engine, or None to let ``auto`` decide.
        rounds: Rounds of the run, which ``auto`` considers.
        cache: Folder of the calibration file.
        pipe: Where to send the result.
    """
    os.environ["XDG_CACHE_HOME"] = cache
    keep_freed_memory()
    torch.set_num_threads(num_cores())
    config = workload.config()
    start = time.perf_counter()
    if choice is None:
        choice = choose_engine(EngineRequest("auto", None, "auto"), config, workload.cohort, rounds, None, False)
    loop = Loop(workload, choice)
    loop.round(0)
    pipe.send((choice, time.perf_counter() - start))
    loop.close()


def started(
    workload: Workload, choice: EngineChoice | None, rounds: int, cache: str, disturbed: bool = False
) -> tuple[EngineChoice, float]:
    """Call ``start_seconds`` in a new process, next to a busy one if ``disturbed``."""
    fork = mp.get_context("fork")
    neighbor = fork.Process(target=busy, args=(60.0,))
    if disturbed:
        neighbor.start()
    parent_end, child_end = fork.Pipe()
    process = fork.Process(target=start_seconds, args=(workload, choice, rounds, cache, child_end))
    process.start()
    child_end.close()
    result = parent_end.recv()
    process.join()
    if disturbed:
        neighbor.kill()
        neighbor.join()
    return result


class Costs:
    """Measured seconds of each engine for one workload, measured when they are first needed."""

    def __init__(self, workload: Workload, repetitions: int):
        self.workload, self.repetitions = workload, repetitions
        choices = candidates(workload.cohort)
        once = measure({"inline": partial(Loop, workload, choices["inline"])}, 1, 1)["inline"][0]
        self.per_turn = max(1, round(0.3 / once))
        self.start: dict[str, float] = {}
        self.round: dict[str, float] = {}
        self.add(choices)

    def add(self, choices: dict[str, EngineChoice]) -> None:
        """Measure engines in turn."""
        loops = {kind: partial(Loop, self.workload, choice) for kind, choice in choices.items()}
        measured = measure(loops, self.repetitions, self.per_turn)
        self.round |= {kind: statistics.median(times) for kind, times in measured.items()}
        for kind, choice in choices.items():
            self.start[kind] = min(started(self.workload, choice, 1, "/nonexistent")[1] for _ in range(3))

    def total(self, kind: str, rounds: int, start: float | None = None) -> float:
        """Return the seconds of a run; ``start`` replaces the engine's own start and first round."""
        return (self.start[kind] if start is None else start) + (rounds - 1) * self.round[kind]

    def best(self, rounds: int) -> float:
        """Return the seconds of a run with the best engine."""
        return min(self.total(kind, rounds) for kind in self.round)


def regrets(name: str, workload: Workload, repetitions: int, trials: int, conditions: list[str]) -> dict[str, Any]:
    """Measure one workload; prints its rows and returns them."""
    costs = Costs(workload, repetitions)
    row: dict[str, Any] = {"workload": name, "round": costs.round, "start": costs.start, "regret": {}}
    for condition in conditions:
        disturbed = condition == "disturbed"
        for length, wanted in LENGTHS.items():
            rounds = max(2, round(wanted / min(costs.round.values())))
            for state in ("cold", "warm"):
                values, chosen = [], []
                with tempfile.TemporaryDirectory() as cache:
                    if state == "warm":
                        started(workload, None, rounds, cache)
                    for _ in range(trials):
                        if state == "cold":
                            for file in Path(cache).rglob("*.json"):
                                file.unlink()
                        choice, seconds = started(workload, None, rounds, cache, disturbed)
                        kind = label(choice)
                        if kind not in costs.round:
                            costs.add({kind: choice})
                        values.append(costs.total(kind, rounds, seconds) / costs.best(rounds))
                        chosen.append(kind)
                row["regret"][f"{length}, {state}, {condition}"] = {"values": values, "chosen": chosen}
    print(f"\n{name}\n  " + "  ".join(f"{kind} {1000 * s:.1f} ms" for kind, s in costs.round.items()))
    for key, result in row["regret"].items():
        values, kinds = result["values"], sorted(set(result["chosen"]))
        print(f"  {key:<24} mean {statistics.mean(values):.3f}  max {max(values):.3f}  {', '.join(kinds)}", flush=True)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Return the mean regrets as a Markdown table; each cell has the cold and the warm value."""
    states = [state for state in ("idle", "disturbed") if f"2 s, cold, {state}" in rows[0]["regret"]]
    conditions = [(length, state) for state in states for length in LENGTHS]
    header = ["workload", "fastest round", *(f"{length}, {state}" for length, state in conditions)]
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for row in rows:
        cells = []
        for length, state in conditions:
            means = [
                statistics.mean(row["regret"][f"{length}, {start}, {state}"]["values"]) for start in ("cold", "warm")
            ]
            cells.append(" / ".join(f"{mean:.2f}" for mean in means))
        fastest = min(row["round"], key=lambda kind: row["round"][kind])
        lines.append(f"| {row['workload']} | {fastest} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure the workloads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", help="CIFAR-10 parquet file; by default the one next to the checkout, or random images"
    )
    parser.add_argument("--only", help="measure workloads whose name contains this text")
    parser.add_argument("--repetitions", type=int, default=5, help="measurements of each engine")
    parser.add_argument("--trials", type=int, default=3, help="decisions of auto for each condition")
    parser.add_argument("--idle", action="store_true", help="measure nothing next to a busy process")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)  # a process that has used several threads cannot be forked into one that uses them
    path = args.data or (str(CIFAR) if CIFAR.exists() else None)
    x, y = load_images(path)
    rows = [
        regrets(name, make(), args.repetitions, args.trials, ["idle"] if args.idle else ["idle", "disturbed"])
        for name, make in workloads(x, y).items()
        if not args.only or args.only in name
    ]
    print(f"\n{table(rows)}")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
