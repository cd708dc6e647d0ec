"""The same rounds of FedAvg in unskew and in other libraries: ``python -m speed.peers [LIBRARY ...]``.

There are four workloads (``--setting``): CNN-A on CIFAR-10 in two settings, ResNet-20 with group norm on CIFAR-10, and an MLP
on a table with 1,000 clients; images are noise of CIFAR-10's shape if no data are found. Each library gets the same decoded
data, the same initial model and the same cohorts, and is configured as its documentation recommends for such a machine. The
libraries are measured in turn, so that a busy machine slows all of them. Each has its own environment in
``speed/.venv``, which is created when it is first needed and uses the PyTorch of this interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from conformance.environments import constant, environment
from speed.baselines import draw_cohort
from speed.peers.workloads import WORKLOADS, Workload, normalize, table_rows
from speed.speed import CIFAR, machine
from speed.timing import load_images

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / "speed" / ".venv"
LIBRARIES = {
    "ours": "unskew",
    "pfl_research": "pfl-research",
    "fedlab": "FedLab",
    "flower": "Flower",
    "fedjax": "FedJAX",
}
TIME_LIMIT = 300
"""Seconds in which a library must start or end."""


class Peer:
    """A library that runs in its own processes.

    Args:
        name: Module of the library in this package.
        folder: New folder for its files and pipes.
        python: Interpreter of its environment.
        shared: Folder of the common input.
    """

    def __init__(self, name: str, folder: Path, python: Path, shared: Path):
        folder.mkdir()
        for file in shared.iterdir():
            (folder / file.name).symlink_to(file)
        for pipe in ("turns", "replies"):
            os.mkfifo(folder / pipe)
        self.folder, self.log = folder, folder / "log"
        module, processes = f"speed.peers.{name}", number(HERE / f"{name}.py", "TORCHRUN")
        start = ["-m", module]
        if processes:
            start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m", module]
        self.began, self.peak = time.perf_counter(), 0.0
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(python), *start, str(folder)], cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_DEDUP_LOGS": "0"},
            )  # fmt: skip
        self.turns: TextIO = _opened(folder / "turns", "w", self.process)
        self.turns.write("go\n")
        self.turns.flush()
        self.replies: TextIO = _opened(folder / "replies", "r", self.process)
        self._wait()
        self.startup = time.perf_counter() - self.began

    def _wait(self) -> None:
        if not self.replies.readline():
            raise RuntimeError("the library ended before its last round")

    def rounds(self, count: int) -> float:
        """Return the seconds per round of the next ``count`` rounds."""
        began = time.perf_counter()
        for _ in range(count):
            self.turns.write("go\n")
            self.turns.flush()
            self._wait()
        self.peak = max(self.peak, resident(self.process.pid))
        return (time.perf_counter() - began) / count

    def finish(self) -> np.ndarray:
        """End the library; returns its last model."""
        with contextlib.suppress(BrokenPipeError):  # it counts rounds and has ended
            self.turns.write("end\n")
            self.turns.close()
        self.process.wait(TIME_LIMIT)
        return np.load(self.folder / "model.npy")

    def stop(self) -> None:
        """Kill the processes if they still run."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)


def number(module: Path, name: str) -> int:
    """Return the integer constant ``name`` of a module that is not imported, or 0."""
    line = next((line for line in module.read_text().splitlines() if line.startswith(f"{name} = ")), "0 = 0")
    return int(line.partition("=")[2])


def _opened(pipe: Path, mode: str, process: subprocess.Popen[bytes]) -> TextIO:
    """Open a pipe when the other side has opened it; raises RuntimeError if the process ends or is too slow."""
    pipes: list[TextIO] = []
    opening = threading.Thread(target=lambda: pipes.append(pipe.open(mode)), daemon=True)
    opening.start()
    for _ in range(TIME_LIMIT * 10):
        opening.join(0.1)
        if pipes:
            return pipes[0]
        if process.poll() is not None:
            break
    reason = "did not start in time" if process.poll() is None else "ended before its first round"
    raise RuntimeError(f"the library {reason}")


def resident(root: int) -> float:
    """Return the PSS in MiB of a process and its descendants."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
    family, total = {root}, 0
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    for pid in family:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def accuracy(model: torch.nn.Module, vector: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    """Return the accuracy of a model with parameters ``vector [d]`` on raw samples ``x`` with classes ``y``."""
    torch.nn.utils.vector_to_parameters(torch.from_numpy(vector.astype(np.float32)), model.parameters())
    inputs = torch.from_numpy(normalize(x))
    with torch.no_grad():
        predicted = torch.cat([model(chunk).argmax(1) for chunk in inputs.split(500)])
    return float((predicted == torch.from_numpy(y)).float().mean())


def load_samples(workload: Workload, data: str | None) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Return training and test samples with their classes.

    Args:
        workload: The workload.
        data: CIFAR-10 training file, or None for random images.
    """
    count = workload.budget["clients"] * workload.budget["per_client"]
    if not workload.images:
        return table_rows(count), table_rows(10_000, seed=1)
    x, y = load_images(data)
    test_file = Path(data).with_name("test.parquet") if data else None
    if test_file is not None and test_file.exists():
        return (x[:count], y[:count]), load_images(str(test_file))
    return (x[:count], y[:count]), (x[:count][-5000:], y[:count][-5000:])


