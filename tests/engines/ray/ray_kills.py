"""A run on two nodes whose workers are killed at random moments, one a round, against the same run in one process.

``UNSKEW_TEST_KILLS`` says how many (20), ``UNSKEW_TEST_SEED`` which moments and whom (0).
"""

import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.federations import SmallBatchNorm, blobs
from support.ray_nodes import TOKEN, cluster

import unskew
from unskew.records.recorder import Callback

os.environ |= TOKEN
torch.set_num_threads(1)
KILLS = int(os.environ.get("UNSKEW_TEST_KILLS", "20"))
LONGEST = 0.4
"""Seconds after the beginning of a round until which somebody is killed; a round takes longer."""


class Slow(unskew.ClientRule):
    """Takes its time on a cluster."""

    name, summary, paper = "slow", "-", "-"

    def begin(self, ctx):
        if Path("/proc/self/cmdline").read_bytes().startswith(b"ray::"):
            time.sleep(0.15)
        return {}


def train(engine, address=None, callbacks=()):
    torch.manual_seed(0)
    return unskew.run(
        blobs([9, 14, 11, 8, 12, 10]), model=SmallBatchNorm(), method=[Slow(), "fedprox+scaffold"], rounds=KILLS + 1,
        local_steps=3, lr=0.05, engine=engine, ray={"address": address, "deadline": 300, "retries": 50},
        callbacks=callbacks,
    )  # fmt: skip


class Kills(Callback):
    """One worker of some node in every round but the first, at a random moment."""

    def __init__(self, nodes):
        self.nodes, self.dice, self.killed = nodes, random.Random(int(os.environ.get("UNSKEW_TEST_SEED", "0"))), 0
        self.thread = None

    def round(self, row):
        if self.thread is not None:
            self.thread.join()
        if row["round"] <= KILLS:
            delay, order = self.dice.uniform(0, LONGEST), self.dice.random()
            self.thread = threading.Thread(target=self._kill, args=(delay, order), daemon=True)
            self.thread.start()

    def _kill(self, delay, order):
        time.sleep(delay)
        workers = sorted(pid for node in self.nodes for pid in node.pids() if is_worker(pid))
        if workers:  # else those that were killed have not been replaced yet
            os.kill(workers[int(order * len(workers))], signal.SIGKILL)
            self.killed += 1


def is_worker(pid):
    """A node's own helpers are no workers: it dies with them."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith((b"ray::train_group", b"ray::IDLE"))
    except OSError:
        return False


def main():
    with tempfile.TemporaryDirectory(prefix="ray") as folder, cluster(folder) as (address, nodes):
        kills = Kills(nodes)
        there = train("ray", address, [kills])
        alone = train("inline")
        equal = torch.equal(alone.vector, there.vector) and kills.killed > 0.7 * KILLS
        again = there.summary["retries"]
        # Of those that were killed, some had nothing to do.
        equal = equal and again > 0
        print(
            f"{'equal' if equal else 'not equal'} after {kills.killed} of {KILLS} kills, {again} clients trained again"
        )


if __name__ == "__main__":
    main()
