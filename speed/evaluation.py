"""Cost of evaluating after every round: ``python -m speed.evaluation [--repetitions N]``.

Setting A of ``speed/settings.py`` with a test set of 10,000 images, engine ``processes``. Runs that evaluate after every
round and runs that evaluate only at the end are timed in turn; both include the start. If all cores are busy in both parts,
no schedule of the two parts is faster than their sum, however they overlap.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import unskew
from speed.settings import MEAN, SETTINGS, STD
from speed.speed import CIFAR, machine
from speed.timing import load_images
from unskew.data.federation import ArrayClients

TEST = 10_000


def federation() -> unskew.Federation:
    """Return the clients of setting A with 10,000 test images."""
    x, y = load_images(str(CIFAR) if CIFAR.exists() else None)
    images, labels = torch.from_numpy(x).permute(0, 3, 1, 2), torch.from_numpy(y)
    per_client = SETTINGS["A"]["per_client"] - TEST // SETTINGS["A"]["clients"]
    offsets = torch.arange(SETTINGS["A"]["clients"] + 1).numpy() * per_client
    return unskew.Federation(
        ArrayClients(images[:-TEST], labels[:-TEST], offsets, offsets[1:]),
        test=(images[-TEST:], labels[-TEST:]),
        classes=10,
        normalization=unskew.Normalization(MEAN, STD, 1 / 255),
    )


def seconds(fed: unskew.Federation, rounds: int, eval_every: int) -> float:
    """Return the seconds of a run."""
    budget = SETTINGS["A"]
    began = time.perf_counter()
    unskew.run(
        fed, model="cnn", method="fedavg", rounds=rounds, eval_every=eval_every, engine="processes",
        local_steps=budget["steps"], batch_size=budget["batch"], lr=budget["lr"],
        participation=budget["cohort"] / budget["clients"],
    )  # fmt: skip
    return time.perf_counter() - began


def main() -> None:
    """Measure and print the seconds per round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, help="measurements of each kind of run")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of a run")
    args = parser.parse_args()
    fed = federation()
    seconds(fed, 1, 1)
    every, last = [], []
    for _ in range(args.repetitions):
        start = seconds(fed, 1, 1)
        every.append((seconds(fed, args.rounds + 1, 1) - start) / args.rounds)
        last.append((seconds(fed, args.rounds + 1, args.rounds + 1) - start) / args.rounds)
    fast, slow = statistics.median(last), statistics.median(every)
    info = machine()
    print(
        f"{info['cores']} cores ({info['cpu']}), torch {info['torch']}: {fast:.3f} s per round without evaluation, "
        f"{slow:.3f} s with"
    )
    print(f"evaluation of {TEST} images after every round: {fast / slow:.2f} of the speed.")


if __name__ == "__main__":
    main()
