"""Measurement of loops: in turn, each in its own process, on CIFAR-10 or on noise of the same shape."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np


def resident() -> float:
    """Return the memory of this process and its workers in MiB, with shared pages counted once (PSS)."""
    total = 0
    for pid in (os.getpid(), *(process.pid for process in mp.active_children())):
        with contextlib.suppress(OSError):  # the process has ended
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total / 1024


def _serve(make_loop: Callable[[], Any], pipe: Connection) -> None:
    """Create one loop, run the requested numbers of rounds and reply with the seconds per round."""
    loop = make_loop()
    t = 0
    while (rounds := pipe.recv()) is not None:
        if not rounds:
            pipe.send(resident())
            continue
        start = time.perf_counter()
        for _ in range(rounds):
            loop.round(t)
            t += 1
        pipe.send((time.perf_counter() - start) / rounds)
    loop.close()


def measure(
    loops: dict[str, Callable[[], Any]],
    repetitions: int,
    rounds: int,
    warm_up: int = 1,
    memory: dict[str, float] | None = None,
) -> dict[str, list[float]]:
    """Measure the seconds per round of each loop, in turn; each loop has its own process.

    Args:
        loops: Functions that create the loops inside their processes, by name.
        repetitions: Number of measurements of each loop.
        rounds: FedAvg rounds per measurement.
        warm_up: Unmeasured rounds before.
        memory: Filled with the MiB of each loop at the end, without memory that it shares with others.

    Returns:
        One number per repetition, by name.
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
    for name, (pipe, process) in zip(loops, handles, strict=True):
        if memory is not None:
            pipe.send(0)
            memory[name] = pipe.recv()
        pipe.send(None)
        process.join()
    return seconds


def load_images(path: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Load CIFAR-10 from a parquet file with JPEG bytes, or create noise of the same shape."""
    if path is None:
        rng = np.random.default_rng(0)
        return rng.integers(0, 256, (50_000, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, 50_000)
    import pyarrow.parquet
    import simplejpeg

    table = pyarrow.parquet.read_table(path)
    images = [simplejpeg.decode_jpeg(row["bytes"], colorspace="RGB") for row in table["img"].to_pylist()]
    return np.stack(images), table["label"].to_numpy().astype(np.int64)
