"""Measure the cost of engine ``ray`` relative to ``processes``: time per round and client, and the server's cost.

``python -m speed.cluster [--part overhead settings] [--quick] [--minutes 12] [--again] [--pages]``

Each result is stored in ``results/cluster-cpu.json`` as soon as it is measured, and stored results are not measured
again, so the command can be stopped and restarted; ``--minutes`` limits its time. ``--pages`` measures nothing and
writes the tables of ``docs/results/speed.md`` and ``docs/results/scaling.md`` from the stored results.

Clients train one step on one sample with a model that computes almost nothing, so ``overhead`` measures the cost of the
engine. Each case runs in its own process, after a short run in which workers start. ``settings`` are A and B of
``speed.speed``, with images.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import unskew
from speed.scaling import RESULTS, page_of, write_pages
from speed.settings import SETTINGS
from speed.speed import CIFAR, federation_of, machine
from speed.timing import load_images
from unskew.engines.cpu import num_cores
from unskew.runs.parallel import run_jobs
from unskew.runs.process_pool import Job

PARAMETERS, COHORTS, ENGINES = (62_000, 11_000_000, 110_000_000), (10, 100, 1000), ("processes", "ray")
LARGEST, QUICK = 50e9, 5e9
"""Bytes of updates in a round above which nothing is measured, in general and with ``--quick``."""
RATE = 0.9
"""Speed relative to ``processes`` for which the table states the required training time."""


def rounds_of(size: float) -> int:
    """Return the number of rounds to measure, by the bytes of a round's updates."""
    return 5 if size < 1e9 else 2 if size < QUICK else 1


class Wide(nn.Module):
    """Model with a given number of parameters that computes almost nothing."""

    def __init__(self, parameters: int):
        super().__init__()
        self.many = nn.Parameter(torch.zeros(parameters - 6))
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of inputs ``[n, 2]``."""
        return self.head(x) + self.many[0]


class Clock:
    """Callback that records when each round ended, in wall time and in CPU time of this process."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.own: list[float] = []

    def start(self, config: dict[str, Any], rounds_done: int) -> None:
        """Record the start of the first round."""
        self.round({})

    def round(self, row: dict[str, Any]) -> None:
        """Record the end of a round."""
        self.wall.append(time.perf_counter())
        self.own.append(time.process_time())

    def end(self, summary: dict[str, Any]) -> None:
        """Nothing more."""


def run(federation: Any, rounds: int, engine: str, workers: int, **options: Any) -> Clock:
    """Run without evaluation and return the clock."""
    clock = Clock()
    unskew.run(
        federation, rounds=rounds, eval_clients=0, eval_every=rounds, engine=engine, workers=workers, clients_per_group=1,
        callbacks=[clock], **options,
    )  # fmt: skip
    return clock


def overhead(
    given: None, engine: str, parameters: int, cohort: int, workers: int, address: str, callbacks: Any
) -> dict[str, Any]:
    """Measure an engine, model and cohort: seconds per round, in total and in this process, and its peak MB."""
    x, y = np.random.default_rng(0).normal(size=(2, 2)).astype("float32"), np.array([0, 1])
    options = {"local_steps": 1, "batch_size": 1, "lr": 0.1, "ray": {"address": address}}

    def of(clients: int) -> unskew.Federation:
        return unskew.Federation.from_arrays([(x, y)] * clients, test=(x, y), holdout=0.0, classes=2)

    run(of(2 * workers), 2, engine, workers, model=Wide(1000), **options)  # workers start
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rounds = rounds_of(4.0 * parameters * cohort)
    # The first of several rounds also sends the model to the workers.
    clock = run(of(cohort), rounds + (rounds > 1), engine, workers, model=Wide(parameters), **options)
    wall, own = (np.diff(times)[-rounds:].tolist() for times in (clock.wall, clock.own))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "seconds": statistics.median(wall),
        "own_seconds": statistics.median(own),
        "megabytes": peak / 1024,
        "added_megabytes": (peak - before) / 1024,
        "rounds": rounds,
    }


def setting(
    given: None, engine: str, name: str, attempt: int, workers: int, address: str, callbacks: Any
) -> dict[str, Any]:
    """Measure the seconds per round of FedAvg with CNN-A in a setting of ``speed.speed``."""
    of = dict(SETTINGS[name])
    x, y = load_images(str(CIFAR) if CIFAR.exists() else None)
    federation = federation_of(x, y, of["clients"], of["per_client"])
    options = {"model": "cnn", "participation": of["cohort"] / of["clients"], "seed": of["seed"], "lr": of["lr"]}
    options |= {"local_steps": of["steps"], "batch_size": of["batch"], "ray": {"address": address}}
    clock = run(federation, 12, engine, workers, **options)
    return {"seconds": statistics.median(np.diff(clock.wall)[2:].tolist()), "rounds": 10}


def cases(args: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Any, tuple[Any, ...]]]:
    """Yield the cases: key, function and arguments; small ones first, engines in turn."""
    if "overhead" in args.part:
        every = sorted((4.0 * d * c, d, c) for d in args.parameters for c in args.cohorts)
        for size, d, c in every:
            for engine in ENGINES if size <= (QUICK if args.quick else LARGEST) else ():
                key = {"part": "overhead", "engine": engine, "parameters": d, "cohort": c, "workers": args.workers}
                yield key, overhead, (engine, d, c, args.workers, args.address)
    if "settings" in args.part:
        for attempt in range(1 if args.quick else 3):
            for name in SETTINGS:
                for engine in ENGINES:
                    key = {"part": "settings", "engine": engine, "setting": name, "attempt": attempt}
                    yield key | {"workers": args.workers}, setting, (engine, name, attempt, args.workers, args.address)


