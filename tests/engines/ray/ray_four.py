"""A run on four nodes whose server is killed, resumed on the two that are left, against the same run in one process."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.ray_nodes import TOKEN, cluster

import unskew

os.environ |= TOKEN
torch.set_num_threads(1)
OPTIONS = {"model": "logistic", "method": "fedprox+scaffold", "clients": 8, "rounds": 40, "local_steps": 2}


def begin(folder, address):
    """A server in a process of its own."""
    options = {**OPTIONS, "checkpoint_every": 1, "engine": "ray", "ray": {"address": address}}
    return subprocess.Popen([sys.executable, "-c", f"import unskew; unskew.run(**{options!r}, out={str(folder)!r})"])


def rounds_in(folder):
    lines = folder / "metrics.jsonl"
    return lines.read_bytes().count(b"\n") if lines.is_file() else 0


def main():
    alone = unskew.run(**OPTIONS, engine="inline")
    with tempfile.TemporaryDirectory(prefix="ray") as place, cluster(place, nodes=4) as (address, nodes):
        folder = Path(place) / "run"
        server, end = begin(folder, address), time.monotonic() + 240
        while rounds_in(folder) < 3 and server.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        server.kill()
        server.wait()
        before = rounds_in(folder)
        for node in nodes[2:]:
            node.kill()
        there = unskew.resume(folder, engine="ray", ray={"address": address, "deadline": 240})
        equal = torch.equal(alone.vector, there.vector) and 3 <= before < OPTIONS["rounds"]
        print(f"{'equal' if equal else 'not equal'} after {before} rounds on four nodes and the others on two")


if __name__ == "__main__":
    main()
