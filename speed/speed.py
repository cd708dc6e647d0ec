"""Measure speed and memory of unskew next to two framework-free loops, in turn in one run.

``python -m speed.speed [--data cifar10/train.parquet] [--only speed|clients|engines] [--json FILE]``

There are three tables: rounds per second compared with the loops of ``speed/baselines.py``; time and memory per
round for 100, 10,000 and 1,000,000 registered clients; and rounds per second of each engine on small and large models,
on which the engine ``auto`` is based.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speed.baselines import ResearcherLoop, TunedLoop
from speed.handmade import HandmadeTogether, HandmadeTrainer
from speed.settings import MEAN, SETTINGS, STD
from speed.timing import load_images, measure, resident
from unskew import ClientData, Federation, ModelSpec, Normalization, method
from unskew.data.federation import ArrayClients
from unskew.engines.auto_select import EngineRequest, choose_engine
from unskew.engines.base import EngineConfig
from unskew.engines.cpu import keep_freed_memory
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

CIFAR = Path(__file__).parents[2] / "shared" / "data" / "cifar10" / "train.parquet"
LONG = 1000
"""Number of rounds of a run that is long enough for a trial to take all the time it may."""


class UnskewLoop:
    """Round of unskew on one engine, with the interface of the baselines."""

    def __init__(
        self,
        federation: Federation,
        cohort: int,
        steps: int,
        batch: int,
        lr: float,
        seed: int,
        engine: str = "processes",
        model: str = "cnn",
        spelling: str = "fedavg",
        clients_per_group: int | str = 1,
        model_options: dict[str, Any] | None = None,
    ):
        torch.manual_seed(seed)
        what = method(spelling)
        keep_freed_memory()  # as the command line does
        module = build_model(model, federation.shape, federation.classes, **(model_options or {}))
        spec = ModelSpec(module, federation.shape, federation.classes)
        training = Training(local_steps=steps, local_epochs=None, batch_size=batch, lr=lr)
        setup = EngineConfig(
            spec, federation, what.client, TASKS["classification"], training, seed, torch.device("cpu")
        )
        if isinstance(clients_per_group, str):  # "auto": the result of a trial for a long run
            request = EngineRequest(engine, None, clients_per_group)
            choice = choose_engine(request, setup, cohort, LONG, None, False)
            size = choice.clients_per_group
            self.engine = make_engine(choice.engine, setup, choice.workers, size, threads=choice.threads)
        else:
            self.engine = make_engine(engine, setup, clients_per_group=clients_per_group)
        info = replace(FederationInfo.of(federation), weights=what.weights or "samples")
        self.server = Server(ServerSetup(what, server_rule(what), spec, info))
        self.sampler = Sampler(len(federation.clients), cohort / len(federation.clients), seed)
        self.network = Network(0.0, seed)

    def round(self, t: int) -> None:
        run_rounds(range(t, t + 1), self.sampler, self.server, self.engine, self.network, lambda t, figures: None)

    def close(self) -> None:
        self.engine.close()


def federation_of(x: np.ndarray, y: np.ndarray, clients: int, per_client: int) -> Federation:
    """Create clients as in the baselines: ``c`` owns the samples ``c * per_client`` to ``(c + 1) * per_client - 1``."""
    total = clients * per_client
    images, labels = torch.from_numpy(x[:total]).permute(0, 3, 1, 2), torch.from_numpy(y[:total])
    offsets = np.arange(clients + 1) * per_client
    return Federation(
        ArrayClients(images, labels, offsets, offsets[1:]),
        test=(images[:100], labels[:100]),
        classes=10,
        normalization=Normalization(MEAN[: x.shape[3]], STD[: x.shape[3]], 1 / 255),
    )


def clients_per_group(cohort: int) -> int:
    """Return the number of clients per network, at most about ten, that gives two workers equal shares."""
    return -(-cohort // (2 * max(1, cohort // 20)))


def speed(x: np.ndarray, y: np.ndarray, repetitions: int, rounds: int) -> list[dict[str, Any]]:
    """Compare unskew's engines with the baselines: FedAvg with CNN-A in settings A and B."""
    rows = []
    for name, setting in SETTINGS.items():
        fed = federation_of(x, y, setting["clients"], setting["per_client"])
        options = {k: v for k, v in setting.items() if k not in ("clients", "per_client")}
        loops: dict[str, Callable[[], Any]] = {
            "(a) researcher's loop": partial(ResearcherLoop, x, y, **setting),
            "(b) tuned loop, 2 threads": partial(TunedLoop, x, y, **setting, mode="threads"),
            "(b) tuned loop, 2 processes": partial(TunedLoop, x, y, **setting, mode="processes"),
            "(c) made for this model": partial(TunedLoop, x, y, **setting, trainer=HandmadeTrainer),
            "(c) and 5 clients as one": partial(TunedLoop, x, y, **setting, trainer=HandmadeTogether),
            "unskew, inline": partial(UnskewLoop, fed, **options, engine="inline"),
            "unskew, processes": partial(UnskewLoop, fed, **options, engine="processes"),
        }
        for spelling in ("fedavg", "scaffold", "fedprox"):
            loops[f"unskew, processes, together, {spelling}"] = partial(
                UnskewLoop,
                fed,
                **options,
                engine="processes",
                spelling=spelling,
                clients_per_group=clients_per_group(options["cohort"]),
            )
        memory: dict[str, float] = {}
        seconds = measure(loops, repetitions, rounds, memory=memory)
        tuned = min(statistics.median(s) for loop, s in seconds.items() if loop.startswith("(b)"))
        for loop, values in seconds.items():
            median = statistics.median(values)
            row = {"setting": name, "loop": loop, "rounds_per_s": 1 / median, "of_tuned": tuned / median}
            rows.append({**row, "mb": memory[loop]})
            print(f"{name}  {loop:<28} {1 / median:6.2f} rounds/s  {tuned / median:5.2f} of (b)  "
                  f"{memory[loop]:5.0f} MiB", flush=True)  # fmt: skip
    return rows