def measure(args: argparse.Namespace) -> None:
    """Measure the cases without a result, and store each result."""
    stored = json.loads(args.json.read_text()) if args.json.exists() and not args.again else {"rows": []}
    end = time.monotonic() + 60 * args.minutes
    for key, function, arguments in cases(args):
        if any(key.items() <= row.items() for row in stored["rows"]):
            continue
        if time.monotonic() > end:
            print(f"{args.minutes:g} minutes are over; the same command continues.")
            return
        ((_, measured),) = run_jobs([Job("case", function, arguments)], 1)
        stored["rows"].append(key | measured)
        stored |= {"machine": machine(), "constants": constants(stored["rows"])}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(stored, indent=2) + "\n")
        named = ", ".join(str(value) for value in key.values())
        print(f"{named}: {measured['seconds']:.3f} s a round", flush=True)


def constants(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Fit a task's cost in the server's process, and the bytes per second that it receives, to the cases of ``ray``."""
    ray = [row for row in rows if row["part"] == "overhead" and row["engine"] == "ray"]
    if len({row["parameters"] for row in ray}) < 2:
        return {}
    x = np.array([4.0 * row["parameters"] for row in ray])
    y = np.array([row["own_seconds"] / row["cohort"] for row in ray])
    # Relative errors, because otherwise the largest model alone would determine the cost of a task.
    slope, task = np.polyfit(x, y, 1, w=1 / y)
    return {"task": max(float(task), 1e-6), "store": 1 / max(float(slope), 1e-12)}


def overhead_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of the overhead of ``ray``, the break-even training time, and the server's cost."""
    by = {(row["engine"], row["parameters"], row["cohort"]): row for row in rows if row["part"] == "overhead"}
    lines = [
        "| parameters | cohort | `processes`, s a round | `ray`, s a round | overhead, ms a client | as fast to "
        f"{RATE:.0%} from a training of | server, s a round | server, ms a client | server, peak MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for _, d, c in sorted(key for key in by if key[0] == "ray" and ("processes", *key[1:]) in by):
        forked, ray = by["processes", d, c], by["ray", d, c]
        over = (ray["seconds"] - forked["seconds"]) / c
        # With w workers, a client's training time t takes t / w of the round.
        crossing = max(0.0, over * ray["workers"] * RATE / (1 - RATE))
        lines.append(
            f"| {d:,} | {c:,} | {forked['seconds']:.3f} | {ray['seconds']:.3f} | {1000 * over:.2f} | {crossing:.2f} s | "
            f"{ray['own_seconds']:.3f} | {1000 * ray['own_seconds'] / c:.2f} | {ray['megabytes']:.0f} |"
        )
    return lines


def settings_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of rounds per second of both engines with images."""
    lines = [
        "| setting | `processes`, rounds a second | `ray`, rounds a second | of `processes` |",
        "|---|---|---|---|",
    ]
    for name in SETTINGS:
        measured = {
            engine: [
                row["seconds"]
                for row in rows
                if row["part"] == "settings" and row["setting"] == name and row["engine"] == engine
            ]
            for engine in ENGINES
        }
        if all(measured.values()):
            forked, ray = (statistics.median(measured[engine]) for engine in ENGINES)
            lines.append(f"| {name} | {1 / forked:.2f} | {1 / ray:.2f} | {forked / ray:.2f} |")
    return lines


def costs(stored: dict[str, Any] | None) -> list[str]:
    """Return the section of ``docs/results/speed.md`` on these measurements."""
    if not stored:
        return ["They have not been measured on an idle machine yet."]
    of = stored["machine"]
    return [
        f"Measured on {of['cores']} cores ({of['cpu']}), Python {of['python']}, torch {of['torch']}, both engines with as "
        f"many workers; a client's training is one step that computes next to nothing. A round whose updates have more than "
        f"{LARGEST / 1e9:.0f} GB is not measured.",
        "",
        *overhead_table(stored["rows"]),
        "",
        "FedAvg with CNN-A and CIFAR-10 images, in the [settings A and B](#engines):",
        "",
        *settings_table(stored["rows"]),
    ]


def main() -> None:
    """Measure and store results, or write the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", choices=["overhead", "settings"], default=["settings", "overhead"])
    parser.add_argument("--parameters", type=int, nargs="+", default=PARAMETERS)
    parser.add_argument("--cohorts", type=int, nargs="+", default=COHORTS)
    parser.add_argument("--workers", type=int, default=num_cores())
    parser.add_argument("--address", default="local", help="of a cluster; a new one of this machine without")
    parser.add_argument("--minutes", type=float, default=12.0, help="minutes after which no other case is started")
    parser.add_argument("--quick", action="store_true", help="only what takes less than a minute")
    parser.add_argument("--again", action="store_true", help="forget what is there")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--pages", action="store_true", help="only write the tables of the documentation")
    args = parser.parse_args()
    if not args.pages:
        measure(args)
    stored = json.loads(args.json.read_text()) if args.json.exists() else None
    if args.pages:
        write_pages(stored, {page_of("speed"): {"costs": costs(stored)}})
    elif stored:
        print("\n".join([*overhead_table(stored["rows"]), "", *settings_table(stored["rows"])]))


if __name__ == "__main__":
    from speed import cluster  # under its module name, by which workers import the model

    cluster.main()
