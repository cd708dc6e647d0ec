"""Jobs 6 to 12 of the list in ``README.md``, in the order of what they decide, within a number of minutes.

``python -m speed.gpu_jobs.papers OUT --minutes 9 --data-path FOLDER`` runs in the repository. Every outcome is added to
``results/runs``; the files there that changed are copied to ``OUT/results``, and unfinished runs to ``OUT/state``. Where the
disk is not kept, bring both back: ``OUT/results`` as ``results/runs``, and ``OUT/state`` as the folder of ``--state``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

RESULTS = Path("results/runs")
START = 20.0
"""Seconds that a command takes to start and to write its report; with fewer than twice as many left, none is started."""
PATIENCE = 60.0
"""Seconds that an interrupted command has to finish its round and save it."""
COG = ("reproduce", "fedcog/table-1")
ALS = ("--seeds", "0,1,2")
PEER = ("--trust-code", "--no-references", "--seeds", "0")
TEN = ("fedavg", "scaffold", "feddyn", "fedexp", "ft", "fedavgm", "ditto", "fedspeed", "fedala", "fedprox")
JOBS: dict[int, list[tuple[str, ...]]] = {
    6: [(*COG, "--row", "FedAvg", "--row", "FedCOG"), COG],
    7: [
        ("reproduce", "fedals/table-1", *ALS, "--column", "sorted", "--row", "FedAvg", "--row", "FedALS"),
        ("reproduce", "fedals/table-1", *ALS, "--column", "sorted", "--row", "FedALS, α = 5", "--row", "SCAFFOLD"),
        ("reproduce", "fedals/learning-rate", "--seeds", "0"),
    ],
    8: [
        (
            *("reproduce", "feddle/table-5", "--row", "FedAvg", "--row", "Feddle-ID", "--row", "Fed+FT"),
            *("--row", "HFCL", "--row", "Center", "--row", "FedDF-ID"),
            *("--row", "FedAsync", "--row", "FedBuff", "--row", "CA2FL"),
        )
    ],
    9: [
        ("compare", "fedavg", "scaffold", "--config", "speed/gpu_jobs/fl-simulator.yaml", *PEER),
        ("compare", "fedavg", "--config", "speed/gpu_jobs/pfllib.yaml", *PEER),
    ],
    10: [
        (
            *("reproduce", "fedssyn/table-1", "--seeds", "0", "--column", "N=10, C=1, α=0.01"),
            *("--row", "FedAvg", "--row", "FedAvg + Fedssyn"),
        )
    ],
    11: [("compare", *TEN, "--config", "speed/gpu_jobs/cifar10-resnet18.yaml", *PEER)],
    12: [("reproduce", f"fedcog/table-{number}") for number in (6, 7, 8, 10)],
}


def command_of(job: Sequence[str], state: Path, scale: str, device: str, minutes: float) -> list[str]:
    """Return the words of a command.

    Args:
        job: Command of the list.
        state: Folder of unfinished runs.
        scale: Scale of tables.
        device: Device of the runs.
        minutes: Time for the command.
    """
    words = [sys.executable, "-m", "unskew", *job, "--parallel", "auto", "--device", device]
    if job[0] == "compare":
        out = state / Path(job[job.index("--config") + 1]).stem
        return [*words, "--out", str(out), *(["--resume"] if out.exists() else [])]
    return [*words, "--scale", scale, "--minutes", f"{minutes:.2f}", "--runs", str(state / "reproduce"), "--json"]


def run(words: Sequence[str], seconds: float) -> str:
    """Run a command, which is interrupted when the time is over, and return what it prints.

    Args:
        words: Words of the command.
        seconds: Time for the command; tables stop by themselves.
    """
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            return process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=PATIENCE)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            return process.communicate()[0]


def drop_finished(state: Path) -> None:
    """Remove reports and the folders of a table's finished runs; common rounds are kept, from which other runs start."""
    for report in state.glob("*/*.html"):
        report.unlink()
    for summary in (state / "reproduce").glob("*/summary.json"):
        if "base_run: true" not in (summary.parent / "config.yaml").read_text():
            shutil.rmtree(summary.parent)


def main() -> None:
    """Run the jobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for outcomes and unfinished runs")
    parser.add_argument("--minutes", type=float, required=True, help="time for all jobs")
    parser.add_argument("--jobs", type=int, nargs="+", choices=JOBS, default=list(JOBS), help="numbers of jobs")
    parser.add_argument("--state", type=Path, default=Path("runs/papers"), help="folder of unfinished runs")
    parser.add_argument("--data-path", help="folder with the files of CIFAR-10")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", default="paper")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    before = {path: path.read_bytes() for path in RESULTS.rglob("*.jsonl")}
    for job in (job for number in options.jobs for job in JOBS[number]):
        left = end - time.monotonic()
        if left < 2 * START:
            break
        data = (
            ["--data-path", options.data_path] if options.data_path and "speed/gpu_jobs/pfllib.yaml" not in job else []
        )
        words = command_of(job, options.state, options.scale, options.device, (left - START) / 60)
        printed = run([*words, *data], left + PATIENCE * (job[0] == "reproduce"))
        with suppress(ValueError):
            printed = json.dumps(json.loads(printed)["progress"], ensure_ascii=False)
        print(f"{' '.join(job)}: {printed}", flush=True)
    drop_finished(options.state)
    for path in RESULTS.rglob("*.jsonl"):
        if before.get(path) != path.read_bytes():
            copy = options.out / "results" / path.relative_to(RESULTS)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
    if options.state.is_dir():
        shutil.copytree(options.state, options.out / "state", dirs_exist_ok=True)


if __name__ == "__main__":
    main()