class Registered(Sequence[ClientData]):
    """Any number of clients over the same 500 samples each of a shared array."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, clients: int, per_client: int = 500):
        self.x, self.y, self.clients, self.per_client = x, y, clients, per_client

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, k: int) -> ClientData:  # type: ignore[override]
        offset = k % (len(self.y) // self.per_client) * self.per_client
        rows, none = slice(offset, offset + self.per_client), slice(0, 0)
        return ClientData(k, self.x[rows], self.y[rows], self.x[none], self.y[none])


def _registered(x: np.ndarray, y: np.ndarray, clients: int, spelling: str, rounds: int, pipe: Any) -> None:
    images, labels = torch.from_numpy(x).permute(0, 3, 1, 2), torch.from_numpy(y)
    fed = Federation(
        Registered(images, labels, clients), test=(images[:100], labels[:100]), classes=10,
        normalization=Normalization(MEAN, STD, 1 / 255),
    )  # fmt: skip
    loop = UnskewLoop(fed, cohort=10, steps=8, batch=64, lr=0.05, seed=1, spelling=spelling)
    loop.round(0)
    before, seconds = resident(), []
    for t in range(1, rounds + 1):
        start = time.perf_counter()
        loop.round(t)
        seconds.append(time.perf_counter() - start)
    after = resident()
    loop.close()
    pipe.send((statistics.median(seconds), before, after))


def clients(x: np.ndarray, y: np.ndarray, rounds: int) -> list[dict[str, Any]]:
    """Measure time and memory per round at a cohort of 10, for increasing numbers of registered clients."""
    rows = []
    for spelling in ("fedavg", "scaffold"):
        for count in (100, 10_000, 1_000_000):
            fork = mp.get_context("fork")
            here, there = fork.Pipe()
            process = fork.Process(target=_registered, args=(x, y, count, spelling, rounds, there))
            process.start()
            seconds, before, after = here.recv()
            process.join()
            rows.append(
                {"method": spelling, "clients": count, "seconds": seconds, "mb": after, "growth_mb": after - before}
            )
            print(f"{spelling:<9} {count:>9,} clients  {seconds:6.3f} s/round  {after:6.0f} MiB after {rounds} rounds "
                  f"({after - before:+.0f} MiB)", flush=True)  # fmt: skip
    return rows


def engines(x: np.ndarray, y: np.ndarray, repetitions: int) -> list[dict[str, Any]]:
    """Measure rounds per second of every engine, from tiny to large work per client, with and without groups."""
    small = np.ascontiguousarray(x[:, 8:16, 8:16, :1])
    cases = {
        "logistic, 8x8, 1 step of 32, cohort 10": (small, "logistic", 10, 1, 32),
        "logistic, 8x8, 10 steps of 32, cohort 10": (small, "logistic", 10, 10, 32),
        "mlp, 8x8, 10 steps of 32, cohort 10": (small, "mlp", 10, 10, 32),
        "cnn, 32x32, 5 steps of 10, cohort 50": (x, "cnn", 50, 5, 10),
        "cnn, 32x32, 8 steps of 64, cohort 10": (x, "cnn", 10, 8, 64),
        "resnet20, 32x32, 2 steps of 32, cohort 4": (x, "resnet20", 4, 2, 32),
        "resnet20, 32x32, 5 steps of 10, cohort 10": (x, "resnet20", 10, 5, 10),
        "vgg11, 32x32, 1 step of 32, cohort 4": (x, "vgg11", 4, 1, 32),
    }
    rows = []
    for case, (images, model, cohort, steps, batch) in cases.items():
        fed = federation_of(images, y, 100, 500)
        loops = {
            engine: partial(UnskewLoop, fed, cohort, steps, batch, 0.01, 1, engine, model)
            for engine in ("inline", "processes", "vectorized")
        }
        several = clients_per_group(cohort)
        loops["clients_per_group"] = partial(
            UnskewLoop, fed, cohort, steps, batch, 0.01, 1, "processes", model, clients_per_group=several
        )
        seconds = {e: statistics.median(s) for e, s in measure(loops, repetitions, 1).items()}
        rows.append({"case": case, **{e: 1 / s for e, s in seconds.items()}})
        print(f"{case:<42} " + "  ".join(f"{e} {1 / s:8.2f}/s" for e, s in seconds.items()), flush=True)
    return rows


def machine() -> dict[str, Any]:
    """Describe the machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return {"cpu": cpu, "cores": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="CIFAR-10 parquet file; ../shared/data's if it is there, else random images")
    parser.add_argument("--only", choices=["speed", "clients", "engines"], help="one of the three tables")
    parser.add_argument("--repetitions", type=int, default=9, help="measurements of each loop")
    parser.add_argument("--rounds", type=int, default=3, help="rounds in each measurement")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    args = parser.parse_args()
    path = args.data or (str(CIFAR) if CIFAR.exists() else None)
    x, y = load_images(path)
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, images: {'CIFAR-10' if path else 'random'}", flush=True)
    figures: dict[str, Any] = {"machine": machine(), "images": "CIFAR-10" if path else "random"}
    if args.only in (None, "speed"):
        figures["speed"] = speed(x, y, args.repetitions, args.rounds)
    if args.only in (None, "clients"):
        figures["clients"] = clients(x, y, 20)
    if args.only in (None, "engines"):
        figures["engines"] = engines(x, y, min(5, args.repetitions))
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"largest process: {peak:.0f} MiB")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
