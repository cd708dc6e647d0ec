"""The same rounds of FedAvg in unskew and in other libraries: ``python -m benchmarks.peers [LIBRARY ...]``.

CNN-A on CIFAR-10, or on noise of its shape where no images are found. Each library gets the same decoded images, the same
first model and the same cohorts; the libraries are measured in turn, so that a busy machine slows all of them. Each lives in
an interpreter of its own, which is made in ``benchmarks/.venv`` when it is first needed. PyTorch is that of this interpreter.
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

from benchmarks.baselines import SETTINGS, CnnA, draw_cohort
from benchmarks.peers.work import MEAN, STD
from benchmarks.speed import CIFAR, machine
from benchmarks.timing import load_images
from conformance.environments import constant, environment

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / "benchmarks" / ".venv"
LIBRARIES = {
    "ours": "unskew",
    "pfl_research": "pfl-research",
    "fedlab": "FedLab",
    "flower": "Flower",
    "fedjax": "FedJAX",
}
PATIENCE = 300
"""Seconds in which a library must have finished what it was asked for."""


class Peer:
    """A library at work in processes of its own.

    Args:
        name: Its module here.
        folder: Where its files and pipes are made.
        python: Its interpreter.
        shared: The folder of what all libraries are given.
    """

    def __init__(self, name: str, folder: Path, python: Path, shared: Path):
        folder.mkdir()
        for file in shared.iterdir():
            (folder / file.name).symlink_to(file)
        for pipe in ("turns", "answers"):
            os.mkfifo(folder / pipe)
        self.folder, self.log = folder, folder / "log"
        module, processes = f"benchmarks.peers.{name}", number(HERE / f"{name}.py", "TORCHRUN")
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
        self.answers: TextIO = _opened(folder / "answers", "r", self.process)
        self._wait()
        self.startup = time.perf_counter() - self.began

    def _wait(self) -> None:
        if not self.answers.readline():
            raise RuntimeError("it ended")

    def rounds(self, count: int) -> float:
        """Seconds per round of the next ``count`` rounds."""
        began = time.perf_counter()
        for _ in range(count):
            self.turns.write("go\n")
            self.turns.flush()
            self._wait()
        self.peak = max(self.peak, resident(self.process.pid))
        return (time.perf_counter() - began) / count

    def finish(self) -> np.ndarray:
        """End it; returns its last model."""
        with contextlib.suppress(BrokenPipeError):  # it counts rounds itself and has ended
            self.turns.write("end\n")
            self.turns.close()
        self.process.wait(PATIENCE)
        return np.load(self.folder / "model.npy")

    def stop(self) -> None:
        """End its processes, however they are."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)


def number(module: Path, name: str) -> int:
    """What a module that is not imported sets ``name`` to, or 0."""
    line = next((line for line in module.read_text().splitlines() if line.startswith(f"{name} = ")), "0 = 0")
    return int(line.partition("=")[2])


def _opened(pipe: Path, mode: str, process: subprocess.Popen[bytes]) -> TextIO:
    """A pipe, as soon as the other side has it; what would wait for ever for a process that ended is an error."""
    found: list[TextIO] = []
    opening = threading.Thread(target=lambda: found.append(pipe.open(mode)), daemon=True)
    opening.start()
    for _ in range(PATIENCE * 10):
        opening.join(0.1)
        if found:
            return found[0]
        if process.poll() is not None:
            break
    raise RuntimeError("it ended before its first round" if process.poll() is not None else "it did not begin in time")


def resident(root: int) -> float:
    """PSS in MiB of a process and all that it started."""
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