def write_input(folder: Path, name: str, x: np.ndarray, y: np.ndarray, rounds: int) -> None:
    """Write the common input of all libraries into ``folder``."""
    workload = WORKLOADS[name]
    budget = workload.budget
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    torch.manual_seed(budget["seed"])
    start = torch.nn.utils.parameters_to_vector(workload.model().parameters())
    np.save(folder / "start.npy", start.detach().numpy())
    cohorts = [draw_cohort(budget["clients"], budget["cohort"], budget["seed"], t) for t in range(rounds)]
    settings = {key: budget[key] for key in ("clients", "per_client", "steps", "batch", "lr")}
    (folder / "work.json").write_text(json.dumps({"workload": name, **settings, "cohorts": cohorts}))


def measure(names: list[str], shared: Path, where: Path, repetitions: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Return the measurements of each library, or the reason why there are none."""
    peers: dict[str, Peer] = {}
    results: dict[str, dict[str, Any]] = {}
    seconds: dict[str, list[float]] = {name: [] for name in names}

    def failed(name: str, error: Exception) -> None:
        log = ENVIRONMENTS / f"{name}.log"
        if name in peers and peers[name].log.exists():
            log.write_bytes(peers.pop(name).log.read_bytes())
        results[name] = {"failed": f"{type(error).__name__}: {error}"[:200]}

    try:
        for name in names:
            print(f"{LIBRARIES[name]} ...", file=sys.stderr, flush=True)
            try:
                python = (
                    Path(sys.executable) if name == "ours" else environment(ENVIRONMENTS / name, HERE / f"{name}.py")
                )
                peers[name] = Peer(name, where / name, python, shared)
            except (subprocess.SubprocessError, OSError, RuntimeError) as error:
                log = where / name / "log"
                last = [line for line in log.read_text().splitlines() if line.strip()][-1:] if log.exists() else []
                results[name] = {"failed": "; ".join([f"{type(error).__name__}: {error}", *last])[:300]}
        for _ in range(repetitions):
            for name, peer in list(peers.items()):
                try:
                    seconds[name].append(peer.rounds(rounds))
                except (OSError, RuntimeError) as error:
                    failed(name, error)
        for name, peer in list(peers.items()):
            try:
                vector = peer.finish()
            except (OSError, subprocess.SubprocessError) as error:
                failed(name, error)
                continue
            results[name] = {
                "rounds_per_s": 1 / statistics.median(seconds[name]),
                "range": [1 / max(seconds[name]), 1 / min(seconds[name])], "startup_s": peer.startup, "peak_mb": peer.peak,
                "vector": vector,
            }  # fmt: skip
    finally:
        for peer in peers.values():
            peer.stop()
    return {name: results[name] for name in names}


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return a Markdown table with a row for each library."""
    rows = [
        "| library | configuration | rounds per second (range) | first round after | peak PSS in MiB | accuracy |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        source = (HERE / f"{name}.py").read_text().splitlines()
        configuration = next(line.split('"')[1] for line in source if line.startswith("SETTING = "))
        packages = [*constant(HERE / f"{name}.py", "REQUIREMENTS"), *constant(HERE / f"{name}.py", "ALONE")]
        versions = " ".join(package for package in packages if "==" in package)
        title = f"{LIBRARIES[name]} (`{versions}`)" if versions else LIBRARIES[name]
        if "failed" in result:
            rows.append(f"| {title} | not run: {result['failed']} | - | - | - | - |")
            continue
        low, high = result["range"]
        rows.append(
            f"| {title} | {configuration} | {result['rounds_per_s']:.2f} ({low:.2f}-{high:.2f}) | "
            f"{result['startup_s']:.1f} s | {result['peak_mb']:.0f} | {100 * result['accuracy']:.1f} % |"
        )
    return "\n".join(rows)


def main() -> None:
    """Measure the libraries and print the table."""
    parser = argparse.ArgumentParser(prog="python -m speed.peers", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("libraries", nargs="*", metavar="LIBRARY", help=", ".join(LIBRARIES))
    parser.add_argument(
        "--data", help="CIFAR-10 parquet file; by default the one next to the checkout, or random images"
    )
    parser.add_argument("--setting", choices=sorted(WORKLOADS), default="A", help="the workload")
    parser.add_argument("--repetitions", type=int, default=5, help="measurements of each library")
    parser.add_argument("--rounds", type=int, default=5, help="rounds in each measurement")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    if unknown := set(args.libraries) - set(LIBRARIES):
        parser.error(f"unknown library: {', '.join(sorted(unknown))}; the libraries are {', '.join(LIBRARIES)}")
    if not hasattr(os, "mkfifo"):
        parser.error("this system has no named pipes")
    workload = WORKLOADS[args.setting]
    path = args.data or (str(CIFAR) if CIFAR.exists() else None)
    train, test = load_samples(workload, path)
    rounds = 1 + args.repetitions * args.rounds
    with tempfile.TemporaryDirectory() as folder:
        shared, where = Path(folder) / "shared", Path(folder) / "peers"
        shared.mkdir()
        where.mkdir()
        write_input(shared, args.setting, *train, rounds)
        results = measure(args.libraries or list(LIBRARIES), shared, where, args.repetitions, args.rounds)
    for result in results.values():
        if "vector" in result:
            result["accuracy"] = accuracy(workload.model(), result.pop("vector"), *test)
    m = machine()
    data = ("CIFAR-10" if path else "random images") if workload.images else "generated table"
    print(f"{workload.title}; {data}, {rounds} rounds; "
          f"{m['cores']} cores ({m['cpu']}), Python {m['python']}, torch {m['torch']}\n")  # fmt: skip
    print(table(results))
    if args.json:
        content = {"machine": m, "setting": args.setting, "data": data, "peers": results}
        args.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
