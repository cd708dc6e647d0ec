"""What the engine ``ray`` costs beside ``processes``: time per round and client, and the server's memory and time.

``python -m benchmarks.cluster [--parameters 62000 ...] [--cohorts 10 ...] [--workers 2] [--address HOST:PORT] [--json FILE]``

A client's training is one step on one sample of a model that computes next to nothing, so what is measured is what an engine
adds. Each case runs in a process of its own; the first rounds, in which workers start, are not counted. ``--json`` also keeps
the constants that ``benchmarks.scaling`` reckons with.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import unskew
from unskew.engines.machine import cores
from unskew.runs.crew import Work
from unskew.runs.side_by_side import side_by_side

PARAMETERS, COHORTS = (62_000, 11_000_000, 110_000_000), (10, 100, 1000)
WARM_UP = 2
RATE = 0.9
"""Of ``processes``: from which training time on ``ray`` is as fast as this is told."""


class Wide(nn.Module):
    """A model of so many parameters that computes next to nothing."""

    def __init__(self, parameters: int):
        super().__init__()
        self.many = nn.Parameter(torch.zeros(parameters - 6))
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of inputs ``[n, 2]``."""
        return self.head(x) + self.many[0]


class Clock:
    """Follows a run: when each round ended, on the wall and in this process."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.own: list[float] = []

    def start(self, config: dict[str, Any], rounds_done: int) -> None:
        """The first round begins."""
        self.round({})

    def round(self, row: dict[str, Any]) -> None:
        """A round has ended."""
        self.wall.append(time.perf_counter())
        self.own.append(time.process_time())

    def end(self, summary: dict[str, Any]) -> None:
        """Nothing more."""


def case(
    given: None, engine: str, parameters: int, cohort: int, workers: int, rounds: int, address: str, callbacks: Any
) -> dict[str, Any]:
    """One engine, model and cohort: seconds of a round, of them in this process, and this process's peak in MB."""
    x, y = np.random.default_rng(0).normal(size=(2, 2)).astype("float32"), np.array([0, 1])
    federation = unskew.Federation.from_arrays([(x, y)] * cohort, test=(x, y), holdout=0.0, classes=2)
    clock, before = Clock(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unskew.run(
        federation, model=Wide(parameters), rounds=rounds + WARM_UP, local_steps=1, batch_size=1, lr=0.1, eval_clients=0,
        eval_every=rounds + WARM_UP, engine=engine, workers=workers, together=1, ray={"address": address}, callbacks=[clock],
    )  # fmt: skip
    wall, own = (np.diff(times)[WARM_UP:].tolist() for times in (clock.wall, clock.own))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "engine": engine,
        "parameters": parameters,
        "cohort": cohort,
        "seconds": statistics.median(wall),
        "own_seconds": statistics.median(own),
        "megabytes": peak / 1024,
        "added_megabytes": (peak - before) / 1024,
    }


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases, one after another."""
    rows = []
    for parameters in args.parameters:
        for cohort in args.cohorts:
            for engine in ("processes", "ray"):
                case_of = (engine, parameters, cohort, args.workers, args.rounds, args.address)
                (found,) = (row for _, row in side_by_side([Work("case", case, case_of)], 1))
                rows.append(found)
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows in markdown: overhead, crossing point, and what the server's process takes."""
    lines = [
        "| parameters | cohort | `processes`, s a round | `ray`, s a round | overhead, ms a client | as fast to "
        f"{RATE:.0%} from a training of | server, s a round | server, peak MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for forked, ray in zip(rows[::2], rows[1::2], strict=True):
        over = (ray["seconds"] - forked["seconds"]) / ray["cohort"]
        # With w workers a client's training t takes t / w of the round.
        crossing = max(0.0, over * ray["workers"] * RATE / (1 - RATE))
        lines.append(
            f"| {ray['parameters']:,} | {ray['cohort']} | {forked['seconds']:.3f} | {ray['seconds']:.3f} | "
            f"{1000 * over:.2f} | {crossing:.2f} s | {ray['own_seconds']:.3f} | {ray['megabytes']:.0f} |"
        )
    return lines


def constants(rows: list[dict[str, Any]]) -> dict[str, float]:
    """A task's cost in the server's process, and the bytes a second that it takes in: a line through the cases of ``ray``."""
    ray = [row for row in rows if row["engine"] == "ray"]
    if len({row["parameters"] for row in ray}) < 2:
        return {}
    x = np.array([4.0 * row["parameters"] for row in ray])
    y = np.array([row["own_seconds"] / row["cohort"] for row in ray])
    slope, task = np.polyfit(x, y, 1)
    return {"task": max(float(task), 1e-6), "store": 1 / max(float(slope), 1e-12)}


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, nargs="+", default=PARAMETERS)
    parser.add_argument("--cohorts", type=int, nargs="+", default=COHORTS)
    parser.add_argument("--workers", type=int, default=cores())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--address", default="local")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [{**row, "workers": args.workers} for row in measured(args)]
    print("\n".join(table(rows)))
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "constants": constants(rows)}, indent=2) + "\n")


if __name__ == "__main__":
    from benchmarks import cluster  # under its own name, by which workers find the model

    cluster.main()
