"""Measure the memory of a run, including data and workers: ``python -m speed.memory [--json FILE]``.

The measure is the peak proportional set size (PSS), which counts shared memory once, of a whole run in its own
interpreter: ten rounds of FedAvg with CNN-A, from the arrays of each client to the last model. The baseline is the
hand-tuned loop. Beyond its data, a run should need only the memory of an interpreter with PyTorch and two workers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from speed.baselines import TunedLoop
from speed.settings import MEAN, SETTINGS, STD
from speed.timing import resident

ROUNDS = 10
GIGABYTES = 10
EACH = 25_000  # images per client of the large federation
CASES = [(loop, setting, kind) for setting in "AB" for kind in ("uint8", "float32") for loop in ("tuned", "unskew")]


def given(setting: str, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the images of all clients in order, and their labels; their values do not matter here."""
    draws, values = np.random.default_rng(0), SETTINGS[setting]
    count = values["clients"] * values["per_client"]
    x = np.empty((count, 32, 32, 3), kind)
    for begin in range(0, count, 1000):
        x[begin : begin + 1000] = draws.integers(0, 256, x[begin : begin + 1000].shape, dtype=np.uint8)
    return x, draws.integers(0, 10, count)


def apart(x: np.ndarray, y: np.ndarray, per_client: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return separate arrays for each client."""
    rows = [slice(begin, begin + per_client) for begin in range(0, len(x), per_client)]
    return [(x[own].copy(), y[own].copy()) for own in rows]


def mapped(folder: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Create clients over sparse files of ``GIGABYTES`` in total, which use no disk space but need memory when read."""
    count = GIGABYTES * 10**9 // (EACH * 32 * 32 * 3)
    images = np.lib.format.open_memmap(folder / "x.npy", "w+", np.uint8, (count * EACH, 32, 32, 3))
    del images
    x = np.load(folder / "x.npy", mmap_mode="r")
    y = np.random.default_rng(0).integers(0, 10, len(x))
    return [(x[k : k + EACH], y[k : k + EACH]) for k in range(0, len(x), EACH)]


def tuned(x: np.ndarray, y: np.ndarray, setting: str) -> None:
    """Run the hand-tuned loop."""
    loop = TunedLoop(x, y, **SETTINGS[setting])
    for t in range(ROUNDS):
        loop.round(t)
    loop.close()


def ours(clients: list[tuple[np.ndarray, np.ndarray]], setting: str, **options: Any) -> None:
    """Run the same through the public interface, which also evaluates."""
    import unskew

    values = SETTINGS[setting]
    x, y = clients[0]
    fed = unskew.Federation.from_arrays(clients, test=(x[:500], y[:500]), classes=10, **options)
    unskew.run(
        federation=fed, model="cnn", method="fedavg", engine="processes", rounds=ROUNDS, seed=1, lr=values["lr"],
        local_steps=values["steps"], batch_size=values["batch"], participation=values["cohort"] / len(clients),
        eval_clients=10,
    )  # fmt: skip


def one_case(loop: str, setting: str, kind: str) -> dict[str, float]:
    """Measure one row of the table in this process."""
    from unskew.data.normalization import Normalization

    options = {"normalize": Normalization(MEAN, STD, 1 / 255)} if kind == "mapped" else {}
    with tempfile.TemporaryDirectory() as folder:
        if loop == "tuned":
            x, y = given(setting, kind)
            data, work = x.nbytes + y.nbytes, partial(tuned, x, y, setting)
        else:
            per_client = SETTINGS[setting]["per_client"]
            clients = mapped(Path(folder)) if kind == "mapped" else apart(*given(setting, kind), per_client)
            data = sum(array.nbytes for pair in clients for array in pair)
            work = partial(ours, clients, setting, **options)
        peak, ended = [0.0], threading.Event()

        def watch() -> None:
            while not ended.wait(0.05):
                peak[0] = max(peak[0], resident())

        threading.Thread(target=watch, daemon=True).start()
        began = time.perf_counter()
        work()
        ended.set()
        return {"data_mb": data / 2**20, "peak_mb": peak[0], "seconds": time.perf_counter() - began}


def measured(loop: str, setting: str, kind: str) -> dict[str, Any]:
    """Measure one row of the table in its own interpreter."""
    command = [sys.executable, "-m", "speed.memory", "--case", loop, setting, kind]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=1800)
    return {"loop": loop, "setting": setting, "kind": kind, **json.loads(answer.stdout.splitlines()[-1])}


def memory() -> list[dict[str, Any]]:
    """The table."""
    rows = []
    for case in [*CASES, ("unskew", "A", "mapped")]:
        row = measured(*case)
        rows.append(row)
        print(
            f"{row['setting']}  {row['loop']:<7} {row['kind']:<8} data {row['data_mb']:7.0f} MiB, "
            f"peak PSS {row['peak_mb']:6.0f} MiB ({row['peak_mb'] - row['data_mb']:+.0f} MiB)", flush=True,
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--case", nargs=3, metavar=("LOOP", "SETTING", "KIND"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(one_case(*args.case)))
        return
    rows = memory()
    if args.json:
        args.json.write_text(json.dumps({"memory": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
