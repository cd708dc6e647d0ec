"""Measure the cost of FedCOG's generation relative to training: ``python -m speed.generation [--json FILE]``.

The setting is that of the paper's Table 11: CNN-A, 32 x 32 color images, 400 local steps of batch 64, 100 steps of
generation for N = 16 ... 1024 inputs. Reported are seconds of one client, on the engine ``inline`` with one thread (as
in a worker of ``processes``), and of four clients at once on ``vectorized``, next to the paper's. Machines differ, so
compare ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from speed.speed import CIFAR, UnskewLoop, federation_of, machine
from speed.timing import load_images

PAPER = {16: 0.72, 32: 0.78, 64: 0.79, 128: 0.80, 256: 0.81, 512: 0.83, 1024: 1.27}
PAPER_TRAINING = 14.81
STEPS = 400
TOGETHER = 256  # with more inputs, four clients at once take minutes on a CPU


class Timed(UnskewLoop):
    """Loop that reports the time that clients spent in its last round."""

    def seconds(self, t: int) -> tuple[float, float]:
        updates = list(
            self.engine.train([self.server.broadcaster.broadcast(t, k) for k in self.sampler.draw(t, frozenset())])
        )
        for update in updates:
            self.server.clients.store.put(update.client, update.state.tensors())
        begin, train = (
            statistics.fmean(u.metrics[name] for u in updates) for name in ("setup_seconds", "train_seconds")
        )
        return begin, train


def cost(fed: Any, n: int, engine: str, cohort: int, steps: int) -> tuple[float, float]:
    """Measure seconds of generation and training per client in round 2 (round 1 has no previous model)."""
    loop = Timed(fed, cohort, steps, 64, 0.01, 1, engine, spelling=f"fedcog:start_round=1,n={n}")
    try:
        loop.seconds(0)
        return loop.seconds(1)
    finally:
        loop.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="CIFAR-10 parquet file; ../shared/data's if it is there, else random images")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = args.data or (str(CIFAR) if CIFAR.exists() else None)
    x, y = load_images(path)
    fed = federation_of(x, y, 4, 2500)
    training = cost(fed, 16, "inline", 1, STEPS)[1]
    rows = []
    for n, paper in PAPER.items():
        alone = cost(fed, n, "inline", 1, 1)[0]
        clients_per_group = cost(fed, n, "vectorized", 4, 1)[0] if n <= TOGETHER else None
        rows.append({"n": n, "inline": alone, "vectorized": clients_per_group, "paper": paper})
        print(
            f"N = {n:4}: inline {alone:6.2f} s, {alone / training:5.2f} of training; "
            f"vectorized {clients_per_group or float('nan'):6.2f} s a client; paper {paper / PAPER_TRAINING:.3f} of training",
            flush=True,
        )
    print(f"local training, {STEPS} steps of 64: {training:.2f} s; paper {PAPER_TRAINING} s")
    if args.json:
        times = {"training": training, "paper_training": PAPER_TRAINING, "steps": STEPS, "rows": rows}
        args.json.write_text(json.dumps({"machine": machine(), **times}, indent=2) + "\n")


if __name__ == "__main__":
    main()
