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

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.federations import SmallBatchNorm, blobs
from support.ray_nodes import TOKEN, cluster

import unskew
from unskew.records.recorder import Callback

os.environ |= TOKEN
torch.set_num_threads(1)
KILLS = int(os.environ.get("UNSKEW_TEST_KILLS", "20"))
LONGEST = 1.0
"""Seconds after the beginning of a round until which somebody is killed."""


def train(engine, address=None, callbacks=()):
    torch.manual_seed(0)
    return unskew.run(
        blobs([9, 14, 11, 8, 12, 10]), model=SmallBatchNorm(), method="fedprox+scaffold", rounds=KILLS + 1, local_steps=3,
        lr=0.05, engine=engine, ray={"address": address, "deadline": 300, "retries": 50}, callbacks=callbacks,
    )  # fmt: skip


class Kills(Callback):
    """One worker of some node, some time after the end of each round; the round that follows waits for nothing."""

    def __init__(self, nodes):
        self.nodes, self.dice, self.killed = nodes, random.Random(int(os.environ.get("UNSKEW_TEST_SEED", "0"))), 0

    def round(self, row):
        if row["round"] <= KILLS:
            delay, order = self.dice.uniform(0, LONGEST), self.dice.random()
            threading.Thread(target=self._kill, args=(delay, order), daemon=True).start()

    def end(self, summary):
        end = time.monotonic() + 2 * LONGEST
        while self.killed < KILLS and time.monotonic() < end:
            time.sleep(0.05)

    def _kill(self, delay, order):
        time.sleep(delay)
        workers = sorted(pid for node in self.nodes for pid in node.pids() if is_worker(pid))
        if workers:
            os.kill(workers[int(order * len(workers))], signal.SIGKILL)
            self.killed += 1


def is_worker(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::")
    except OSError:
        return False


def main():
    with tempfile.TemporaryDirectory(prefix="ray") as folder, cluster(folder) as (address, nodes):
        kills = Kills(nodes)
        there = train("ray", address, [kills])
        alone = train("inline")
        equal = torch.equal(alone.vector, there.vector) and kills.killed > KILLS // 2
        print(f"{'equal' if equal else 'not equal'} after {kills.killed} of {KILLS} kills")


if __name__ == "__main__":
    main()
