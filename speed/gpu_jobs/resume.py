"""Runs on the device that are killed and resumed, and seeds stacked: ``python -m speed.gpu_jobs.resume OUT [--quick]``

For each method, a run is killed (SIGKILL) after half of its rounds and resumed in a new process. Model and history must
have the bits of a run without interruption. Then ``unskew compare`` runs five seeds with and without stacking.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from speed.gpu_jobs.rows import add_row
from speed.gpu_jobs.settings import SETTINGS
from speed.gpu_jobs.torch_loops import device_name, run_unskew
from unskew import Callback

METHODS = ("fedavg", "scaffold", "fedprox+fedadam", "moon")
SEEDS = "0..4"
STACKED = ("--parallel", "stacked")
"""Options of ``unskew compare`` that train the seeds of a method as one group."""
UNSTACKED = ("--parallel", "1")
"""Options with which one run follows the other."""
NOT_COMPARED = ("seconds", "seconds_", "setup_seconds", "train_seconds", "time")
LIMIT = 150
"""Seconds after which a process is ended."""


class Killer(Callback):
    """Kills the process after a number of rounds, as a scheduler does.

    Args:
        rounds: Number of rounds.
    """

    def __init__(self, rounds: int):
        self.rounds = rounds

    def round(self, row: dict[str, Any]) -> None:
        if row["round"] == self.rounds:
            os.kill(os.getpid(), signal.SIGKILL)


def run_part(folder: Path, method: str, rounds: int, kill_after: int, quick: bool) -> None:
    """Run or resume a run in this process, and print the digests of its model and history.

    Args:
        folder: Run folder.
        method: Method.
        rounds: Number of rounds.
        kill_after: Round after which the process is killed; 0 for never.
        quick: Whether to do next to no work.
    """
    setting = SETTINGS["A"].quick() if quick else replace(SETTINGS["A"], clients=50)
    resume = (folder / "config.yaml").is_file()
    callback = Killer(kill_after) if kill_after else Callback()
    result = run_unskew(
        setting, rounds, callback, method=method, out=folder, resume=resume, eval_every=2, checkpoint_every=1
    )
    history = [
        {name: value for name, value in row.items() if not name.startswith(NOT_COMPARED)} for row in result.history
    ]
    model = hashlib.sha256(result.vector.numpy().tobytes()).hexdigest()
    print(json.dumps({"model": model, "history": hashlib.sha256(json.dumps(history).encode()).hexdigest()}))


def check_resume(out: Path, method: str, quick: bool) -> None:
    """Compare a run that was killed and resumed with one without interruption.

    Args:
        out: Folder of the results.
        method: Method.
        quick: Whether to do next to no work.
    """
    rounds = 4 if quick else 12
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:

        def part(name: str, kill_after: int) -> subprocess.CompletedProcess:
            values = [
                "--part",
                f"{folder}/{name}",
                method,
                str(rounds),
                str(kill_after),
                *(["--quick"] if quick else []),
            ]
            command = [sys.executable, "-m", "speed.gpu_jobs.resume", str(out), *values]
            return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)

        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(part, "whole", 0)
            killed = part("parts", rounds // 2)
            resumed = part("parts", 0)
            whole = running.result()
    row: dict[str, Any] = {"seconds": time.monotonic() - begin, "killed": killed.returncode == -signal.SIGKILL}
    try:
        ours, theirs = (json.loads(done.stdout.splitlines()[-1]) for done in (whole, resumed))
        row |= {f"{name}_equal": ours[name] == theirs[name] for name in ours}
    except (IndexError, ValueError):
        row["error"] = (whole.stderr + resumed.stderr)[-300:]
    add_row(out, "resume", method, card=device_name(), **row)


def final_metrics(folder: Path) -> dict[str, float]:
    """Return the final accuracy of each run of a comparison, by its folder."""
    summaries = sorted(folder.rglob("summary.json"))
    return {str(file.parent.relative_to(folder)): json.loads(file.read_text()).get("accuracy") for file in summaries}


def comparison_options(quick: bool, data_path: str | None) -> list[str]:
    """Return the options of ``unskew compare``: setting B on CIFAR-10, or a small model on digits.

    Args:
        quick: Whether to do next to no work.
        data_path: Folder with the files of CIFAR-10; None for digits.
    """
    data = ["--data", "digits", "--model", "mlp", "--clients", "20", "--participation", "0.5", "--partition", "iid"]
    if data_path is not None:
        data = ["--data", "cifar10", "--data-path", data_path, "--model", "cnn", "--partition", "iid"]
        data += ["--clients", "1000", "--participation", "0.05"]
    rounds = "2" if quick else "100"
    return [
        *data, "--local-steps", "5", "--batch-size", "10", "--lr", "0.05", "--rounds", rounds, "--eval-every", rounds,
        "--engine", "vectorized", "--device", "cuda" if torch.cuda.is_available() else "cpu", "--no-references",
        "--set", "eval_clients=0",
    ]  # fmt: skip


def compare_seeds(out: Path, quick: bool, data_path: str | None) -> None:
    """Time ``unskew compare`` over several seeds with and without stacking.

    Args:
        out: Folder of the results.
        quick: Whether to do next to no work.
        data_path: Folder with the files of CIFAR-10; None for digits.
    """
    seconds: dict[str, float] = {}
    metrics: dict[str, dict[str, float]] = {}
    folder = Path(tempfile.mkdtemp())
    for name, stacked in (("one after another", UNSTACKED), ("stacked", STACKED)):
        place = folder / name.replace(" ", "-")
        command = [sys.executable, "-m", "unskew", "compare", "fedavg", "--seeds", SEEDS]
        command += comparison_options(quick, data_path)
        begin = time.monotonic()
        done = subprocess.run([*command, *stacked, "--out", str(place)], capture_output=True, text=True, timeout=LIMIT)
        seconds[name] = time.monotonic() - begin
        if done.returncode:
            add_row(out, "seeds", name, seconds=seconds[name], error=(done.stderr or done.stdout)[-300:])
            continue
        metrics[name] = final_metrics(place)
        add_row(out, "seeds", name, card=device_name(), seconds=seconds[name], runs=len(metrics[name]))
    if len(metrics) == 2:
        plain, stacked_metrics = metrics["one after another"], metrics["stacked"]
        differences = [abs(plain[run] - stacked_metrics[run]) for run in plain.keys() & stacked_metrics.keys()]
        ratio = seconds["one after another"] / seconds["stacked"]
        add_row(
            out,
            "seeds",
            "speedup",
            ratio=ratio,
            runs=len(differences),
            largest_difference=max(differences, default=None),
        )
    shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="next to no work, as a test of this script")
    parser.add_argument("--data-path", help="folder with the files of CIFAR-10 for the seeds; digits if omitted")
    parser.add_argument("--only", choices=("resume", "seeds"), help="one of the two parts")
    parser.add_argument("--part", nargs=4, help="run folder, method, rounds and round of the kill; used by this script")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.part is not None:
        folder, method, rounds, kill_after = args.part
        run_part(Path(folder), method, int(rounds), int(kill_after), args.quick)
        return
    results: dict[str, Future[None]] = {}
    with ThreadPoolExecutor(
        1 if args.quick else len(METHODS)
    ) as pool:  # nothing is timed, so all use the device at once
        for method in () if args.only == "seeds" else METHODS:
            results[method] = pool.submit(check_resume, args.out, method, args.quick)
    if args.only != "resume":
        with ThreadPoolExecutor(1) as pool:
            results["seeds"] = pool.submit(compare_seeds, args.out, args.quick, args.data_path)
    for name, result in results.items():
        error = result.exception()
        if error is not None:
            add_row(args.out, "failed", name, error=f"{type(error).__name__}: {str(error)[:300]}")


if __name__ == "__main__":
    main()
