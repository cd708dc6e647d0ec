"""How the benchmarks measure: loops in turn, each in a process of its own, on CIFAR-10 or on noise of its shape."""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np


def _serve(make_loop: Callable[[], Any], pipe: Connection) -> None:
    """Hold one loop; run as many rounds as asked for and answer the seconds per round."""
    loop = make_loop()
    t = 0
    while (rounds := pipe.recv()) is not None:
        start = time.perf_counter()
        for _ in range(rounds):
            loop.round(t)
            t += 1
        pipe.send((time.perf_counter() - start) / rounds)
    loop.close()


def measure(
    loops: dict[str, Callable[[], Any]], repetitions: int, rounds: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Seconds per round of each loop, measured in turn; each loop lives in a process of its own.

    Args:
        loops: By name, what makes the loop (inside its process).
        repetitions: How many times the turn goes round.
        rounds: FedAvg rounds of each loop per turn.
        warm_up: Unmeasured rounds before.

    Returns:
        By name, one number for each repetition.
    """
    fork = mp.get_context("fork")
    handles = []
    for make_loop in loops.values():
        here, there = fork.Pipe()
        process = fork.Process(target=_serve, args=(make_loop, there))
        process.start()
        there.close()
        handles.append((here, process))
        here.send(warm_up)
        here.recv()
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(repetitions):
        for name, (pipe, _process) in zip(loops, handles, strict=True):
            pipe.send(rounds)
            seconds[name].append(pipe.recv())
    for pipe, process in handles:
        pipe.send(None)
        process.join()
    return seconds


def load_images(path: str | None) -> tuple[np.ndarray, np.ndarray]:
    """CIFAR-10 from a parquet file with JPEG bytes, or noise of the same shape."""
    if path is None:
        rng = np.random.default_rng(0)
        return rng.integers(0, 256, (50_000, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, 50_000)
    import pyarrow.parquet
    import simplejpeg

    table = pyarrow.parquet.read_table(path)
    images = [simplejpeg.decode_jpeg(row["bytes"], colorspace="RGB") for row in table["img"].to_pylist()]
    return np.stack(images), table["label"].to_numpy().astype(np.int64)