def accuracy(vector: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    """Of CNN-A with these parameters."""
    model = CnnA()
    torch.nn.utils.vector_to_parameters(torch.from_numpy(vector.astype(np.float32)), model.parameters())
    inputs = (torch.from_numpy(x).float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    with torch.no_grad():
        found = torch.cat([model(part.permute(0, 3, 1, 2)).argmax(1) for part in inputs.split(500)])
    return float((found == torch.from_numpy(y)).float().mean())


def prepared(folder: Path, x: np.ndarray, y: np.ndarray, setting: dict[str, Any], rounds: int) -> None:
    """Write what all libraries are given."""
    count = setting["clients"] * setting["per_client"]
    np.save(folder / "x.npy", x[:count])
    np.save(folder / "y.npy", y[:count])
    torch.manual_seed(setting["seed"])
    np.save(folder / "start.npy", torch.nn.utils.parameters_to_vector(CnnA().parameters()).detach().numpy())
    cohorts = [draw_cohort(setting["clients"], setting["cohort"], setting["seed"], t) for t in range(rounds)]
    about = {name: setting[name] for name in ("clients", "per_client", "steps", "batch", "lr")}
    (folder / "work.json").write_text(json.dumps({**about, "cohorts": cohorts}))


def compared(names: list[str], shared: Path, where: Path, repetitions: int, rounds: int) -> dict[str, dict[str, Any]]:
    """What was measured of each library, or why it was not."""
    peers: dict[str, Peer] = {}
    found: dict[str, dict[str, Any]] = {}
    seconds: dict[str, list[float]] = {name: [] for name in names}

    def absent(name: str, error: Exception) -> None:
        log = ENVIRONMENTS / f"{name}.log"
        if name in peers and peers[name].log.exists():
            log.write_bytes(peers.pop(name).log.read_bytes())
        found[name] = {"absent": f"{type(error).__name__}: {error}"[:200]}

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
                found[name] = {"absent": "; ".join([f"{type(error).__name__}: {error}", *last])[:300]}
        for _ in range(repetitions):
            for name, peer in list(peers.items()):
                try:
                    seconds[name].append(peer.rounds(rounds))
                except (OSError, RuntimeError) as error:
                    absent(name, error)
        for name, peer in list(peers.items()):
            try:
                vector = peer.finish()
            except (OSError, subprocess.SubprocessError) as error:
                absent(name, error)
                continue
            found[name] = {
                "rounds_per_s": 1 / statistics.median(seconds[name]), "startup_s": peer.startup, "peak_mb": peer.peak,
                "vector": vector,
            }  # fmt: skip
    finally:
        for peer in peers.values():
            peer.stop()
    return {name: found[name] for name in names}


def table(found: dict[str, dict[str, Any]]) -> str:
    """In Markdown, a row for each library."""
    rows = [
        "| library | how | rounds per second | first round after | peak PSS in MiB | accuracy |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        how = next(
            line.split('"')[1]
            for line in (HERE / f"{name}.py").read_text().splitlines()
            if line.startswith("SETTING = ")
        )
        wanted = " ".join(
            w for part in ("REQUIREMENTS", "ALONE") for w in constant(HERE / f"{name}.py", part) if "==" in w
        )
        title = " ".join(filter(None, [LIBRARIES[name], wanted and f"(`{wanted}`)"]))
        if "absent" in one:
            rows.append(f"| {title} | not run: {one['absent']} | - | - | - | - |")
            continue
        rows.append(
            f"| {title} | {how} | {one['rounds_per_s']:.2f} | {one['startup_s']:.1f} s | {one['peak_mb']:.0f} | "
            f"{100 * one['accuracy']:.1f} % |"
        )
    return "\n".join(rows)


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("libraries", nargs="*", metavar="LIBRARY", help=", ".join(LIBRARIES))
    parser.add_argument("--data", help="CIFAR-10 parquet file; ../shared/data's if it is there, else random images")
    parser.add_argument("--setting", choices=sorted(SETTINGS), default="A", help="as in benchmarks.speed")
    parser.add_argument("--repetitions", type=int, default=5, help="measurements of each library")
    parser.add_argument("--rounds", type=int, default=5, help="rounds in each measurement")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    args = parser.parse_args()
    if unknown := set(args.libraries) - set(LIBRARIES):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(LIBRARIES)}")
    if not hasattr(os, "mkfifo"):
        parser.error("this needs named pipes, which this system has not")
    path = args.data or (str(CIFAR) if CIFAR.exists() else None)
    x, y = load_images(path)
    setting = SETTINGS[args.setting]
    count = setting["clients"] * setting["per_client"]
    held = Path(path).with_name("test.parquet") if path else None
    test = load_images(str(held)) if held is not None and held.exists() else (x[:count][-5000:], y[:count][-5000:])
    with tempfile.TemporaryDirectory() as folder:
        shared, where = Path(folder) / "shared", Path(folder) / "peers"
        shared.mkdir()
        where.mkdir()
        prepared(shared, x, y, setting, 1 + args.repetitions * args.rounds)
        found = compared(args.libraries or list(LIBRARIES), shared, where, args.repetitions, args.rounds)
    for one in found.values():
        if "vector" in one:
            one["accuracy"] = accuracy(one.pop("vector"), *test)
    m = machine()
    print(f"Setting {args.setting}, {'CIFAR-10' if path else 'random images'}, {1 + args.repetitions * args.rounds} rounds; "
          f"{m['cores']} cores ({m['cpu']}), Python {m['python']}, torch {m['torch']}\n")  # fmt: skip
    print(table(found))
    if args.json:
        figures = {"machine": m, "setting": args.setting, "images": "CIFAR-10" if path else "random", "peers": found}
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
