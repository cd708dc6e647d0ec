"""A run on two nodes of which the second is killed in its third round, against the same run in one process."""

import os
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.federations import SmallBatchNorm, blobs
from support.ray_nodes import TOKEN, cluster

import unskew
from unskew.records.recorder import Callback

os.environ |= TOKEN
torch.set_num_threads(1)


def train(engine, address=None, callbacks=()):
    torch.manual_seed(0)
    return unskew.run(
        blobs([9, 14, 11, 8, 12, 10]), model=SmallBatchNorm(), method="fedprox+scaffold", rounds=6, local_steps=3, lr=0.05,
        engine=engine, ray={"address": address, "deadline": 240}, callbacks=callbacks,
    )  # fmt: skip


def main():
    with tempfile.TemporaryDirectory(prefix="ray") as folder, cluster(folder) as (address, nodes):

        class Kill(Callback):
            """The second node, after the second round: its workers hold the trainer, and tasks are on their way."""

            def round(self, row):
                if row["round"] == 2:
                    nodes[1].kill()

        there = train("ray", address, [Kill()])
        alone = train("inline")
        again = [row["retries"] for row in there.history]
        equal = torch.equal(alone.vector, there.vector) and again[:2] == [0, 0]
        print(f"{'equal' if equal else 'not equal'} after a node died; trained again in each round: {again}")


if __name__ == "__main__":
    main()
