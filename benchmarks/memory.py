"""How much memory a run takes, data and workers included: ``python -m benchmarks.memory [--json FILE]``.

The peak of the proportional set size (PSS), where memory that processes share counts once, of a whole run in an interpreter
of its own: ten rounds of FedAvg with CNN-A, from the arrays of each client to the last model. The yardstick is the loop that
was tuned by hand; what a run may need beyond its data is what an interpreter with PyTorch and two workers need.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.baselines import MEAN, SETTINGS, STD, TunedLoop
from benchmarks.timing import resident

ROUNDS = 10
GIGABYTES = 10
EACH = 25_000  # images of a client of the large federation
CASES = [(loop, setting, kind) for setting in "AB" for kind in ("uint8", "float32") for loop in ("tuned", "unskew")]


def given(setting: str, kind: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """The arrays of each client; their bytes do not matter here."""
    draws, one = np.random.default_rng(0), SETTINGS[setting]
    shape = (one["per_client"], 32, 32, 3)
    made = draws.integers(0, 256, (one["clients"], *shape), dtype=np.uint8)
    labels = draws.integers(0, 10, made.shape[:2])
    return [(x.astype(kind), y) for x, y in zip(made, labels, strict=True)]


def mapped(folder: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Clients over sparse files of ``GIGABYTES`` in all: they take no room on the disk, but reading them takes memory."""
    count = GIGABYTES * 10**9 // (EACH * 32 * 32 * 3)
    whole = np.lib.format.open_memmap(folder / "x.npy", "w+", np.uint8, (count * EACH, 32, 32, 3))
    del whole
    x = np.load(folder / "x.npy", mmap_mode="r")
    y = np.random.default_rng(0).integers(0, 10, len(x))
    return [(x[k : k + EACH], y[k : k + EACH]) for k in range(0, len(x), EACH)]


def tuned(clients: list[tuple[np.ndarray, np.ndarray]], setting: str) -> None:
    """The hand-made loop; its data are one array, so there is nothing beside it."""
    one = SETTINGS[setting]
    shape = (len(clients), one["per_client"])
    x, y = np.empty((*shape, 32, 32, 3), clients[0][0].dtype), np.empty(shape, np.int64)
    for k in range(shape[0]):
        x[k], y[k] = clients[k]
        clients[k] = (x[k], y[k])
    loop = TunedLoop(x.reshape(-1, 32, 32, 3), y.reshape(-1), **one)
    for t in range(ROUNDS):
        loop.round(t)
    loop.close()


def ours(clients: list[tuple[np.ndarray, np.ndarray]], setting: str, **options: Any) -> None:
    """The same through the public interface, which also evaluates."""
    import unskew

    one = SETTINGS[setting]
    x, y = clients[0]
    fed = unskew.Federation.from_arrays(clients, test=(x[:500], y[:500]), classes=10, **options)
    unskew.run(
        federation=fed, model="cnn", method="fedavg", engine="processes", rounds=ROUNDS, seed=1, lr=one["lr"],
        local_steps=one["steps"], batch_size=one["batch"], participation=one["cohort"] / len(clients), eval_clients=10,
    )  # fmt: skip


def one_case(loop: str, setting: str, kind: str) -> dict[str, float]:
    """One line of the table, in this process."""
    from unskew.data.normalisation import Normalisation

    with tempfile.TemporaryDirectory() as folder:
        clients = mapped(Path(folder)) if kind == "mapped" else given(setting, kind)
        data = sum(array.nbytes for pair in clients for array in pair)
        peak, ended = [0.0], threading.Event()

        def watch() -> None:
            while not ended.wait(0.05):
                peak[0] = max(peak[0], resident())

        threading.Thread(target=watch, daemon=True).start()
        began = time.perf_counter()
        if loop == "tuned":
            tuned(clients, setting)
        else:
            ours(clients, setting, **({"normalise": Normalisation(MEAN, STD, 1 / 255)} if kind == "mapped" else {}))
        ended.set()
        return {"data_mb": data / 2**20, "peak_mb": peak[0], "seconds": time.perf_counter() - began}


def measured(loop: str, setting: str, kind: str) -> dict[str, Any]:
    """One line of the table, in an interpreter of its own."""
    command = [sys.executable, "-m", "benchmarks.memory", "--case", loop, setting, kind]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=1800)
    return {"loop": loop, "setting": setting, "kind": kind, **json.loads(answer.stdout.splitlines()[-1])}


def memory() -> list[dict[str, Any]]:
    """The table."""
    rows = []
    for case in [*CASES, ("unskew", "A", "mapped")]:
        row = measured(*case)
        rows.append(row)
        print(
            f"{row['setting']}  {row['loop']:<7} {row['kind']:<8} data {row['data_mb']:7.0f} MB, "
            f"peak PSS {row['peak_mb']:6.0f} MB ({row['peak_mb'] - row['data_mb']:+.0f} MB)", flush=True,
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
